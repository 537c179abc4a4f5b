"""`prefgrpo reward serve` as a separate process, queried over real HTTP.

Why these cases: a server that reports ready before its model works keeps a run waiting in vain; one rank's bad request
must not fail the others in its batch; served scores must equal the reward's own, bit for bit; and the server runs in
old environments, so it may import only light libraries.
"""

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
from reward_server import MOODY, TESTS, Moody, Process, brightness, parts_of
from tiny_media import grey, noise

from prefgrpo.commands import cli
from prefgrpo.rewards.base import PointwiseReward, Sample, Score
from prefgrpo.rewards.serve import read_options
from prefgrpo.rewards.wire import (
    CONTENT_TYPE,
    WireError,
    encode_frames,
    read_sample,
    read_score,
    request_body,
    score_row,
)


@pytest.fixture(scope="module")
def moody():
    with Process(MOODY, "--max-batch", "4", "--max-mib", "1") as server:
        yield server


def body(prompt, media):
    return request_body(MOODY, Sample(prompt, media), [encode_frames(media)])


def post(url, raw):
    """(HTTP status, answer) of a POST request."""
    request = urllib.request.Request(f"{url}/score", raw, {"Content-Type": CONTENT_TYPE})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
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
    files = [encode_frames(m) for m in (media, *sources)]
    fields, received = parts_of(request_body("x", sample, files))
    assert received == [file for one in files for file in one]
    found = read_sample(fields, received, "x", Moody)
    assert (found.prompt, found.meta) == (prompt, meta) and len(found.source) == len(sources)
    for a, b in zip((media, *sources), (found.media, *found.source), strict=True):
        assert a.pixels.dtype == b.pixels.dtype and np.array_equal(a.pixels, b.pixels)


@given(st.none() | st.floats(), st.text(), st.dictionaries(st.text(), st.floats()))
def test_numbers_survive_as_they_are(value, reason, parts):
    found = read_score(json.dumps(score_row(Score(value, reason, parts)), allow_nan=False).encode())
    finite = value is not None and np.isfinite(value)
    assert found.value == (value if finite else None) and (finite or found.reason)
    for name, part in parts.items():
        assert found.parts[name] == part or (not np.isfinite(part) and np.isnan(found.parts[name]))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=9).map(str))
def test_any_bytes_are_read_or_refused(raw):
    raw = raw if isinstance(raw, bytes) else raw.encode()
    for read in (lambda: read_sample(raw.decode("utf-8", "replace"), [raw], "x", Moody), lambda: read_score(raw)):
        with pytest.raises(WireError):
            read()


GOOD, NOISE = encode_frames(grey(9))[0], encode_frames(noise(0, 32, 32))[0]
BAD = "expected a file that is PNG, WEBP, JPEG"


@pytest.mark.parametrize(
    ("row", "files", "message"),
    [
        ({}, [GOOD], "sample: expected a text prompt and an object meta"),
        ({"prompt": "a"}, [], "frames: expected the number of frames of each of 0 files"),
        (
            {"prompt": "a", "frames": [2]},
            [GOOD],
            "frames: expected the number of frames of each of 1 files, got list [2]",
        ),
        ({"prompt": "a", "frames": [True]}, [GOOD], "frames: expected the number of frames"),
        ({"prompt": "a"}, [b""], f"frame 0: {BAD}"),
        ({"prompt": "a"}, [GOOD, b"GIF89a"], f"frame 1: {BAD}"),
        ({"prompt": "a"}, [NOISE[:400]], f"frame 0: {BAD}"),
        (
            {"prompt": "a", "frames": [0, 2]},
            [GOOD, encode_frames(grey(9, 8))[0], NOISE],
            "all frames of a clip to have one size",
        ),
        ({"prompt": "a", "frames": [1]}, [GOOD], "frames: this reward takes image, got video"),
        ({"prompt": "a"}, [GOOD], "frames: this reward scores edits"),
        ({"prompt": "a"}, [GOOD, GOOD], "meta: expected also tag"),
        ({"prompt": "a", "reward": "clip"}, [GOOD, GOOD], "reward: this server scores 'edit', not 'clip'"),
    ],
)
def test_refusals_name_the_field(row, files, message):
    with pytest.raises(WireError) as caught:
        read_sample(json.dumps(row), files, "edit", Edit)
    assert message in str(caught.value) and "0x" not in str(caught.value)


# the server


def test_answers(moody):
    """Scores equal the reward's own; missing or non-finite ones are null with a reason; /v1/info names the inputs."""
    clip = noise(1, 24, 16, 5)
    for media in (grey(77), clip):
        status, answer = post(moody.url, body('braces {} "quotes" 😀', media))
        assert status == 200 and answer["value"] == brightness(Sample("", media))
    nan = {"value": None, "reason": "the reward returned nan", "parts": {"half": None}}
    assert post(moody.url, body("nan", grey(9)))[1] == nan
    assert post(moody.url, body("missing", grey(9)))[1] == {"value": None, "reason": "nothing to see"}
    with urllib.request.urlopen(f"{moody.url}/v1/info", timeout=600) as reply:
        info = json.loads(reply.read())
    assert info["name"] == MOODY and info["takes"] == ["image", "video"] and info["status"] == "ready"


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b"{}", 400, "Could not find starting boundary"),
        (request_body("clip", Sample("a", grey(9)), [[GOOD]]), 400, f"this server scores '{MOODY}', not 'clip'"),
        (request_body(MOODY, Sample("a", grey(9)), [[b""]]), 400, BAD),
        (body("a", noise(0, 700, 700)), 413, "larger than 1 MiB; raise --max-mib"),
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
    assert [answers[k][1]["value"] for k in (0, 1, 3)] == [10 * k / 255 for k in (0, 1, 3)]


def test_what_arrives_during_a_batch_is_the_next_one(moody, tmp_path):
    before = moody.counts()
    answers = together(moody, tmp_path / "go", ["a"] * 6)
    sizes = sorted(a["parts"]["batch"] for _, a in answers)
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
    assert answers == [(200, {"value": 0.2, "parts": {"batch": 1.0}})]
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
