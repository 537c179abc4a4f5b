"""`prefgrpo reward serve` as a separate process, queried over real HTTP.

Why these cases: a server that reports ready before its model works keeps a run waiting in vain; one rank's bad request
must not fail the others in its batch; served scores must equal the reward's own, bit for bit; and the server runs in
old environments, so it may import only light libraries.
"""

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import free_port
from reward_server import MOODY, TESTS, Moody, Process, brightness
from tiny_media import grey, noise

from prefgrpo.commands import cli
from prefgrpo.rewards.base import PointwiseReward, Sample, Score
from prefgrpo.rewards.serve import read_options
from prefgrpo.rewards.wire import WireError, media_json, read_request, read_scores, request_json, scores_json


@pytest.fixture(scope="module")
def moody():
    with Process(MOODY, "--max-batch", "4", "--max-mib", "1") as server:
        yield server


def body(prompt, media):
    return request_json(MOODY, Sample(prompt, media), media_json(media), [])


def post(url, raw):
    """(HTTP status, answer) of a POST request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/score", raw), timeout=600) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


# the wire


class Edit(PointwiseReward):
    takes, needs_source, meta_keys = ("image",), True, ("tag",)

    def score(self, samples):
        return []


pixels = st.builds(noise, st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3))


@settings(max_examples=60)
@given(st.text(), pixels, st.lists(pixels, max_size=2), st.dictionaries(st.text(), st.text() | st.integers()))
def test_what_is_sent_is_what_arrives(prompt, media, sources, meta):
    sample = Sample(prompt, media, tuple(sources), meta)
    (found,) = read_request(request_json("x", sample, media_json(media), [*map(media_json, sources)]), "x", Moody)
    assert (found.prompt, found.meta) == (prompt, meta) and len(found.source) == len(sources)
    for a, b in zip((media, *sources), (found.media, *found.source), strict=True):
        assert a.pixels.dtype == b.pixels.dtype and np.array_equal(a.pixels, b.pixels)


@given(st.lists(st.tuples(st.none() | st.floats(), st.text(), st.dictionaries(st.text(), st.floats()))))
def test_numbers_survive_as_they_are(rows):
    scores = [Score(*row) for row in rows]
    for sent, found in zip(scores, read_scores(scores_json(scores), len(scores)), strict=True):
        finite = sent.value is not None and np.isfinite(sent.value)
        assert found.value == (sent.value if finite else None) and (finite or found.reason)
        for name, part in sent.parts.items():
            assert found.parts[name] == part or (not np.isfinite(part) and np.isnan(found.parts[name]))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=9).map(str))
def test_any_bytes_are_read_or_refused(raw):
    raw = raw if isinstance(raw, bytes) else raw.encode()
    for read in (lambda: read_request(raw, "x", Moody), lambda: read_scores(raw, 1)):
        with pytest.raises(WireError):
            read()


GOOD, NOISE = json.loads(media_json(grey(9))), json.loads(media_json(noise(0, 32, 32)))
BAD = "expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"media": GOOD}, "samples[0].prompt: expected a str, got NoneType"),
        *(
            ({"prompt": "a", "media": bad}, f"samples[0].media: {BAD}")
            for bad in (None, "", [], [GOOD, ""], "é", base64.b64encode(b"GIF89a").decode(), NOISE[:400],
                        [json.loads(media_json(grey(9, size))) for size in (8, 9)])
        ),
        ({"prompt": "a", "media": [GOOD]}, "samples[0].media: this reward takes image, got video"),
        ({"prompt": "a", "media": GOOD}, "samples[0].source: this reward scores edits"),
        ({"prompt": "a", "media": GOOD, "source": [GOOD]}, "samples[0].meta: expected also tag"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(row, message):
    with pytest.raises(WireError) as caught:
        read_request(json.dumps({"samples": [row]}).encode(), "edit", Edit)
    assert message in str(caught.value) and "0x" not in str(caught.value)


# the server


def test_answers(moody):
    """Scores equal the reward's own; missing or non-finite ones are null with a reason; /v1/info names the inputs."""
    clip = noise(1, 24, 16, 5)
    for media in (grey(77), clip):
        status, answer = post(moody.url, body('braces {} "quotes" 😀', media))
        assert status == 200 and answer["scores"][0]["value"] == brightness(Sample("", media))
    nan = {"value": None, "reason": "the reward returned nan", "parts": {"half": None}}
    assert post(moody.url, body("nan", grey(9)))[1]["scores"] == [nan]
    assert post(moody.url, body("missing", grey(9)))[1]["scores"] == [{"value": None, "reason": "nothing to see"}]
    with urllib.request.urlopen(f"{moody.url}/v1/info", timeout=600) as reply:
        info = json.loads(reply.read())
    assert info["name"] == MOODY and info["takes"] == ["image", "video"] and info["status"] == "ready"


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b"", 400, "not JSON"),
        (b'{"reward": "clip", "samples": [1]}', 400, f"this server scores '{MOODY}', not 'clip'"),
        (b'{"samples": [{"prompt": "a", "media": ""}]}', 400, BAD),
        (b" " * (1 << 20) + body("a", grey(9)), 413, "larger than 1 MiB; raise --max-mib"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(moody, raw, code, message):
    status, answer = post(moody.url, raw)
    assert status == code and message in answer


def together(server, gate, prompts):
    """Answers to concurrent requests: the first one blocks the server until all others are queued behind it."""
    answers = {}

    def ask(k, prompt):
        answers[k] = post(server.url, body(prompt, grey(10 * k)))

    first, *rest = [threading.Thread(target=ask, args=item) for item in enumerate([f"until {gate}", *prompts])]
    batches = server.counts()["batches"]
    first.start()
    server.wait_for("batches", batches + 1)
    for thread in rest:
        thread.start()
    server.wait_for("queued", len(rest))
    gate.touch()
    for thread in (first, *rest):
        thread.join()
    return [answers[k] for k in sorted(answers)]


def test_a_failing_sample_fails_alone(moody, tmp_path):
    """Three requests wait behind a slow one and form a batch; the one that raises gets a 500, the others scores."""
    answers = together(moody, tmp_path / "go", ["a", "raise", "b"])
    assert answers[2][0] == 500 and "RuntimeError: out of memory" in answers[2][1]
    assert [answers[k][1]["scores"][0]["value"] for k in (0, 1, 3)] == [10 * k / 255 for k in (0, 1, 3)]


def test_what_arrives_during_a_batch_is_the_next_one(moody, tmp_path):
    before = moody.counts()
    answers = together(moody, tmp_path / "go", ["a"] * 6)
    sizes = sorted(a["scores"][0]["parts"]["batch"] for _, a in answers)
    assert sizes == [1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0], "batches of 1, then --max-batch of the six waiting, then 2"
    after = moody.counts()
    assert (after["samples"] - before["samples"], after["batches"] - before["batches"]) == (7, 3)


def listening(*options, **more):
    """A server that is listening but not yet ready."""
    server = Process(MOODY, *options, ready=False, **more)
    while server.health() == 0:
        time.sleep(0.02)
    return server


def test_ready_only_after_a_real_score(tmp_path):
    with listening("--options", f"load_until={tmp_path / 'go'}") as server:
        assert server.health() == 503, "it must listen while loading"
        status, message = post(server.url, body("a", grey(9)))
        assert status == 503 and "is loading" in message
        (tmp_path / "go").touch()
        server.wait_ready()
        assert post(server.url, body("a", grey(9)))[0] == 200


def test_sigterm_answers_what_was_sent_and_takes_nothing_new(tmp_path):
    log, gate, answers, stopped = tmp_path / "log", tmp_path / "go", [], []
    server = Process(MOODY, log=log)
    assert "note" not in log.read_text()
    ask = threading.Thread(target=lambda: answers.append(post(server.url, body(f"until {gate}", grey(51)))))
    ask.start()
    server.wait_for("batches", 2)  # the probe and this request
    stop = threading.Thread(target=lambda: stopped.append(server.stop()))
    stop.start()
    while "stopping" not in log.read_text():
        time.sleep(0.01)
    gate.touch()
    stop.join()
    ask.join()
    assert stopped == [0]
    assert answers == [(200, {"scores": [{"value": 0.2, "parts": {"batch": 1.0}}]})]
    assert server.health() == 0 and "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (MOODY, ["--options", "load_error=no torch here"], "cannot be loaded: ImportError: no torch here"),
        (MOODY, ["--options", "value=.nan"], "gave no score to a probe sample: nan"),
        (MOODY, ["--options", "colour=3"], "has no option 'colour'"),
        ("vlm_pairwise", [], "compares the samples of a group"),
        ("jpeg_compressibility", ["--port", "BUSY"], "(Address already in use)"),
    ],
)
def test_what_cannot_be_served_ends_the_command(moody, capfd, name, options, message):
    options = [str(moody.port) if o == "BUSY" else o for o in options]
    port = [] if "--port" in options else ["--port", str(free_port())]
    assert cli.main(["reward", "serve", name, *port, *options]) == 2
    assert message in capfd.readouterr().err
    assert moody.health() == 200


def test_options_come_from_words_and_files(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text("clip: {model: /m, batch: 8}\nother: {model: x}\n")
    b.write_text("model: /n\n")
    assert read_options("clip", [str(a)]) == {"model": "/m", "batch": 8}
    words = [str(a), str(b), "batch=2", "names=[a, b]", "path=/x=y"]
    assert read_options("clip", words) == {"model": "/n", "batch": 2, "names": ["a", "b"], "path": "/x=y"}


def test_it_imports_only_light_libraries():
    """So that the server can run beside the old libraries that a reward pins."""
    script = (
        "import sys, prefgrpo.rewards.serve as s, prefgrpo.rewards.jpeg\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'pydantic', 'tyro', 'peft', 'open_clip', 'scipy'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    env = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
