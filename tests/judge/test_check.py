"""A judge whose answers carry no information: `judge check` and the start of a run name the fault, and a run stops."""

import contextlib
import json
import re

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from ranks import ranks, train
from servers import MODEL, JudgeServer, asker, text_of
from world import merged, recipe, rows

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.tables import DataError
from prefgrpo.judge import check as check_module
from prefgrpo.judge.check import check
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.human_pairs import agreement, read_pairs
from prefgrpo.judge.template import PAIR_ANSWERS, load_template, shipped_templates

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


FAULTS = {
    "always answers the same (0 of 8 pairs right, mean P(first) over both orders 0.500": lambda wins, rng: 0,
    "always answers the same (0 of 8 pairs right, mean": lambda wins, rng: 1,
    "prefers the wrong image": lambda wins, rng: 3 - wins,
    "does not see the images, or mixes them up": lambda wins, rng: int(rng.integers(1, 3)),
}


@pytest.mark.parametrize("template", pair_templates())
def test_a_working_judge_knows_the_answers(template, capsys):
    assert {"compare", "compare_video", "caption_match", "think", "flex", "edit_pairwise"} <= set(pair_templates())
    with Server(template, lambda wins, rng: wins) as server:
        assert check_module.main((server.url,), template=template) == 0
    assert "known answers: 8 of 8 pairs right" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", ["compare", "flex"])
def test_judge_check_names_the_fault(template, fault, capsys):
    with Server(template, FAULTS[fault]) as server:
        assert check_module.main((server.url,), template=template) == 1
        assert fault in capsys.readouterr().out


def test_a_bad_server_of_two_is_named():
    good, bad = (Server("compare", decide) for decide in (lambda wins, rng: wins, lambda wins, rng: 0))
    with good, bad:
        health = check(*asker(JudgeConfig((good.url, bad.url))), known_answers=True)
        lines = "\n".join(health.rows)
        assert f"{good.url}: known answers: 8 of 8 pairs right" in lines
        assert f"{bad.url}: known answers: 0 of 8" in lines
        assert f"{bad.url}: '{MODEL}' always answers the same" in health.alarm and good.url not in health.alarm
        bad.answer = lambda bright, text: {"Yes": 0.9, "No": 0.1}
        assert "known" not in "".join(check(*asker(JudgeConfig((bad.url,)), "consistency"), known_answers=True).rows)


# ---- people's preferences --------------------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path):
    """Five pairs of a dark a and a bright b: people choose b in three, a in one, and neither in one."""
    for name, level in {"dark": 40, "bright": 200}.items():
        Image.new("RGB", (16, 16), (level,) * 3).save(tmp_path / f"{name}.png")
    file = tmp_path / "pairs.csv"
    choices = ("b", "B ", "b", "a", "tie")
    file.write_text("prompt,image_a,image_b,choice\n" + "".join(f"p,dark.png,bright.png,{c}\n" for c in choices))
    return file


def test_agreement_with_people(people, capsys):
    """The server prefers the brighter image: right in 3 of 4. Wilson's interval of 3 of 4 is 0.301 to 0.954."""
    with Server("compare", lambda wins, rng: wins) as server:
        assert check_module.main((server.url,), pairs=people) == 0
        lines = capsys.readouterr().out.splitlines()[-4:]
        assert lines[0] == "pairs: 5 of 5 have verdicts in both orders; 4 that people decided count"
        assert lines[1].startswith("accuracy: 0.750 [0.301, 0.954]")
        assert lines[2].startswith("order inconsistency: 0.000 [0.000, 0.434]")
    with Server("compare", lambda wins, rng: 1) as server:  # always the first: each pair is right in one order
        lines = agreement(*asker(JudgeConfig((server.url,)), "compare"), read_pairs(people))
        assert lines[1].startswith("accuracy: 0.500") and lines[2].startswith("order inconsistency: 1.000")


def test_pairs_without_a_verdict_are_left_out_and_counted(people):
    (people.parent / "dark.png").write_bytes(b"no image")
    people.write_text(people.read_text() + "p,bright.png,bright.png,tie\n")
    with Server("compare", lambda wins, rng: wins) as server:
        lines = agreement(*asker(JudgeConfig((server.url,)), "compare"), read_pairs(people))
    assert lines[0].startswith("pairs: 1 of 6") and lines[1].startswith("accuracy: –")
    assert lines[-1].startswith("WARNING: 10 of 12 questions have no verdict, the first:") and "dark.png" in lines[-1]
    for row, text in {
        "p,dark.png,bright.png,c": "line 8: choice: expected one of a, b, tie, got 'c'",
        "p,dark.png,nowhere.png,a": "line 8: file not found: nowhere.png",
        "p,dark.png,bright.png,": "line 8: choice: expected one of a, b, tie, got ''",
    }.items():
        other = people.parent / "other.csv"
        other.write_text(people.read_text() + row + "\n")
        with pytest.raises(DataError, match=re.escape(text)):
            read_pairs(other)


# ---- a run ----------------------------------------------------------------------------------------------------------


def judged(url, **over):
    base = {
        "rewards": "vlm_pairwise", "judge": {"endpoints": [url]}, "eval": {"every": 0}, "train": {"steps": 6},
        "rollout": {"prompts_per_step": 4},
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
        assert "step 3: vlm_pairwise" in output and "P(first) is 0.500 in all 48" in output
        assert "3 steps in a row" in output and "rerun with --resume" in output
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
