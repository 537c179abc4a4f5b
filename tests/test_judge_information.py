"""A judge whose answers carry no information: `judge check` names the fault, and a training run stops.

Simulated judges have known strengths, biases and faults. False alarms matter as much: a strong position bias that
both orders cancel, members that are nearly alike, and small groups, where chance looks like a fault.
"""

import contextlib
import itertools
import json
import re

import numpy as np
import pytest
from aiohttp import web
from judge_server import MODEL, JudgeServer, text_of
from tiny_run import merged, ranks, recipe, rows, train

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import client
from prefgrpo.judge.client import check
from prefgrpo.judge.information import Alarm, uninformative_reason, verdict_counts
from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.template import PAIR_ANSWERS, load_template, shipped_templates
from prefgrpo.judge.verdict import JudgeError


def verdicts(judge, plan="both_orders", groups=12, size=8, seed=0):
    """Groups of (first, second, P(first)); judge: (quality difference, generator) -> P(first)."""
    rng, ask = np.random.default_rng(seed), get_plan(plan)
    out = []
    for group in range(groups):
        quality = rng.normal(size=size)
        out.append([(i, j, judge(quality[i] - quality[j], rng)) for i, j in ask(size, group)])
    return out


def logistic(x):
    return float(1 / (1 + np.exp(-x)))


MEANINGLESS = [
    (lambda gap, rng: 0.5, "are ties"),
    (lambda gap, rng: 1.0, "first|changes"),
    (lambda gap, rng: 0.0, "second|changes"),
    (lambda gap, rng: 0.97, "first"),
    (lambda gap, rng: logistic(3 + 0.3 * rng.normal()), "first|changes"),
    (lambda gap, rng: float(rng.choice([0.0, 0.5, 1.0], p=[0.4, 0.2, 0.4])), "the winner changes with the order"),
    (lambda gap, rng: logistic(rng.normal()), "the winner changes with the order"),
]
GOOD = [
    lambda gap, rng: logistic(gap),
    lambda gap, rng: logistic(0.1 * gap + 0.02 * rng.normal()),  # members that are nearly alike
    lambda gap, rng: logistic(gap + 4.0 + 0.5 * rng.normal()),  # always prefers the first, yet fully informative
    lambda gap, rng: float(np.sign(gap) / 2 + 0.5) if abs(gap) > 1.5 else 0.5,  # most are ties
    lambda gap, rng: float(gap + 0.7 * rng.normal() > 0),
    lambda gap, rng: float(gap + 0.5 > 0),  # a hard judge with a strong position bias
]


@pytest.mark.parametrize(("judge", "message"), MEANINGLESS)
def test_a_step_without_information_is_named(judge, message):
    for seed in range(5):
        groups = verdicts(judge, groups=48, seed=seed)
        assert re.search(message, uninformative_reason(verdict_counts(groups, False)))
    parts = verdict_counts(groups[:5], True) + verdict_counts(groups[5:], True)
    np.testing.assert_allclose(parts, verdict_counts(groups, True), err_msg="over ranks")


@pytest.mark.parametrize("judge", GOOD)
@pytest.mark.parametrize("plan", ["both_orders", "round_robin", "k_regular(4)"])
def test_a_working_judge_raises_no_alarm(judge, plan):
    for seed in range(20):
        assert uninformative_reason(verdict_counts(verdicts(judge, plan, seed=seed), False)) == ""


def test_plans_of_one_order_see_ties_and_a_constant_side_and_rounding_keeps_a_bias():
    for answer, message in (
        (1.0, "all 336 verdicts, ties aside, prefer the one shown first"),
        (0.03, "all 336 verdicts, ties aside, prefer the one shown second"),
        (0.5, "all 336 verdicts are ties"),
    ):
        one_order = verdicts(lambda gap, rng, p=answer: p, "round_robin")
        assert uninformative_reason(verdict_counts(one_order, False)) == message
    mixed = verdict_counts(verdicts(lambda gap, rng: float(rng.choice([0.0, 1.0])), "round_robin"), False)
    assert uninformative_reason(mixed) == "", "a single order cannot reveal contradictions"
    groups = verdicts(lambda gap, rng: logistic(0.3 * gap + 2.0))
    assert uninformative_reason(verdict_counts(groups, False)) == ""
    rounded = uninformative_reason(verdict_counts(groups, True))
    assert "the winner changes" in rounded, "hard win rates do not cancel the bias"


@pytest.mark.parametrize(("size", "plan"), [(2, "both_orders"), (3, "round_robin"), (4, "both_orders")])
def test_small_groups_raise_no_alarm_by_chance(size, plan):
    """One prompt per step, 2,000 steps, a weak judge with hard verdicts: ties, a bias, and 29 % contradictions."""

    def weak(gap, rng):
        value = gap + 1.6 * rng.normal() + 0.3
        return 0.5 if abs(value) < 0.6 else float(value > 0)

    alarm, longest = Alarm(), 0
    for group in verdicts(weak, plan, groups=2000, size=size):
        alarm.add(verdict_counts([group], True))
        longest = max(longest, alarm.steps)
    assert longest < 3


@pytest.mark.parametrize(("judge", "_"), MEANINGLESS[:3])
def test_small_groups_show_a_fault_after_a_while(judge, _):
    alarm, steps = Alarm(), 0
    for group in verdicts(judge, groups=400, size=2):
        if alarm.steps < 3:
            alarm.add(verdict_counts([group], True))
            steps += 1
    assert alarm.steps == 3 and 3 * 16 <= steps <= 3 * 100
    alarm.add(verdict_counts(verdicts(GOOD[0]), True))
    assert alarm.steps == 0, "one informative step resets the alarm"


# ---- judge check ----------------------------------------------------------------------------------------------------


def written(template, wins):
    """An answer in the template's format; `wins`: 1, 2, or 0 for a tie."""
    thing = "Video" if template.name.endswith("_video") else "Image"
    if template.answer == "soft":
        odds = {1: 0.99, 2: 0.01, 0: 0.5}[wins]
        return dict(zip(template.labels, (odds, 1 - odds), strict=True))
    if template.answer == "flex":
        winner = f"{thing} {wins}" if wins else "tie"
        kinds = [{"name": n, "analysis": "", "cat_winner": winner} for n in ("Alignment", "Quality", "Aesthetics")]
        return json.dumps({"categories": kinds, "reason": "", "winner": winner})
    if template.answer == "think":
        return f"<think>so</think><answer>{thing} {wins} is better</answer>"
    return f"So it is. Edited image {wins} is better."


def right(bright, text):
    """1 or 2: the image that is bright or dark as the text requests (a source image, shown first, is ignored)."""
    half = 2 if len(bright) >= 4 else 1
    first, second = np.mean(bright[-2 * half : -half]), np.mean(bright[-half:])
    return 1 if (first > second) == ("plain black" not in text) else 2


def pair_templates():
    kinds = []
    for name in shipped_templates():
        with contextlib.suppress(JudgeError):
            kinds.append(load_template(name, may=("source", "criterion"), kinds=PAIR_ANSWERS))
    return [t.name for t in kinds if [x.casefold() for x in t.labels or ()] != ["yes", "no"]]


class Server(JudgeServer):
    def __init__(self, template, decide):
        super().__init__()
        kind, rng = load_template(template), np.random.default_rng(0)
        self.answer = lambda bright, text: written(kind, decide(right(bright, text), rng))


TURN = itertools.count()
FAULTS = {
    "always answers a tie": lambda wins, rng: 0,
    "always prefers the image shown first": lambda wins, rng: 1,
    "always prefers the image shown second": lambda wins, rng: 2,
    "prefers the wrong image": lambda wins, rng: 3 - wins,
    "has a position bias: it prefers the image shown first 14 of 16 times": lambda wins, rng: 1 + (next(TURN) % 8 == 7),
    "does not see the images, or mixes them up": lambda wins, rng: int(rng.integers(1, 3)),
}


@pytest.mark.parametrize("template", pair_templates())
def test_a_working_judge_knows_the_answers(template, capsys):
    assert {"compare", "compare_video", "caption_match", "think", "flex", "edit_pairwise"} <= set(pair_templates())
    with Server(template, lambda wins, rng: wins) as server:
        assert client.main((server.url,), template=template, bias_pairs=0) == 0
    assert "known answers: 16 of 16 right" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", ["compare", "flex"])
def test_judge_check_fails_by_name(template, fault):
    with Server(template, FAULTS[fault]) as server, pytest.raises(JudgeError, match=fault):
        client.main((server.url,), template=template, bias_pairs=0)


def test_a_bad_server_of_two_is_named_and_a_template_of_ones_own_is_warned_about(tmp_path, capsys):
    """With a custom template the check only warns, since plain colours may not be a fair question for it."""
    good, bad = (Server("compare", decide) for decide in (lambda wins, rng: wins, FAULTS["always answers a tie"]))
    with good, bad:
        with pytest.raises(JudgeError, match=f"{bad.url}: '{MODEL}' always answers a tie"):
            check(JudgeConfig((good.url, bad.url)), known_answers=True)
        file = tmp_path / "own.yaml"
        file.write_text(
            "user: '{prompt} {media_1} {media_2} which has more cats?'\nprefill: 'Image '\nlabels: ['1', '2']\n"
        )
        assert client.main((bad.url,), template=str(file), bias_pairs=0) == 1
        assert "WARNING" in capsys.readouterr().out
        bad.answer = lambda bright, text: {"Yes": 0.9, "No": 0.1}
        assert check(JudgeConfig((bad.url,), template="consistency"), known_answers=True).known_answers == "", (
            "not a comparison"
        )


# ---- a run ----------------------------------------------------------------------------------------------------------


def judged(url, **over):
    base = {
        "reward": {"spec": "vlm_pairwise"}, "judge": {"endpoints": [url]}, "eval": {"every": 0}, "train": {"steps": 6},
        "rollout": {"prompts_per_step": 4, "batch_size": 8},
    }  # fmt: skip
    return merged(base, over)


def test_a_run_stops_for_a_judge_that_says_nothing_and_goes_on_when_it_does(place):
    """48 verdicts per step; the judge passes the start-up check but answers every pair of the run with a tie."""
    with JudgeServer() as server:
        server.answer = lambda bright, text: written(load_template("compare"), right(bright, text) * ("plain" in text))
        file = recipe(place, "ties", **judged(server.url))
        code, output = train(file)
        assert code == 3, output
        for step in (1, 2):
            assert f"WARNING: step {step}, vlm_pairwise: the judge's verdicts carry no information" in output
        assert "step 3: vlm_pairwise" in output and "all 48 verdicts are ties" in output
        assert "judge.patience_steps" in output and "rerun with --resume" in output
        assert [r["step"] for r in rows(place / "runs" / "ties") if r["kind"] == "train"] == [1, 2]
        server.answer = None
        code, output = train(file, "--resume")
        assert code == 0 and "carry no information" not in output.split("step 4", 1)[1], output


class Forgetful(JudgeServer):
    """Refuses every fourth comparison of the run."""

    asked = 0

    def _answer(self, body):
        self.asked += "plain" not in text_of(body) and "a picture" not in text_of(body)
        if self.asked % 4 == 3:
            self.asked += 1
            return web.json_response({"error": {"message": "no"}}, status=400)
        return super()._answer(body)


def test_lost_comparisons_stop_a_run_whose_members_all_have_some(place):
    """Missing comparisons are counted over both ranks."""
    with Forgetful() as server:
        file = recipe(place, "lost", **judged(server.url))
        runs = ranks(file, 2)
        assert [run.wait() for run in runs] == [3, 3], runs[0].output
        output = runs[0].output
        assert "of the comparisons are missing, more than judge.max_missing = 10%" in output
        code, output = train(file, "--resume", "--judge.max-missing", "0.5", "--train.steps", "2")
    assert code == 0 and "of the comparisons are missing (judge/missing); above judge.max_missing = 50%" in output
    found = [r for r in rows(place / "runs" / "lost") if "judge/missing" in r]
    assert found and all(r["reward/missing"] == 0 and r["judge/missing"] > 0.1 for r in found)
