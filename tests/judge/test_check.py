"""The check of a judge at the start of a run, and `judge check`: it names what is wrong (CHECKS), a judge whose answers
carry no information (FAULTS), and how often a judge agrees with people. Whole runs: tests/runs/test_judged.py.
"""

import contextlib
import json

import numpy as np
import pytest
from PIL import Image
from ranks import free_port
from servers import MODEL, JudgeServer, _error, asker, images

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.tables import DataError
from prefgrpo.judge import check as check_module
from prefgrpo.judge import http
from prefgrpo.judge.check import Shape, agreement, check, human_pairs
from prefgrpo.judge.http import JudgeError
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


def test_every_server_is_checked_and_a_bad_one_is_named():
    good, bad = (Server("compare", decide) for decide in (lambda wins, rng: wins, lambda wins, rng: 0))
    with good, bad, JudgeServer("404") as refuses, JudgeServer("contradict") as contradicts:
        urls = (good.url, bad.url, refuses.url, contradicts.url)
        health = check(*asker(JudgeConfig(urls)), known_answers=True)
        lines = "\n".join(health.rows)
        assert f"{good.url}: ok, serves {MODEL}" in lines
        assert f"{good.url}: known answers: 8 of 8 pairs right" in lines
        assert f"{bad.url}: known answers: 0 of 8" in lines
        assert f"{bad.url}: '{MODEL}' always answers the same" in health.alarm and good.url not in health.alarm
        assert f"{refuses.url}: '{MODEL}' gave no verdict on a probe pair: " in lines
        bias = f"mean P(first) over both orders {1 / (1 + np.exp(-3)):.3f}"
        assert f"{contradicts.url}: known answers: 0 of 8 pairs right, {bias}" in lines
        bad.answer = lambda bright, text: {"Yes": 0.9, "No": 0.1}
        assert "known" not in "".join(check(*asker(JudgeConfig((bad.url,)), "consistency"), known_answers=True).rows)


# ---- what is wrong with a judge --------------------------------------------------------------------------------------

# name -> (fault, judge options, message)
CHECKS = {
    "down": ("", {"endpoints": "down"}, r"127.0.0.1.*not reachable.*prefgrpo judge serve"),
    "no name": ("", {"endpoints": ("http://judge.invalid:8000",)}, "not reachable .*judge.invalid"),
    "no TLS": ("", {"endpoints": "https"}, "not reachable .*SSL"),
    "another model": ("", {"model": "bright-juge"}, f"serves {MODEL}, not 'bright-juge' .did you mean '{MODEL}'"),
    "no verdict": ("garbage", {}, "no verdict on a probe pair: .*neither label"),
    "refuses": ("400", {}, "At most 1 image"),
    "hangs": ("hang", {"timeout_s": 0.5}, "no verdict.*did not answer within 0.5 s"),
    "mute": ("mute", {}, "no answer within 1 s"),
    "loading": ("loading", {"deadline_s": 0.5}, "/v1/models answered 503"),
    "overloaded": ("503", {}, "answered 503: overloaded"),
    "no server": ("listing", {}, "lists no model"),
    "key missing": ("key", {}, "answered 401; is api_key_env the environment variable"),
    "key wrong": ("key", {"api_key_env": "WRONG_KEY"}, "answered 401; is api_key_env"),
    "key unset": ("", {"api_key_env": "NO_KEY"}, r"variable NO_KEY \(api_key_env\) is not set"),
    "key empty": ("", {"api_key_env": "EMPTY_KEY"}, r"variable EMPTY_KEY \(api_key_env\) is not set, or empty"),
    "key of one word": ("", {"api_key_env": "ONE_WORD"}, r"variable ONE_WORD \(api_key_env\) is not set, or empty"),
    "key of two lines": ("", {"api_key_env": "TWO_LINES"}, r"TWO_LINES \(api_key_env\): expected one line"),
    "no address": ("", {"endpoints": ("here:80",)}, "endpoints must be http:// or https://"),
}
KEYS = {"WRONG_KEY": "hunter2", "ONE_WORD": "Bearer ", "EMPTY_KEY": " \r\n", "TWO_LINES": "hunter2\r\nhunter3"}


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_says_what_is_wrong(name, monkeypatch):
    if name == "mute":
        monkeypatch.setattr(http, "CHECK_S", 1.0)
    for variable, key in KEYS.items():
        monkeypatch.setenv(variable, key)
    fault, options, message = CHECKS[name]
    with JudgeServer(fault if fault not in ("listing", "key") else "") as server:
        server.key = "secret" * (fault == "key")
        server.listing = "<html>welcome</html>" * (fault == "listing")
        urls = {"down": f"http://127.0.0.1:{free_port()}", "https": server.url.replace("http:", "https:")}
        endpoints = options.get("endpoints", (server.url,))
        endpoints = (urls[endpoints],) if isinstance(endpoints, str) else endpoints
        with pytest.raises(JudgeError, match=f"(?s){message}") as error:
            check(*asker(JudgeConfig(**{**options, "endpoints": endpoints})), wait_s=1.0)
        assert "hunter2" not in str(error.value)


def test_the_wait_for_a_server_is_no_limit_of_an_answer():
    with JudgeServer(delay_s=0.6) as server:
        check(*asker(JudgeConfig((server.url,))), wait_s=0.2)


class Short(JudgeServer):
    """Refuses what exceeds its limits, in vLLM's words: requests above 100 kB, and more than 8 images."""

    async def _chat(self, request):
        raw = await request.read()
        if len(images(json.loads(raw))) > 8:
            return _error(400, "At most 8 image(s) may be provided in one prompt.")
        if len(raw) > 100_000:
            return _error(400, "The prompt (length 9000) exceeds the model's maximum context length of 4096")
        return await super()._chat(request)


def test_the_check_asks_a_question_of_the_runs_shape():
    with Short() as server:
        asked = asker(JudgeConfig((server.url,)))
        check(*asked, shape=Shape(64, 64))
        for shape, advice in (
            (Shape(512, 512, prompt="x" * 100_000), r"400: .*512×512 .* serve it with a larger --max-model-len"),
            (Shape(64, 64, frames=8), r"8 frames .* --limit-mm-per-prompt"),
        ):
            with pytest.raises(JudgeError, match=advice):
                check(*asked, shape=shape)


def test_a_judge_that_thinks_although_it_should_not_is_told_by_name():
    with JudgeServer() as server:
        config = JudgeConfig((server.url,))
        server.answer = lambda bright, text: {"<think>": 0.9, "\n": 0.1}
        with pytest.raises(JudgeError, match=rf"'{MODEL}' .* begins to think .*enable_thinking"):
            check(*asker(config))
        server.answer = lambda bright, text: "<think>so</think>Edited image 1 is better."
        assert f"'{MODEL}' thinks before it answers" in "\n".join(check(*asker(config, "edit_pairwise")).rows)


# ---- people's preferences --------------------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path):
    """Five pairs of a dark a and a bright b: people choose b in three, a in one, and neither in one."""
    for name, level in {"dark": 40, "grey": 128, "bright": 200}.items():
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
        lines = agreement(*asker(JudgeConfig((server.url,)), "compare"), human_pairs(people))
        assert lines[1].startswith("accuracy: 0.500") and lines[2].startswith("order inconsistency: 1.000")


def test_pairs_without_a_verdict_are_left_out_and_counted(people):
    people.write_text(people.read_text() + "p,bright.png,grey.png,tie\n")
    pairs = human_pairs(people)
    (people.parent / "dark.png").write_bytes(b"no image")
    with Server("compare", lambda wins, rng: wins) as server:
        lines = agreement(*asker(JudgeConfig((server.url,)), "compare"), pairs)
    assert lines[0].startswith("pairs: 1 of 6") and lines[1].startswith("accuracy: –")
    assert lines[-1].startswith("WARNING: 10 of 12 questions have no verdict, the first:") and "dark.png" in lines[-1]


def test_rows_that_are_no_pair_are_named(people):
    rows = {
        "p,dark.png,bright.png,c": "line 7: choice: expected one of a, b, tie, got 'c'",
        "p,dark.png,nowhere.png,a": "line 8: file not found: nowhere.png",
        "p,dark.png,bright.png,": "line 9: choice: expected one of a, b, tie, got ''",
    }
    people.write_text(people.read_text() + "".join(f"{row}\n" for row in rows))
    with pytest.raises(DataError) as error:
        human_pairs(people)
    assert all(reason in str(error.value) for reason in rows.values())
    three = people.with_suffix(".jsonl")
    row = {
        "prompt": "p",
        "samples": ["dark.png", "grey.png", "bright.png"],
        "wins": [[None, 1, 1], [0, None, 1], [0, 0, None]],
    }
    three.write_text(json.dumps(row))
    with pytest.raises(DataError, match="line 1: expected two images, got 3"):
        human_pairs(three)
