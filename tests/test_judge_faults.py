"""Each fault of a judge server, injected for real over HTTP.

In every case: bounded time, the pair is missing (never 0.5), the reason names the fault, and what may mend is asked
again. The server decodes the pictures and prefers the brighter, so a verdict of the wrong pair would show.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from judge_server import MODEL, JudgeServer, free_port, images

from prefgrpo.data.media import Media
from prefgrpo.judge.client import HttpJudge, HttpJudgeConfig, check
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.verdict import JudgeError

FAST = {"timeout_s": 1.0, "retries": 2, "backoff_s": 0.05, "patience_s": 2.0}


def media(levels):
    return [Media(np.full((32, 32, 3), level, np.uint8)) for level in levels]


def judge(*urls, **changes):
    return HttpJudge(HttpJudgeConfig(endpoints=urls, **{**FAST, **changes}))


def ask(j, count=1):
    dark, bright = media([40, 200])
    return j.judge_group("p", [dark, bright], [(0, 1), (1, 0)] * count)


MISSING = {
    "hang": "did not answer within 1 s",
    "500": "answered 500: engine trouble",
    "400": "refused with 400: At most 1 image",
    "drop": "gave up after 3 requests",
    "truncated": "gave up after 3 requests",
    "drip": "did not answer within 1 s",
    "no_choices": "without choices",
    "no_logprobs": "no logprobs",
    "garbage": "neither label",
    "nan": "probability",
    "not_json": "no readable chat completion",
    "html": "no readable chat completion",
    "sick": "no server was reachable for 2 s",
}


@pytest.mark.parametrize("fault", MISSING)
def test_a_fault_that_stays_is_missing_with_its_reason(fault):
    with JudgeServer(fault) as server:
        start = time.monotonic()
        verdicts = ask(judge(server.url))
        assert time.monotonic() - start < 30
    assert [v.first for v in verdicts] == [None, None]
    assert all(MISSING[fault] in v.reason for v in verdicts), verdicts[0].reason
    if fault in ("400", "no_logprobs", "garbage", "nan"):
        assert len(server.requests) == 2  # asking again would not help
    if fault in ("no_choices", "not_json", "html"):
        assert len(server.requests) == 4  # once more: a body may be broken on its way


@pytest.mark.parametrize("fault", ["500", "drop", "truncated", "hang", "429", "not_json", "html"])
def test_a_fault_that_passes_is_asked_again(fault):
    with JudgeServer(fault, count=1) as server:
        start = time.monotonic()
        dark_first, bright_first = ask(judge(server.url, retries=5, patience_s=10))
        took = time.monotonic() - start
    assert dark_first.first < 0.1 and bright_first.first > 0.9
    assert took < 30
    if fault == "429":
        assert took >= 1.0  # Retry-After: 1


def test_down_at_start_is_an_error_in_seconds():
    start = time.monotonic()
    with pytest.raises(JudgeError, match=r"127.0.0.1.*not reachable.*prefgrpo judge serve"):
        check(HttpJudgeConfig(endpoints=(f"http://127.0.0.1:{free_port()}",)))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("where", ["list of models", "chat"])
def test_the_check_waits_out_a_burst_of_503(where):
    with JudgeServer("loading" if where == "list of models" else "503", count=5) as server:
        recover = threading.Timer(1.0, setattr, (server, "fault", ""))
        if where == "list of models":
            recover.start()
        found = check(HttpJudgeConfig((server.url,)), bias_pairs=0)
        assert found.probe_p_first is not None and not found.endpoints[0].problem
        server.fault, server.count = "503", -1
        with pytest.raises(JudgeError, match="answered 503: overloaded"):
            check(HttpJudgeConfig((server.url,), patience_s=1.0))


def test_a_name_that_does_not_resolve_is_an_error_in_seconds():
    with pytest.raises(JudgeError, match="not reachable"):
        check(HttpJudgeConfig(endpoints=("http://judge.invalid:8000",)))


def test_the_wrong_model_lists_what_is_served_and_suggests():
    with JudgeServer() as server:
        with pytest.raises(JudgeError, match=f"serves {MODEL}, not 'bright-juge'; did you mean '{MODEL}'"):
            check(HttpJudgeConfig(endpoints=(server.url,), model="bright-juge"))
        verdicts = ask(judge(server.url, model="other"))
    assert [v.first for v in verdicts] == [None, None]
    assert f"serves {MODEL}, not 'other'; correct the model" in verdicts[0].reason and not server.requests


@pytest.mark.parametrize(("fault", "complaint"), [("garbage", "neither label"), ("400", "At most 1 image")])
def test_a_server_that_gives_no_verdict_fails_the_check(fault, complaint):
    with JudgeServer(fault) as server, pytest.raises(JudgeError, match=complaint):
        check(HttpJudgeConfig(endpoints=(server.url,)))


def test_the_check_reports_a_hanging_server_within_its_time():
    with JudgeServer("hang") as server:
        start = time.monotonic()
        with pytest.raises(JudgeError, match="no verdict"):
            check(HttpJudgeConfig(endpoints=(server.url,)), timeout_s=1.0)
        assert time.monotonic() - start < 30


def test_a_judge_that_writes_text_may_take_its_own_time(tmp_path):
    path = tmp_path / "text.yaml"
    path.write_text("user: '{prompt} {media_1} {media_2}'\nanswer: plain\n")
    with JudgeServer(delay_s=1.0) as server:
        soft = HttpJudgeConfig(endpoints=(server.url,), timeout_s=20)
        with pytest.raises(JudgeError, match="no verdict"):
            check(soft, timeout_s=0.4)
        assert check(replace(soft, template=str(path)), timeout_s=0.4).probe_p_first == 0.0


def test_the_check_measures_position_bias():
    with JudgeServer("contradict") as server:
        biased = check(HttpJudgeConfig(endpoints=(server.url,)), bias_pairs=4)
        server.fault = ""
        fair = check(HttpJudgeConfig(endpoints=(server.url,)), bias_pairs=4)
    assert biased.position_bias == pytest.approx(1 / (1 + np.exp(-3)))
    assert fair.position_bias == pytest.approx(0.5, abs=1e-6)


def test_one_of_two_endpoints_dead_costs_nothing():
    with JudgeServer() as alive:
        j = judge(f"http://127.0.0.1:{free_port()}", alive.url, retries=3)
        start = time.monotonic()
        verdicts = ask(j, 20)
        assert time.monotonic() - start < 20
        assert all(v.first is not None for v in verdicts)
        health = check(j.config)
    assert [bool(e.problem) for e in health.endpoints] == [True, False]


def test_an_endpoint_that_comes_back_is_used_again():
    port = free_port()
    with JudgeServer() as other:
        j = judge(f"http://127.0.0.1:{port}", other.url, concurrency=2)
        assert all(v.first is not None for v in ask(j, 4))
        with JudgeServer(port=port, delay_s=0.01) as back:
            deadline = time.monotonic() + 30
            while not back.requests and time.monotonic() < deadline:
                assert all(v.first is not None for v in ask(j, 8))
                time.sleep(0.1)
            assert back.requests


@contextlib.contextmanager
def process(port, *options):
    """The server as a process of its own, ready to answer; `options` are those of judge_server.py."""
    script = Path(__file__).with_name("judge_server.py")
    command = [sys.executable, str(script), "--port", str(port), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and "serving" in child.stdout.readline()
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.wait(10)


def test_a_server_killed_in_the_middle_of_a_group_and_restarted_loses_nothing():
    port, levels = free_port(), list(range(20, 230, 25))
    group, pairs = media(levels), both_orders(len(levels), 0)
    j = judge(f"http://127.0.0.1:{port}", concurrency=4, retries=4, patience_s=120, timeout_s=60)
    with process(port, "--answers", "12") as child:  # one of them is the probe's
        answers = [j.submit("p", group[a], group[b]) for a, b in pairs]
        while sum(a.done() for a in answers) < 10:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert sum(a.done() for a in answers) < len(pairs)
    with process(port):
        verdicts = [a.result(60) for a in answers]
    assert all((v.first > 0.5) == (levels[a] > levels[b]) for v, (a, b) in zip(verdicts, pairs, strict=True))


def test_a_server_that_never_comes_back_ends_all_pairs_together():
    j = judge(f"http://127.0.0.1:{free_port()}", concurrency=4)
    start = time.monotonic()
    verdicts = ask(j, 100)
    assert time.monotonic() - start < 30
    assert all(v.first is None and "reachable" in v.reason for v in verdicts)


def test_each_medium_travels_once_then_its_id():
    group = media(range(10, 100, 10))
    with JudgeServer() as server:
        verdicts = judge(server.url).judge_group("p", group, both_orders(9, 0))
        sent = [p for r in server.requests for p in images(r)]
    assert all(v.first is not None and v.retries == 0 for v in verdicts)
    assert len(sent) == 144 and sum(p["image_url"] is not None for p in sent) == 9
    assert all(p["uuid"].startswith("sha256-") for p in sent)


def test_a_server_that_evicts_media_gets_them_again():
    group, pairs = media(range(10, 100, 10)), both_orders(9, 0)
    with JudgeServer() as server:
        j = judge(server.url, concurrency=1)
        server.capacity = 3
        verdicts = j.judge_group("p", group, pairs)
        full = sum(p["image_url"] is not None for r in server.requests[-10:] for p in images(r))
    assert all((v.first > 0.5) == (a > b) for v, (a, b) in zip(verdicts, pairs, strict=True))
    assert full == 20  # after repeated misses ids are not relied on any more


def test_other_servers_get_plain_openai_parts():
    with JudgeServer(vllm=False) as server:
        verdicts = ask(judge(server.url))
        bodies = server.requests
    assert verdicts[0].first < 0.1
    assert all("uuid" not in p and p["image_url"] for b in bodies for p in images(b))
    assert all("logprob_token_ids" not in b for b in bodies)


def test_concurrency_is_bounded():
    with JudgeServer(delay_s=0.02) as server:
        ask(judge(server.url, concurrency=3), 20)
        assert server.peak == 3


def test_an_image_that_cannot_be_encoded_is_missing():
    with JudgeServer() as server:
        j = judge(server.url)
        empty, fine = Media(np.zeros((0, 0, 3), np.uint8)), media([200])[0]
        verdicts = j.judge_group("p", [empty, fine, fine], [(0, 1), (1, 2)])
    assert verdicts[0].first is None and "could not be encoded" in verdicts[0].reason
    assert verdicts[1].first == pytest.approx(0.5)


def test_a_server_that_is_no_judge_is_named_in_the_check():
    with JudgeServer() as server:
        server.listing = "<html>welcome</html>"
        with pytest.raises(JudgeError, match="lists no model"):
            check(HttpJudgeConfig(endpoints=(server.url,)))


def test_a_process_that_ends_with_requests_in_flight_ends_quietly():
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:]; from test_judge_faults import *\n"
        "j = judge(sys.argv[1]); [j.submit('p', *media([40, 200])) for _ in range(5)]; time.sleep(0.3)"
    )
    with JudgeServer("hang") as server:
        line = [sys.executable, "-c", program, server.url, str(Path(__file__).parent), *sys.path]
        start = time.monotonic()
        ended = subprocess.run(line, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - start < 20


def test_a_cancelled_pair_frees_its_slot():
    with JudgeServer("hang", count=1) as server:
        j = judge(server.url, concurrency=1, timeout_s=30.0)
        dark, bright = media([40, 200])
        stuck = j.submit("p", dark, bright)
        while not server.requests:
            time.sleep(0.01)
        waiting = j.submit("p", bright, dark)
        stuck.cancel()
        assert waiting.result(30).first > 0.9


def test_lossless_and_lossy_formats_name_the_same_winner():
    with JudgeServer() as server:
        for image_format in ("jpeg", "webp", "png"):
            assert ask(judge(server.url, image_format=image_format))[0].first < 0.1
    with pytest.raises(JudgeError, match="image_format"):
        judge("http://127.0.0.1:1", image_format="bmp")


def test_text_answers_are_parsed_over_http(tmp_path):
    path = tmp_path / "text.yaml"
    path.write_text("user: '{prompt} {media_1} {media_2}'\nanswer: plain\n")
    with JudgeServer() as server:
        verdicts = ask(judge(server.url, template=str(path)))
        assert [v.first for v in verdicts] == [0.0, 1.0]
        assert server.requests[0]["max_tokens"] == 32 and "logprobs" not in server.requests[0]
        server.fault = "garbage"
        assert [v.first for v in ask(judge(server.url, template=str(path)))] == [None, None]
