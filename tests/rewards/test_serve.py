"""`prefgrpo reward serve` as a separate process, queried over real HTTP.

Why these cases: a server that listens before its model works keeps a run waiting in vain; one rank's bad request must
not fail the others in its batch; served scores must equal the reward's own, bit for bit; and the server runs in old
environments, so it may import only light libraries.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import free_port, until
from servers import MOODY, TESTS, Process, brightness, parts_of
from world import grey, noise

from prefgrpo.commands import cli
from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.remote import CONTENT_TYPE, encode_frames, read_answer, request_body
from prefgrpo.rewards.serve import read_samples


@pytest.fixture(scope="module")
def moody():
    with Process(MOODY, "--max-batch", "4") as server:
        yield server


def body(prompt, media):
    return request_body(MOODY, (Sample(prompt, media),), [encode_frames(media)])


def post(url, raw):
    """(HTTP status, answer) of a POST request."""
    request = urllib.request.Request(f"{url}/score", raw, {"Content-Type": CONTENT_TYPE})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


# the wire

pixels = st.builds(noise, st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3))


@settings(max_examples=60)
@given(
    st.text(),
    st.lists(pixels, min_size=1, max_size=2),
    st.lists(pixels, max_size=2),
    st.dictionaries(st.text(), st.text() | st.integers()),
)
def test_what_is_sent_is_what_arrives(prompt, media, sources, meta):
    """One sample, or the two of a pair."""
    samples = tuple(Sample(prompt, medium, tuple(sources), meta) for medium in media)
    files = [encode_frames(m) for m in (*media, *sources)]
    fields, received = parts_of(request_body("x", samples, files))
    assert received == [file for one in files for file in one]
    found = read_samples(fields, received, "x")
    assert len(found) == len(samples) and found[0].media.frame_rate == media[0].frame_rate
    for one in found:
        assert (one.prompt, one.meta) == (prompt, meta) and len(one.source) == len(sources)
    arrived = [*(one.media for one in found), *found[-1].source]
    for a, b in zip((*media, *sources), arrived, strict=True):
        assert a.pixels.dtype == b.pixels.dtype and np.array_equal(a.pixels, b.pixels)


@given(st.none() | st.floats(), st.text(), st.dictionaries(st.text(), st.floats()))
def test_numbers_survive_as_they_are(value, reason, parts):
    found = read_answer("url", json.dumps(Answer(value, reason, parts).row(), allow_nan=False).encode())
    finite = value is not None and np.isfinite(value)
    assert found.value == (value if finite else None) and (finite or found.reason)
    for name, part in parts.items():
        assert found.parts[name] == part or (not np.isfinite(part) and np.isnan(found.parts[name]))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=9).map(str))
def test_any_reply_is_read_or_refused(raw):
    with pytest.raises(ValueError):
        read_answer("url", raw if isinstance(raw, bytes) else raw.encode())


GOOD = encode_frames(grey(9))[0]


@pytest.mark.parametrize(
    ("row", "files", "message"),
    [
        ({}, [GOOD], "KeyError: 'prompt'"),
        ({"prompt": "a"}, [], "IndexError"),
        ({"prompt": "a", "frames": [2]}, [GOOD], "IndexError"),
        ({"prompt": "a"}, [b"GIF89a"], "UnidentifiedImageError"),
        ({"prompt": "a"}, [encode_frames(noise(0, 32, 32))[0][:400]], "OSError"),
        ({"prompt": "a", "frames": [2]}, [GOOD, encode_frames(grey(9, 8))[0]], "all input arrays must have the same"),
        ({"prompt": "a", "reward": "clip"}, [GOOD], "this server scores 'edit', not 'clip'"),
    ],
)
def test_a_wrong_form_is_refused(row, files, message):
    with pytest.raises(ValueError, match=message):
        read_samples(json.dumps(row), files, "edit")


# the server


def test_answers(moody):
    """Scores equal the reward's own; missing or non-finite ones are null with a reason; a wrong form is a 400."""
    for media in (grey(77), noise(1, 24, 16, 5)):
        status, answer = post(moody.url, body('braces {} "quotes" 😀', media))
        assert status == 200 and answer["value"] == brightness(Sample("", media))
    nan = {"value": None, "reason": "the reward returned nan", "parts": {"half": None}}
    assert post(moody.url, body("nan", grey(9)))[1] == nan
    assert post(moody.url, body("missing", grey(9)))[1] == {"value": None, "reason": "nothing to see"}
    assert moody.counts()["name"] == MOODY
    for raw in (b"{}", request_body(MOODY, (Sample("a", grey(9)),), [[b""]])):
        status, message = post(moody.url, raw)
        assert status == 400 and message


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
    return [answers[k][1] for k in sorted(answers)]


def test_what_arrives_during_a_batch_is_the_next_one(moody, tmp_path):
    before = moody.counts()
    answers = together(moody, tmp_path / "go", ["a"] * 6)
    sizes = sorted(a["parts"]["batch"] for a in answers)
    assert sizes == [1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0], "batches of 1, then --max-batch of the six waiting, then 2"
    after = moody.counts()
    assert (after["samples"] - before["samples"], after["batches"] - before["batches"]) == (7, 3)
    answers = together(moody, tmp_path / "again", ["a", "raise", "b"])
    assert [answers[k]["value"] for k in range(4)] == [0.0, 10 / 255, None, 30 / 255], "a failing sample fails alone"
    assert answers[2]["reason"] == "the reward raised RuntimeError: out of memory"


def test_it_answers_only_once_a_sample_was_scored(tmp_path):
    log = tmp_path / "log"
    with Process(MOODY, "--options", f"load_until={tmp_path / 'go'}", ready=False, log=log) as server:
        until(lambda: "loading" in log.read_text(), 60)
        assert server.health() == 0
        (tmp_path / "go").touch()
        server.wait_ready()
        assert post(server.url, body("a", grey(9)))[0] == 200


def listens(port):
    """Whether the port takes connections; a request would hold up the server if it came while the server ends."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_sigterm_answers_what_was_sent_and_takes_nothing_new(tmp_path):
    log, gate, answers, stopped = tmp_path / "log", tmp_path / "go", [], []
    server = Process(MOODY, log=log)
    ask = threading.Thread(target=lambda: answers.append(post(server.url, body(f"until {gate}", grey(51)))))
    ask.start()
    server.wait_for("batches", 1)
    stop = threading.Thread(target=lambda: stopped.append(server.stop()))
    stop.start()
    until(lambda: not listens(server.port), 60)
    gate.touch()
    stop.join()
    ask.join()
    assert stopped == [0]
    assert answers == [(200, {"value": 0.2, "parts": {"batch": 1.0}})]
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (MOODY, ["--options", "load_error=no torch here"], "cannot be loaded: ImportError: no torch here"),
        (MOODY, ["--options", "value=.nan"], "gave no score to a probe sample: the reward returned nan"),
        (MOODY, ["--options", "colour=3"], "has no option 'colour'"),
        ("vlm_pairwise", [], "needs the option(s) judge"),
        ("jpeg_compressibility", ["--port", "BUSY"], "address already in use"),
    ],
)
def test_what_cannot_be_served_ends_the_command(moody, capfd, name, options, message):
    options = [str(moody.port) if o == "BUSY" else o for o in options]
    port = [] if "--port" in options else ["--port", str(free_port())]
    assert cli.main(["reward", "serve", name, *port, *options]) == 2
    assert message in capfd.readouterr().err
    assert moody.health() == 200


def test_it_imports_only_light_libraries():
    """So that the server can run beside the old libraries that a reward pins."""
    script = (
        "import sys, prefgrpo.rewards.serve as s, prefgrpo.rewards.simple\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'tyro', 'peft', 'open_clip', 'scipy'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    env = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
