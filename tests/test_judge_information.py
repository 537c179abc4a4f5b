"""A judge whose answers carry no information: `judge check` and the start of a run name the fault, and a run stops.

False alarms matter as much: a strong position bias that both orders cancel, members that are nearly alike, and small
groups, where chance looks like a fault.
"""

import contextlib
import itertools
import json

import numpy as np
import pytest
from aiohttp import web
from judge_server import MODEL, JudgeServer, text_of
from tiny_run import merged, ranks, recipe, rows, train

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import client
from prefgrpo.judge.client import check
from prefgrpo.judge.information import Alarm, extent
from prefgrpo.judge.template import PAIR_ANSWERS, load_template, shipped_templates
from prefgrpo.judge.verdict import JudgeError


def logistic(x):
    return float(1 / (1 + np.exp(-x)))


def alarmed(judge, count, steps, rounded=False):
    """(messages, largest number of useless steps in a row) for steps of `count` verdicts, spread over two ranks.

    judge: random generator -> P(first).
    """
    alarm = Alarm()
    rng = np.random.default_rng(0)
    longest = 0
    said = []
    for _ in range(steps):
        p = [judge(rng) for _ in range(count)]
        said.append(alarm.add(np.stack([extent(p[:1], rounded), extent([*p[1:], None], rounded)])))
        longest = max(longest, alarm.steps)
    return said, longest


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda rng: 0.5, "all 48 verdicts are ties"),
        (lambda rng: 0.5004 - 0.0008 * rng.random(), "all 48 verdicts are ties"),
        (lambda rng: 1.0, "all 48 verdicts are for the image shown first"),
        (lambda rng: 0.03 + 0.004 * rng.random(), "all 48 verdicts are for the image shown second"),
    ],
)
def test_constant_verdicts_are_named_and_counted(judge, message):
    assert alarmed(judge, 48, 2) == ([message] * 2, 2)
    said, longest = alarmed(judge, 2, 48)
    assert longest == 3 and [k for k, text in enumerate(said) if text] == [15, 31, 47], "small steps are pooled"


def test_one_informative_step_resets_the_alarm():
    alarm = Alarm()
    for verdicts, steps in (([0.5] * 40, 1), ([], 1), ([0.5] * 40, 2), ([0.2, 0.9] * 20, 0)):
        alarm.add(np.array([extent(verdicts, False)]))
        assert alarm.steps == steps


@pytest.mark.parametrize("count", [2, 6, 48])
@pytest.mark.parametrize(
    "judge",
    [
        lambda rng: logistic(rng.normal()),
        lambda rng: logistic(0.1 * rng.normal()),  # members that are nearly alike
        lambda rng: logistic(rng.normal() + 4.0),  # mostly prefers the first, yet fully informative
        lambda rng: float(rng.choice([0.0, 0.5, 1.0], p=[0.05, 0.9, 0.05])),  # most are ties
        lambda rng: float(rng.random() < 0.8),  # a hard judge with a position bias
    ],
)
def test_a_working_judge_stops_no_run(judge, count):
    assert alarmed(judge, count, 1000)[1] < 3


def test_rounding_keeps_a_bias():
    def biased(rng):
        return logistic(rng.normal() + 6.0)

    assert alarmed(biased, 48, 3)[1] == 0 and alarmed(biased, 48, 3, rounded=True)[1] == 3


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
    "its verdicts are ties": lambda wins, rng: 0,
    "its verdicts are for the image shown first": lambda wins, rng: 1,
    "its verdicts are for the image shown second": lambda wins, rng: 2,
    "prefers the wrong image": lambda wins, rng: 3 - wins,
    "the image shown first won 14 of 16 times": lambda wins, rng: 1 + (next(TURN) % 8 == 7),
    "does not see the images, or mixes them up": lambda wins, rng: int(rng.integers(1, 3)),
}


@pytest.mark.parametrize("template", pair_templates())
def test_a_working_judge_knows_the_answers(template, capsys):
    assert {"compare", "compare_video", "caption_match", "think", "flex", "edit_pairwise"} <= set(pair_templates())
    with Server(template, lambda wins, rng: wins) as server:
        assert client.main((server.url,), template=template, bias_pairs=0) == 0
    assert "known answers: 8 of 8 pairs right" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", ["compare", "flex"])
def test_judge_check_names_the_fault(template, fault, capsys):
    with Server(template, FAULTS[fault]) as server:
        assert client.main((server.url,), template=template, bias_pairs=0) == 1
        assert fault in capsys.readouterr().out
        with pytest.raises(JudgeError, match=fault):
            check(JudgeConfig((server.url,), template=template, strict=True), known_answers=True)


def test_a_bad_server_of_two_is_named():
    good, bad = (Server("compare", decide) for decide in (lambda wins, rng: wins, lambda wins, rng: 0))
    with good, bad:
        health = check(JudgeConfig((good.url, bad.url)), known_answers=True)
        assert health.known_answers == "known answers: 8 of 8 pairs, 0 of 8 pairs right"
        assert f"{bad.url}: '{MODEL}' always answers the same" in health.alarm and good.url not in health.alarm
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
