"""Win rates, and the streaming scorer with several rewards at once, some of which fail.

Oracles: win rates by hand from a table of verdicts; a stub judge whose answers are a known function of the two
images, so any mix-up of pairs, groups or orders shows. One reward's missing value must not affect other samples or
rewards, and a slow streaming reward must not block the others.
"""

import asyncio
import json
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from ranks import until
from servers import JudgeServer
from world import grey

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.judge.client import Judge
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.log import log_judgements, truncate_log
from prefgrpo.rewards.pairs import VlmPairwise
from prefgrpo.rewards.scorer import DEADLINE_PASSED, Scorer

LEVELS = [10, 20, 40, 80]


def level(media):
    return int(media.pixels[0, 0, 0])


def sample(value, **meta):
    return Sample("p", grey(value, 8), meta=meta)


def run(scorer, levels, groups=(7, 9), step=0, order=None):
    """Score len(groups) × group_size samples, added in `order`; each group's levels are shifted by one more."""
    scorer.begin(step, groups)
    keys = [(g, m) for g in groups for m in range(scorer.group_size)]
    for g, m in keys if order is None else [keys[k] for k in order]:
        scorer.add(g, m, sample(levels[(m + groups.index(g)) % len(levels)]))
    return scorer.finish()


# Pairs


class StubJudge(Judge):
    """P(first) = a / (a + b) of the grey levels; pairs with a level in `broken` fail, with one in `hang` never end."""

    model = "stub"
    clips = True

    def __init__(self, streams=True, broken=(), hang=()):
        self.streams, self.broken, self.hang = streams, set(broken), set(hang)

    def _answer(self, media):
        a, b = map(level, media)
        if {a, b} & self.broken:
            return Answer(None, "broken on purpose", seconds=0.1, retries=2)
        return Answer(a / (a + b), seconds=0.1)

    def ask_all(self, queries):
        return [self._answer(query.media) for query in queries]

    async def ask(self, query, once=False):
        if set(map(level, query.media)) & self.hang:
            await asyncio.Event().wait()
        return self._answer(query.media)


def pairs(judge, size=4, plan="both_orders", **options):
    return Scorer({"vlm_pairwise": VlmPairwise(judge, plan=plan)}, size, **options)


def by_hand(levels):
    return [np.mean([a / (a + b) for j, b in enumerate(levels) if j != i]) for i, a in enumerate(levels)]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("plan", ["both_orders", "round_robin"])
def test_win_rates_by_hand(streams, plan):
    result = run(pairs(StubJudge(streams), plan=plan), LEVELS)
    expected = [by_hand([10, 20, 40, 80]), by_hand([20, 40, 80, 10])]
    np.testing.assert_allclose(result.values["vlm_pairwise"], expected, rtol=1e-6)
    assert result.metrics["judge/requests"] == (24 if plan == "both_orders" else 12)
    assert result.metrics["judge/failures"] == 0 and result.reasons == {}
    assert ("judge/order_inconsistency" in result.metrics) == (plan == "both_orders")


@pytest.mark.parametrize(
    ("plan", "asked"),
    [("round_robin", 28), ("both_orders", 56), ("k_regular(3)", 12)],
)
def test_plans_ask_the_same_streamed_or_not_in_any_order_of_arrival(plan, asked):
    levels, rng, found = [10, 20, 40, 80, 15, 25, 45, 85], np.random.default_rng(0), []
    for streams, order in ((False, None), (True, None), (True, range(15, -1, -1)), (True, rng.permutation(16))):
        result = run(pairs(StubJudge(streams), 8, plan), levels, order=order)
        listed = [list(verdicts) for verdicts in result.answers["vlm_pairwise"]]
        found.append((result.values["vlm_pairwise"].tobytes(), listed))
    assert all(one == found[0] for one in found) and [len(p) for p in found[0][1]] == [asked] * 2


def test_pairs_go_out_over_http_while_samples_are_made():
    options = {"plan": "k_regular(2)", "round_verdicts": True}
    with JudgeServer(delay_s=0.02) as server:
        judge = {"judge": JudgeConfig((server.url,))}
        rewards = build("vlm_pairwise,jpeg_compressibility", {"vlm_pairwise": judge | options})
        with Scorer(rewards, 8, deadline_s=60) as s:
            s.begin(0, [0, 1])
            asked = len(server.requests)
            for member in range(8):
                for group in (0, 1):
                    s.add(group, member, sample(20 + 25 * member))
                if member == 6:  # pairs of neighbours among existing members
                    until(lambda: len(server.requests) >= asked + 12, 60)
            result = s.finish()
    assert [len(verdicts) for verdicts in result.answers["vlm_pairwise"]] == [8, 8]
    assert [np.flatnonzero(row == 1.0).tolist() for row in result.values["vlm_pairwise"]] == [[7], [7]]
    assert result.metrics["judge/failures"] == 0
    assert list(result.values) == ["vlm_pairwise", "jpeg_compressibility"]


def test_a_b_orders_differ_between_steps_and_repeat_for_a_seed():
    def asked(step, seed):
        result = run(pairs(StubJudge(), plan="round_robin", seed=seed), LEVELS, step=step)
        return [pair for verdicts in result.answers["vlm_pairwise"] for pair in verdicts]

    assert asked(3, 1) == asked(3, 1)
    assert len({tuple(asked(step, seed)) for step in range(3) for seed in range(3)}) > 3


class First(StubJudge):
    """Always prefers the first."""

    def _answer(self, media):
        return Answer(0.95)


def test_a_judge_that_contradicts_itself_rewards_nobody():
    result = run(pairs(First()), LEVELS, groups=(7,))
    assert np.allclose(result.values["vlm_pairwise"], 0.5, atol=1e-12), "position alone gives no advantage"
    assert result.metrics["judge/order_inconsistency"] == 1.0 and result.metrics["judge/position_bias"] == 1.0
    assert result.metrics["judge/failures"] == 0


def test_a_failed_comparison_counts_for_nobody_and_the_log_has_a_line_for_it(tmp_path):
    path = tmp_path / "run" / "judgements.jsonl"
    with pairs(StubJudge(broken=[10]), log_path=path) as s:
        result = run(s, LEVELS, groups=(7,), step=3)
    rates = result.values["vlm_pairwise"][0]
    scores = result.scores["vlm_pairwise"][0]
    assert np.isnan(rates[0]) and (scores[0].value, scores[0].reason) == (None, "broken on purpose")
    np.testing.assert_allclose(rates[1:], by_hand([20, 40, 80]), rtol=1e-6)
    assert result.metrics["judge/failures"] == 6 and result.metrics["judge/retries"] == 12
    assert result.metrics["reward/vlm_pairwise/missing_rate"] == 0.25
    assert result.reasons == {"vlm_pairwise: broken on purpose": 6}, "comparisons, not their members as well"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 12 and {line["step"] for line in lines} == {4}, "counted from 1"
    assert sum(line["p_first"] is None for line in lines) == 6
    assert all(len(json.dumps(line)) < 400 for line in lines), "a logged line contains pixels"


def test_a_long_answer_is_logged_with_its_beginning_and_its_end(tmp_path):
    path = tmp_path / "judgements.jsonl"
    said = f"<think>First{'.' * 9000}</think><answer>Image 1</answer>"
    log_judgements(path, "r", 0, 0, "p", {(0, 1): Answer(1.0, raw=said), (1, 0): Answer(0.0, raw="Image 2")})
    first, second = (json.loads(line)["raw"] for line in path.read_text().splitlines())
    assert first.startswith("<think>First.") and first.endswith(said[-1500:]) and len(first) < 2100
    assert second == "Image 2"


def test_a_resumed_run_drops_the_steps_that_it_repeats_and_what_a_dying_node_left(tmp_path):
    path = tmp_path / "judgements.jsonl"
    with pairs(StubJudge(), log_path=path) as s:
        run(s, LEVELS, groups=(7,), step=3)
        kept = path.read_bytes()
        with path.open("ab") as file:  # a node that dies can leave zeros for what it had not written
            file.write(bytes(50) + b'"prompt": "p"}\n')
        run(s, LEVELS, groups=(7,), step=4)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "rew')
    truncate_log(path, 4)
    assert path.read_bytes() == kept


@pytest.mark.parametrize("streams", [True, False])
def test_a_sample_that_was_never_made_is_missing(streams):
    s = pairs(StubJudge(streams))
    s.begin(0, [5])
    for member in (0, 1, 3):
        s.add(5, member, sample(LEVELS[member]))
    rates = s.finish().values["vlm_pairwise"][0]
    assert np.isnan(rates[2])
    np.testing.assert_allclose(rates[[0, 1, 3]], by_hand([10, 20, 80]), rtol=1e-6)


# Samples


class Level(Reward):
    """The grey level, or its entry in `table`; an exception in the table is raised and so fails the whole call."""

    def __init__(self, **table):
        self.table = {int(key[1:]): value for key, value in table.items()}

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        given = [self.table.get(level(s.media), Answer(float(level(s.media)))) for s in samples]
        for value in given:
            if isinstance(value, Exception):
                raise value
        return given


class Raises(StubJudge):
    """Raises for every group, and for a single pair with level 10."""

    def ask_all(self, queries):
        raise RuntimeError("no such kernel")

    async def ask(self, query, once=False):
        if 10 in map(level, query.media):
            raise RuntimeError("the loop is gone")
        return self._answer(query.media)


class Streaming(Reward):
    """Never answers by itself: the test resolves its futures."""

    streams = True

    def __init__(self, count):
        self.seen, self.waiting, self.complete, self.count = [], [], threading.Event(), count

    def ask(self, asked):
        raise AssertionError("a streaming reward is not called in bulk")

    async def ask_one(self, *samples):
        self.seen.append(level(samples[0].media))
        self.waiting.append(Future())
        if len(self.seen) == self.count:
            self.complete.set()
        return await asyncio.wrap_future(self.waiting[-1])


def test_values_that_are_missing_not_finite_or_raised_are_nan_and_counted(capfd):
    rewards = {"odd": Level(v10=Answer(None, "too dark"), v20=Answer(float("nan")), v40=Answer(float("inf")))}
    rewards |= {"raises": Level(v20=RuntimeError("out of memory")), "whole": Level()}
    rewards["pairs"] = VlmPairwise(Raises())
    rewards["groups"] = VlmPairwise(Raises(False))
    result = run(Scorer(rewards, 4), LEVELS, groups=(1,))
    nan = np.nan
    expected = {"odd": [nan, nan, nan, 80], "raises": [10, nan, 40, 80], "groups": [nan] * 4, "whole": LEVELS}
    expected["pairs"] = [nan, *by_hand(LEVELS[1:])]
    for name, values in expected.items():
        np.testing.assert_allclose(result.values[name], [values], rtol=1e-6)
    assert result.reasons == {
        "odd: too dark": 1, "odd: the reward returned nan": 1, "odd: the reward returned inf": 1,
        "raises: the reward raised RuntimeError: out of memory": 1,
        "groups: the reward raised RuntimeError: no such kernel": 12,
        "pairs: the reward raised RuntimeError: the loop is gone": 6,
    }  # fmt: skip
    assert capfd.readouterr().err.count("Traceback") == 2, "the traceback must be logged"


@pytest.mark.parametrize("gives", [1.0, None])
def test_what_is_no_score_is_told(gives):
    result = run(Scorer({"odd": Level(v10=gives)}, 2), [10, 10])
    message = f"Level.ask: expected one Answer for each of 4 questions, got 4 of {type(gives).__name__}"
    assert np.isnan(result.values["odd"]).all() and result.reasons == {f"odd: {message}": 4}


def test_streaming_rewards_get_samples_at_once_and_the_others_run_meanwhile():
    """The bulk reward answers only after the streaming one has seen every sample, so running in series would hang."""
    streaming = Streaming(8)

    class Slow(Level):
        def ask(self, asked):
            assert streaming.complete.wait(600)
            for future, value in zip(streaming.waiting[::-1], streaming.seen[::-1], strict=True):
                if not future.done():
                    future.set_result(Answer(value * 2.0))
            return super().ask(asked)

    result = run(Scorer({"slow": Slow(), "streaming": streaming}, 4), LEVELS)
    assert streaming.seen == [10, 20, 40, 80, 20, 40, 80, 10]
    assert np.array_equal(result.values["streaming"], 2 * result.values["slow"])
    assert {"reward/slow/latency_p50", "reward/streaming/latency_p95"} <= set(result.metrics)


def test_an_in_process_reward_scores_a_group_while_the_next_is_generated(monkeypatch):
    """Complete groups are scored at once, in another thread, and `add` waits for nobody."""
    monkeypatch.setattr("prefgrpo.rewards.scorer.AT_ONCE", 4)
    scored = threading.Event()
    rollout = threading.current_thread()

    class Told(Level):
        def ask(self, asked):
            assert threading.current_thread() is not rollout
            scored.set()
            return super().ask(asked)

    with Scorer({"told": Told()}, 4) as scorer:
        scorer.begin(0, [1, 2])
        for member, value in enumerate(LEVELS):
            assert not scored.is_set(), "the group is not complete"
            scorer.add(1, member, sample(value))
        assert scored.wait(600)
        for member in (0, 2, 3):  # a member of the second group is never made
            scorer.add(2, member, sample(LEVELS[member]))
        np.testing.assert_array_equal(scorer.finish().values["told"], [LEVELS, [10, np.nan, 40, 80]])


def test_a_second_step_may_begin_before_the_first_is_finished():
    """Each step keeps its own scores, pairs, requests and failures, in whatever order samples arrive."""
    alone = [run(pairs(StubJudge(), seed=3, plan="round_robin"), LEVELS, (g,), step=k) for k, g in ((4, 7), (5, 9))]
    both = pairs(StubJudge(), seed=3, plan="round_robin")
    both.begin(4, [7])
    both.begin(5, [9], ahead=True)
    for member in range(4):
        both.add(9, member, sample(LEVELS[member]))
        both.add(7, member, sample(LEVELS[member]))
    for expected, group in zip(alone, (7, 9), strict=True):
        found = both.finish()
        assert np.array_equal(found.values["vlm_pairwise"], expected.values["vlm_pairwise"])
        assert found.answers == expected.answers and list(found.samples) == [group]
    with JudgeServer() as server:
        reward = {"vlm_pairwise": {"judge": JudgeConfig((server.url,))}}
        with Scorer(build("vlm_pairwise", reward), 2, deadline_s=600) as s:
            s.begin(0, [0])
            s.begin(1, [1], ahead=True)
            server.fault, server.count = "garbage", 2
            for group in (0, 1):
                for member in (0, 1):
                    s.add(group, member, sample(50 + 100 * member + group))
                if not group:
                    until(lambda: not server.count, 600)
            found = [s.finish().metrics for _ in range(2)]
    assert [(m["judge/requests"], m["judge/failures"], m["judge/parse_failure_rate"]) for m in found] == [
        (2, 2, 1.0), (2, 0, 0.0),
    ]  # fmt: skip


def test_the_deadline_bounds_the_wait_and_late_answers_are_missing():
    rewards = {"pairs": VlmPairwise(StubJudge(hang=[10])), "silent": Streaming(4), "level": Level()}
    result = run(Scorer(rewards, 4, deadline_s=0.2), LEVELS, groups=(7,))
    missing = {name: np.isnan(values[0]).tolist() for name, values in result.values.items()}
    assert missing == {"pairs": [True, False, False, False], "silent": [True] * 4, "level": [False] * 4}
    assert result.reasons[f"silent: {DEADLINE_PASSED}"] == 4 and f"pairs: {DEADLINE_PASSED}" in result.reasons
    assert {n for n in result.metrics if "latency_p50" in n} == {f"reward/{n}/latency_p50" for n in ("pairs", "level")}


def test_an_interrupt_while_answers_are_awaited_leaves_none_running():
    streaming = Streaming(8)
    scorer = Scorer({"streaming": streaming}, 4, deadline_s=60)

    def interrupt(_):
        raise KeyboardInterrupt

    scorer.begin(0, [7, 9])
    for group in (7, 9):
        for member in range(4):
            scorer.add(group, member, sample(LEVELS[member]))
    assert streaming.complete.wait(60)
    for answer in streaming.waiting[:4]:
        answer.set_result(Answer(1.0))
    with pytest.raises(KeyboardInterrupt):
        scorer.finish(interrupt)
    scorer.close()
    until(lambda: all(answer.cancelled() for answer in streaming.waiting[4:]), 60)
