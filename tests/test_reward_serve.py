"""`prefgrpo reward serve` as a process, asked over real HTTP.

Why these cases: a server that says ready before its model works makes a run wait for nothing; one bad request of one
rank must not fail the others that share its batch; a run's numbers must be those of the reward, bit for bit; and the
server runs in old environments, so it may import only light libraries.
"""

import base64
import json
import os
import signal
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
from reward_server import MOODY, TESTS, Moody, Process, brightness, picture

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.serve import RewardServer, main, read_options
from prefgrpo.rewards.wire import WireError, media_json, read_request, read_scores, request_json, scores_json


@pytest.fixture(scope="module")
def moody():
    with Process(MOODY, "--max-batch", "4", "--max-mib", "1") as server:
        yield server


def body(prompt, media, source=(), meta=None, name=MOODY):
    sample = Sample(prompt, media, tuple(source), meta or {})
    return request_json(name, sample, media_json(media), [media_json(m) for m in source])


def post(url, raw, path="/score"):
    """(status, answer) of a POST."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, raw), timeout=20) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=30) as reply:
        raw = reply.read()
    return raw.decode()


def told(answer):
    return answer["error"]["message"]


def image64(data):
    return base64.b64encode(data).decode()


# the wire


class Edit(PointwiseReward):
    takes, needs_source, meta_keys = ("image",), True, ("tag",)

    def score(self, samples):
        return []


pixels = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1), st.integers(0, 3))


def drawn(height, width, seed, frames):
    shape = (height, width, 3) if not frames else (frames, height, width, 3)
    return Media(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


@settings(max_examples=60)
@given(st.text(), pixels, st.lists(pixels, max_size=2), st.dictionaries(st.text(), st.text() | st.integers()))
def test_what_is_sent_is_what_arrives(prompt, media, sources, meta):
    sample = Sample(prompt, drawn(*media), tuple(drawn(*s) for s in sources), meta)
    raw = request_json("x", sample, media_json(sample.media), [media_json(m) for m in sample.source])
    (found,) = read_request(raw, "x", Moody)
    assert (found.prompt, found.meta) == (prompt, meta) and len(found.source) == len(sources)
    for a, b in zip((sample.media, *sample.source), (found.media, *found.source), strict=True):
        assert a.pixels.dtype == b.pixels.dtype and np.array_equal(a.pixels, b.pixels)


@given(st.lists(st.tuples(st.none() | st.floats(), st.text(), st.dictionaries(st.text(), st.floats()))))
def test_numbers_survive_as_they_are(rows):
    scores = [Score(*row) for row in rows]
    for sent, found in zip(scores, read_scores(scores_json(scores), len(scores)), strict=True):
        finite = sent.value is not None and np.isfinite(sent.value)
        assert found.value == (sent.value if finite else None)
        assert finite or found.reason
        for name, part in sent.parts.items():
            assert found.parts[name] == part or (not np.isfinite(part) and np.isnan(found.parts[name]))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=9).map(str))
def test_any_bytes_are_read_or_refused(raw):
    raw = raw if isinstance(raw, bytes) else raw.encode()
    for read in (lambda: read_request(raw, "x", Moody), lambda: read_scores(raw, 1)):
        with pytest.raises(WireError):
            read()


GOOD = json.loads(media_json(picture(9)))
NOISE = json.loads(media_json(drawn(32, 32, 0, 0)))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (3, "samples[0]: expected a dict, got int 3"),
        ({"media": GOOD}, "samples[0].prompt: expected a str, got NoneType"),
        (
            {"prompt": "a"},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": ""},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": []},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": [GOOD, ""]},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": "é"},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": image64(b"GIF89a")},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        (
            {"prompt": "a", "media": NOISE[:400]},
            "samples[0].media: expected base64 of a file that is PNG, WEBP, JPEG, or a list of such frames of one size",
        ),
        ({"prompt": "a", "media": GOOD, "meta": []}, "samples[0].meta: expected a dict, got list"),
        ({"prompt": "a", "media": GOOD, "image": GOOD}, "samples[0]: unknown field(s) image"),
        ({"prompt": "a", "media": [GOOD]}, "samples[0].media: this reward takes image, got video"),
        ({"prompt": "a", "media": GOOD}, "samples[0].source: this reward scores edits"),
        ({"prompt": "a", "media": GOOD, "source": [GOOD]}, "samples[0].meta: lacks tag"),
    ],
)
def test_refusals_name_the_field(row, named):
    with pytest.raises(WireError) as caught:
        read_request(json.dumps({"samples": [row]}).encode(), "edit", Edit)
    assert named in str(caught.value) and "0x" not in str(caught.value)


def test_a_clip_of_two_sizes_is_refused():
    frames = [json.loads(media_json(picture(9, size))) for size in (8, 9)]
    with pytest.raises(WireError, match="frames of one size"):
        read_request(json.dumps({"samples": [{"prompt": "a", "media": frames}]}).encode(), "x", Moody)


# the server


def test_scores_are_those_of_the_reward(moody):
    clip = Media(np.random.default_rng(1).integers(0, 256, (5, 24, 16, 3), np.uint8))
    for media in (picture(77), clip):
        status, answer = post(moody.url, body('braces {} "quotes" 😀', media))
        assert status == 200 and answer["scores"][0]["value"] == brightness(Sample("", media))


def test_nan_and_missing_are_null_with_a_reason(moody):
    assert post(moody.url, body("nan", picture(9)))[1]["scores"] == [
        {"value": None, "reason": "the reward returned nan", "parts": {"half": None}}
    ]
    assert post(moody.url, body("missing", picture(9)))[1]["scores"] == [{"value": None, "reason": "nothing to see"}]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "not JSON"),
        (b'{"samples"', "not JSON"),
        (b"[1]", "the body: expected a dict, got list"),
        (b"{}", "samples: expected a list"),
        (b'{"reward": "clip", "samples": [1]}', f"this server scores '{MOODY}', not 'clip'"),
        (b'{"samples": [{"prompt": "a", "media": ""}]}', "expected base64 of a file"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_requests_are_400_with_the_reason(moody, raw, named):
    status, answer = post(moody.url, raw)
    assert status == 400 and named in told(answer)


def test_a_request_above_the_limit_is_refused(moody):
    status, answer = post(moody.url, b" " * (1 << 20) + body("a", picture(9)))
    assert status == 413 and "larger than 1 MiB; raise --max-mib" in told(answer)


def together(server, gate, prompts):
    """Answers to requests of which all but the first wait behind it: it is let go when they are queued."""
    answers = {}

    def ask(k, prompt):
        answers[k] = post(server.url, body(prompt, picture(10 * k)))

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
    """All wait behind a slow one and make up one batch; the one that raises gets 500, the others their scores."""
    found = together(moody, tmp_path / "go", ["a", "raise", "b"])
    assert found[2][0] == 500 and "RuntimeError: out of memory" in told(found[2][1])
    assert [found[k][1]["scores"][0]["value"] for k in (0, 1, 3)] == [10 * k / 255 for k in (0, 1, 3)]


def test_what_arrives_during_a_batch_is_the_next_one(moody, tmp_path):
    before = moody.counts()
    answers = together(moody, tmp_path / "go", ["a"] * 6)
    sizes = sorted(a["scores"][0]["parts"]["batch"] for _, a in answers)
    assert sizes == [1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0], "one alone, then --max-batch of the six that waited, then two"
    after = moody.counts()
    assert after["samples"] - before["samples"] == 7 and after["batches"] - before["batches"] == 3


def test_what_it_says_of_itself(moody):
    info = json.loads(get(moody.url, "/v1/info"))
    assert info["name"] == MOODY and info["takes"] == ["image", "video"] and info["status"] == "ready"
    assert moody.counts()["queued"] == 0


def test_ready_only_after_a_real_score(tmp_path):
    with Process(MOODY, "--options", f"load_until={tmp_path / 'go'}", ready=False) as server:
        while (status := server.health()) == 0:
            time.sleep(0.02)
        assert status == 503, "it listens while it loads"
        answered, answer = post(server.url, body("a", picture(9)))
        assert answered == 503 and "is loading" in told(answer)
        (tmp_path / "go").touch()
        server.wait_ready()
        assert post(server.url, body("a", picture(9)))[0] == 200


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("load_error=no torch here", "cannot be loaded: ImportError: no torch here"),
        ("value=.nan", "gave no score to a probe sample: nan"),
        ("colour=3", "has no option 'colour'"),
        ("url=http://x", "have a url"),
    ],
)
def test_a_reward_that_does_not_work_ends_the_server(tmp_path, option, said):
    log = tmp_path / "log"
    server = Process(MOODY, "--options", option, ready=False, log=log)
    assert server.child.wait(20) == 2
    assert said in log.read_text()


def test_sigterm_answers_what_was_sent_and_takes_nothing_new(tmp_path):
    log = tmp_path / "log"
    server = Process(MOODY, log=log)
    answers = []
    gate, stopped = tmp_path / "go", []
    ask = threading.Thread(target=lambda: answers.append(post(server.url, body(f"until {gate}", picture(51)))))
    ask.start()
    server.wait_for("batches", 2)  # the probe's, and this one
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


def test_interrupt_while_loading_ends_at_once():
    server = Process(MOODY, "--options", "load_until=/nowhere", ready=False)
    while server.health() == 0:
        time.sleep(0.02)
    start = time.monotonic()
    server.child.send_signal(signal.SIGINT)
    server.child.wait(20)
    assert time.monotonic() - start < 20


def test_a_busy_port_is_refused(moody, tmp_path):
    log = tmp_path / "log"
    second = Process("jpeg_compressibility", port=moody.port, ready=False, log=log)
    assert second.child.wait(20) == 2
    assert f"error: cannot listen on 127.0.0.1:{moody.port} (Address already in use)" in log.read_text()
    assert moody.health() == 200


def test_all_addresses_are_noted_and_loopback_is_not(tmp_path):
    log = tmp_path / "log"
    with Process("jpeg_compressibility", "--host", "0.0.0.0", log=log):
        assert "note: 0.0.0.0 is reachable by others" in log.read_text()
    with Process("jpeg_compressibility", log=log):
        assert "note" not in log.read_text()


def test_options_come_from_words_and_files(tmp_path):
    (tmp_path / "a.yaml").write_text("clip: {model: /m, batch: 8}\nother: {model: x}\n")
    (tmp_path / "b.yaml").write_text("model: /n\n")
    assert read_options("clip", [str(tmp_path / "a.yaml")]) == {"model": "/m", "batch": 8}
    words = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "batch=2", "names=[a, b]", "path=/x=y"]
    assert read_options("clip", words) == {"model": "/n", "batch": 2, "names": ["a", "b"], "path": "/x=y"}


def test_a_pairwise_reward_is_not_served():
    with pytest.raises(RewardError, match="compares a group's samples"):
        RewardServer("vlm_pairwise", {})


def test_it_imports_only_light_libraries():
    """So that it starts beside the old libraries that a reward pins."""
    script = (
        "import sys, prefgrpo.rewards.serve as s, prefgrpo.rewards.jpeg\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'pydantic', 'tyro', 'peft', 'open_clip', 'scipy'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    env = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_is_the_module(capsys):
    from prefgrpo.commands import cli

    port = free_port()
    assert cli.main(["reward", "serve", "jpg", "--port", str(port)]) == 2
    assert "unknown reward 'jpg'" in capsys.readouterr().err


def test_a_port_that_is_none_is_refused(capsys):
    assert main(["jpeg_compressibility", "--port", "99999"]) == 2
    assert "error: cannot listen on 127.0.0.1:99999 (expected 0 to 65535)" in capsys.readouterr().err
