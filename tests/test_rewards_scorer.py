"""Win rates and the streaming scorer.

Oracles: win rates by hand from a table of verdicts; a stub judge whose answers are a known function of the two
pictures, so any mix-up of pairs, groups or orders shows. Cases: missing verdicts and members, both verdict kinds,
every order of arrival, overlap with a slow server (measured), the deadline, and a mixed set of rewards.
"""

import json
import time
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import JudgeServer

from prefgrpo.config.schema import ConfigError, JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge.rate import Rating
from prefgrpo.judge.verdict import PairJudge, Verdict
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Comparison, PointwiseReward, Sample, Score
from prefgrpo.rewards.flight import LATE
from prefgrpo.rewards.pairwise import VlmPairwise, open_judge, tally
from prefgrpo.rewards.scorer import Scorer


def level(media):
    return int(media.pixels[0, 0, 0])


class StubJudge(PairJudge):
    """P(first) = its share of the two grey levels; pairs with a level in `broken` fail."""

    def __init__(self, streams, broken=(), hang=()):
        self.streams, self.broken, self.hang, self.asked = streams, set(broken), set(hang), 0

    def _verdict(self, first, second):
        self.asked += 1
        a, b = level(first), level(second)
        if {a, b} & self.broken:
            return Verdict(None, "broken on purpose", 0.1, retries=2)
        return Verdict(a / (a + b), "", 0.1)

    def judge_group(self, prompt, media, pairs):
        return [self._verdict(media[i], media[j]) for i, j in pairs]

    def submit(self, prompt, first, second):
        future = Future()
        if not {level(first), level(second)} & self.hang:
            future.set_result(self._verdict(first, second))
        return future


def sample(value, prompt="p"):
    return Sample(prompt, Media(np.full((8, 8, 3), value, np.uint8)))


def scorer(judge, size=4, plan="both_orders", verdict="soft", **options):
    return Scorer({"vlm_pairwise": VlmPairwise(judge, plan, verdict)}, size, **options)


def run(s, levels, groups=(7, 9), step=0, order=None):
    """Score len(groups) × len(levels) samples, added in `order`."""
    s.begin(step, groups)
    keys = [(g, m) for g in groups for m in range(s.group_size)]
    for k in order if order is not None else range(len(keys)):
        g, m = keys[k]
        s.add(g, m, sample(levels[(m + groups.index(g)) % len(levels)]))
    return s.finish()


def by_hand(levels):
    return [np.mean([a / (a + b) for j, b in enumerate(levels) if j != i]) for i, a in enumerate(levels)]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("plan", ["both_orders", "round_robin"])
def test_win_rates_by_hand(streams, plan):
    result = run(scorer(StubJudge(streams), plan=plan), [10, 20, 40, 80])
    expected = [by_hand([10, 20, 40, 80]), by_hand([20, 40, 80, 10])]
    np.testing.assert_allclose(result.values["vlm_pairwise"], expected, rtol=1e-6)
    assert result.metrics["judge/requests"] == (24 if plan == "both_orders" else 12)
    assert result.metrics["judge/failures"] == 0 and result.reasons == {}
    assert ("judge/order_inconsistency" in result.metrics) == (plan == "both_orders")


@given(st.permutations(range(8)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_arrival_changes_nothing(order):
    plain = run(scorer(StubJudge(True), plan="round_robin"), [10, 20, 40, 80])
    mixed = run(scorer(StubJudge(True), plan="round_robin"), [10, 20, 40, 80], order=order)
    assert np.array_equal(plain.values["vlm_pairwise"], mixed.values["vlm_pairwise"])
    pairs = [[(c.first, c.second) for c in g.comparisons] for g in plain.groups["vlm_pairwise"]]
    assert pairs == [[(c.first, c.second) for c in g.comparisons] for g in mixed.groups["vlm_pairwise"]]


@pytest.mark.parametrize("plan", ["swiss(3)", "tournament", "k_regular(3)", "budget(9)"])
def test_plans_in_rounds_ask_the_same_streamed_or_not(plan):
    levels = [10, 20, 40, 80, 15, 25, 45, 85]
    streamed, whole = (run(scorer(StubJudge(s), 8, plan), levels) for s in (True, False))
    assert np.array_equal(streamed.values["vlm_pairwise"], whole.values["vlm_pairwise"], equal_nan=True)
    mixed = run(scorer(StubJudge(True), 8, plan), levels, order=range(15, -1, -1))
    assert np.array_equal(streamed.values["vlm_pairwise"], mixed.values["vlm_pairwise"], equal_nan=True)
    asked = [len(g.comparisons) for g in streamed.groups["vlm_pairwise"]]
    assert asked == [{"swiss(3)": 12, "tournament": 7, "k_regular(3)": 12, "budget(9)": 9}[plan]] * 2


def test_rounds_follow_each_other_over_http():
    with JudgeServer(delay_s=0.02) as server:
        options = {"judge": {"endpoints": (server.url,)}, "plan": "tournament", "verdict": "hard"}
        rewards = build("vlm_pairwise", {"vlm_pairwise": options})
        with Scorer(rewards, 8, deadline_s=60) as s:
            s.begin(0, [0, 1])
            for member in range(8):
                for group in (0, 1):
                    s.add(group, member, sample(20 + 25 * member))
            result = s.finish()
    assert [len(g.comparisons) for g in result.groups["vlm_pairwise"]] == [7, 7]
    assert [np.flatnonzero(row == 1.0).tolist() for row in result.values["vlm_pairwise"]] == [[7], [7]]
    assert result.metrics["judge/failures"] == 0


def test_a_plan_that_does_not_fit_the_group_is_refused_at_once():
    with pytest.raises(ValueError, match="got G = 4"):
        scorer(StubJudge(True), 4, "swiss(4)")


def test_a_b_orders_differ_between_steps_and_repeat_for_a_seed():
    def pairs(step, seed):
        result = run(scorer(StubJudge(True), plan="round_robin", seed=seed), [10, 20, 40, 80], step=step)
        return [(c.first, c.second) for g in result.groups["vlm_pairwise"] for c in g.comparisons]

    assert pairs(3, 1) == pairs(3, 1)
    assert len({tuple(pairs(step, seed)) for step in range(3) for seed in range(3)}) > 3


def test_a_failed_comparison_counts_for_nobody():
    result = run(scorer(StubJudge(True, broken=[10])), [10, 20, 40, 80], groups=(7,))
    rates = result.values["vlm_pairwise"][0]
    assert np.isnan(rates[0])
    np.testing.assert_allclose(rates[1:], by_hand([20, 40, 80]), rtol=1e-6)
    scores = result.groups["vlm_pairwise"][0].scores
    assert scores[0].value is None and scores[0].reason == "broken on purpose"
    assert result.metrics["judge/failures"] == 6 and result.metrics["judge/retries"] == 12
    assert result.metrics["reward/vlm_pairwise/missing_rate"] == 0.25
    assert result.reasons == {"vlm_pairwise: broken on purpose": 7}


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.none() | st.floats(0, 1)))
def test_soft_win_rates_are_the_mean_of_what_exists(table):
    found = [Comparison(i, j, Verdict(p)) for (i, j), p in table.items() if i != j]
    result = tally(4, found, Rating())
    for member, score in enumerate(result.scores):
        wins = [c.verdict.first for c in found if c.first == member and c.verdict.first is not None]
        wins += [1 - c.verdict.first for c in found if c.second == member and c.verdict.first is not None]
        assert (score.value is None) == (not wins)
        if wins:
            assert score.value == pytest.approx(np.mean(wins), abs=1e-6)
    assert np.array_equal(result.counts, result.counts.T)


def test_hard_verdicts_average_the_orders_to_half_when_they_contradict():
    found = [(0, 1, 0.9), (1, 0, 0.8), (0, 2, 0.6), (2, 0, 0.1), (1, 2, 0.5)]
    result = tally(3, [Comparison(i, j, Verdict(p)) for i, j, p in found], Rating(verdict="hard"))
    np.testing.assert_array_equal(result.wins, [[0, 0.5, 1], [0.5, 0, 0.5], [0, 0.5, 0]])
    np.testing.assert_array_equal(result.counts, [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    assert [s.value for s in result.scores] == [0.75, 0.5, 0.25]


@pytest.mark.parametrize("streams", [True, False])
def test_a_sample_that_was_never_made_is_missing(streams):
    s = scorer(StubJudge(streams))
    s.begin(0, [5])
    for member, value in ((0, 10), (1, 20), (3, 80)):
        s.add(5, member, sample(value))
    rates = s.finish().values["vlm_pairwise"][0]
    assert np.isnan(rates[2])
    np.testing.assert_allclose(rates[[0, 1, 3]], by_hand([10, 20, 80]), rtol=1e-6)


def test_the_deadline_bounds_the_wait_and_late_answers_are_missing():
    s = scorer(StubJudge(True, hang=[10]), deadline_s=0.2)
    result = run(s, [10, 20, 40, 80], groups=(7,))
    assert np.isnan(result.values["vlm_pairwise"][0]).tolist() == [True, False, False, False]
    assert f"vlm_pairwise: {LATE}" in result.reasons


def test_metrics_show_a_judge_that_prefers_the_first():
    class First(StubJudge):
        def _verdict(self, first, second):
            return Verdict(0.9, "", 0.1)

    metrics = run(scorer(First(True)), [10, 20, 40, 80]).metrics
    assert metrics["judge/position_bias"] == 1.0 and metrics["judge/order_inconsistency"] == 1.0


class Odd(PointwiseReward):
    """Scores that are missing or not finite for some samples."""

    def score(self, samples):
        table = {10: Score(None, "too dark"), 20: Score(float("nan")), 40: Score(float("inf"))}
        return [table.get(level(s.media), Score(float(level(s.media)))) for s in samples]


def test_values_that_are_missing_or_not_finite_are_nan_and_counted():
    result = run(Scorer({"odd": Odd()}, 4), [10, 20, 40, 80], groups=(1,))
    np.testing.assert_array_equal(result.values["odd"], [[np.nan, np.nan, np.nan, 80.0]])
    assert result.reasons == {
        f"odd: {why}": 1 for why in ("too dark", "the reward returned nan", "the reward returned inf")
    }
    assert "judge/requests" not in result.metrics


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        scorer(StubJudge(True), size=1)
    s = scorer(StubJudge(True))
    s.begin(0, [5])
    s.add(5, 0, sample(10))
    for group, member, why in ((6, 0, "not part of this step"), (5, 0, "added before"), (5, 4, "out of range")):
        with pytest.raises(ValueError, match=why):
            s.add(group, member, sample(10))
    with pytest.raises(ValueError, match="different"):
        s.begin(1, [5, 5])
    with pytest.raises(ValueError, match="soft, hard"):
        VlmPairwise(StubJudge(True), verdict="loud")
    with pytest.raises(ConfigError, match="url"):
        open_judge({"backend": "http", "url": "x"})


def test_the_log_has_one_line_per_comparison_and_no_pixels(tmp_path):
    path = tmp_path / "run" / "judgements.jsonl"
    with scorer(StubJudge(True, broken=[10]), log_path=path) as s:
        run(s, [10, 20, 40, 80], groups=(7,), step=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 12 and {line["step"] for line in lines} == {3}
    assert sum(line["p_first"] is None for line in lines) == 6
    assert all(len(json.dumps(line)) < 400 for line in lines)


def test_judging_overlaps_the_making_of_samples():
    """All pairs of the members that exist are asked before the last member does."""
    with JudgeServer() as server:
        rewards = build("vlm_pairwise,jpeg_compressibility", {"vlm_pairwise": {"judge": JudgeConfig((server.url,))}})
        asked = len(server.requests)
        with Scorer(rewards, 6, deadline_s=20) as s:
            s.begin(0, [0])
            for member in range(5):
                s.add(0, member, sample(20 + 30 * member))
            end = time.monotonic() + 20
            while len(server.requests) < asked + 20:
                assert time.monotonic() < end
                time.sleep(0.01)
            s.add(0, 5, sample(170))
            result = s.finish()
    assert np.all(np.diff(result.values["vlm_pairwise"][0]) > 0)
    assert result.metrics["judge/requests"] == 30 and result.metrics["judge/busy_s"] > result.metrics["judge/wait_s"]
    assert set(result.values) == {"vlm_pairwise", "jpeg_compressibility"}


def test_a_judge_that_dies_in_the_step_gives_missing_values_in_bounded_time():
    config = {"timeout_s": 2, "patience_s": 1, "retries": 2}
    with JudgeServer() as server:
        judge = open_judge({"endpoints": (server.url,), **config})
        s = Scorer({"vlm_pairwise": VlmPairwise(judge)}, 4, deadline_s=20)
        s.begin(0, [0, 1])
        for member in range(4):
            s.add(0, member, sample(20 + 30 * member))
        first = list(s._sessions["vlm_pairwise"][0]._answers.values())
        assert all(f.result(10).first is not None for f in first)
    for member in range(4):
        s.add(1, member, sample(20 + 30 * member))
    result = s.finish()
    assert np.isnan(result.values["vlm_pairwise"]).tolist() == [[False] * 4, [True] * 4]
    assert any("no server was reachable" in reason for reason in result.reasons)
    s.close()
