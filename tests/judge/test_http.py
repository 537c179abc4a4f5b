"""Every fault of a judge server that the project promises to survive, injected over real HTTP: FAULTS, CHECKS.

For each: bounded time, a missing pair (never 0.5) with a reason that names the fault, a retry if it may help, and the
other server keeps working. The servers decode the images and prefer the brighter one, so a verdict on the wrong pair
would show. Non-numeric log-probabilities and other malformed answers are in tests/judge/test_template.py.
"""

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ranks import free_port, until
from servers import MODEL, JudgeServer, _error, _zipped, asker, completion, images
from world import grey

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import http
from prefgrpo.judge.check import Shape, check
from prefgrpo.judge.http import JudgeError
from prefgrpo.rewards.pairs import both_orders

FAST = {"timeout_s": 1.0, "deadline_s": 2.0}
LEVELS = (20, 60, 100, 140, 180, 220)
PAIRS = both_orders(len(LEVELS), 0)
NUMBERS = itertools.count()


def media(levels):
    return [grey(level) for level in levels]


def judge(*urls, retries=2, template="compare", **changes):
    made = asker(JudgeConfig(endpoints=urls, **{**FAST, **changes}), template)
    made.judge.pool.retries = retries
    return made


def ask(j, count=1):
    """Verdicts on (dark, bright) and (bright, dark)."""
    return j.judge_group("p", media([40, 200]), [(0, 1), (1, 0)] * count)


def right(j, levels=LEVELS, pairs=PAIRS):
    """For each pair of a new prompt, which may prefer another server, whether the verdict is present and correct."""
    verdicts = j.judge_group(f"p {next(NUMBERS)}", media(levels), pairs)
    return [v.value is not None and (v.value > 0.5) == (a > b) for v, (a, b) in zip(verdicts, pairs, strict=True)]


def missing(verdicts, reason):
    assert [v.value for v in verdicts] == [None] * len(verdicts)
    assert all(reason in v.reason for v in verdicts), verdicts[0].reason


# fault -> (requests per pair while the fault persists, None: as many as fit into the patience; whether another server
# helps; reason)
FAULTS = {
    "hang": (2, True, "did not answer within 1 s"),
    "drip": (2, True, "did not answer within 1 s"),
    "504": (2, True, "answered 504: no answer from behind"),
    "429 0.1": (None, True, "answered 429: slow down"),
    "500": (3, True, "gave up after 3 requests; the last one: http://127.0.0.1"),
    "503": (None, True, "answered 503: overloaded"),
    "drop": (None, True, "Server disconnected"),
    "truncated": (None, True, "payload is not completed"),
    "sick": (None, True, "no server was usable for 2 s"),
    "html": (2, True, "no readable chat completion"),
    "not_json": (2, True, "no readable chat completion"),
    "no_choices": (2, True, "no readable chat completion (IndexError"),
    "endless": (2, True, "sent more than 16 MiB, which is no answer"),
    "bomb": (2, True, "sent more than 16 MiB, which is no answer"),
    "307": (2, True, "refused with 307, a redirect to /elsewhere; correct the address"),
    "403": (2, True, "refused with 403: not for you"),
    "404": (2, True, "refused with 404: no such path"),
    "501": (2, True, "refused with 501: not implemented"),
    "400": (1, False, "refused with 400: At most 1 image"),
    "no_logprobs": (1, False, "no logprobs"),
    "garbage": (1, False, "neither label"),
    "nan": (1, False, "probability"),
}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.full] * (f == "drip")) for f in FAULTS])
def test_a_fault(fault):
    _zipped(json.dumps(completion(0.0) | {"model": MODEL}).encode(), 64)
    requests, mends, reason = FAULTS[fault]
    with JudgeServer(fault) as bad, JudgeServer(delay_s=0.02) as good:
        missing(ask(judge(bad.url, **{"timeout_s": 20.0, "deadline_s": 40.0} if fault == "endless" else {})), reason)
        assert requests == len(bad.requests) / 2 or (requests is None and len(bad.requests) < 2 * 20)
        if requests != 1 and fault != "sick":  # the fault is transient
            bad.count = 2
            dark_first, bright_first = ask(judge(bad.url, retries=5, deadline_s=10))
            assert dark_first.value < 0.1 and bright_first.value > 0.9
        if mends:  # one of two servers stays faulty and must not attract the requests
            bad.count, seen = -1, len(bad.requests)
            assert all(right(judge(bad.url, good.url, concurrency=4, retries=5, deadline_s=60.0)))
            assert len(bad.requests) - seen < len(PAIRS)


@pytest.mark.parametrize(("fault", "reason"), [("endless", "sent more than 16 MiB"), ("bomb", "sent more than 16 MiB")])
def test_a_reply_without_end_costs_little_memory(fault, reason):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with JudgeServer(fault) as server:
        missing(ask(judge(server.url, timeout_s=30.0)), reason)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


def test_a_server_that_asks_for_centuries_is_left_alone_for_the_patience():
    with JudgeServer("429 Fri, 31 Dec 9999 23:59:59 GMT", count=1) as server:
        start = time.monotonic()
        assert ask(judge(server.url))[1].value > 0.9 and 1.5 <= time.monotonic() - start < 10


# ---- the check at the start ------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("template", ["compare", "edit_pairwise"])
def test_a_judge_that_thinks_although_it_should_not_is_told_by_name(template):
    with JudgeServer() as server:
        server.answer = lambda bright, text: {"<think>": 0.9, "\n": 0.1}
        if template == "edit_pairwise":
            server.answer = lambda bright, text: "<think>so</think>Edited image 1 is better."
            assert f"'{MODEL}' thinks before it answers" in "\n".join(
                check(*asker(JudgeConfig((server.url,)), template)).rows
            )
        else:
            with pytest.raises(JudgeError, match=rf"'{MODEL}' .* begins to think .*enable_thinking"):
                check(*asker(JudgeConfig((server.url,))))


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_says_what_is_wrong(name, monkeypatch):
    if name == "mute":
        monkeypatch.setattr(http, "CHECK_S", 1.0)
    for variable, key in (
        ("WRONG_KEY", "hunter2"),
        ("ONE_WORD", "Bearer "),
        ("EMPTY_KEY", " \r\n"),
        ("TWO_LINES", "hunter2\r\nhunter3"),
    ):
        monkeypatch.setenv(variable, key)
    monkeypatch.setenv("ONE_WORD", "Bearer ")
    fault, options, message = CHECKS[name]
    with JudgeServer(fault if fault not in ("listing", "key") else "") as server:
        server.key, server.listing = "secret" * (fault == "key"), "<html>welcome</html>" * (fault == "listing")
        urls = {"down": f"http://127.0.0.1:{free_port()}", "https": server.url.replace("http:", "https:")}
        endpoints = options.get("endpoints", (server.url,))
        endpoints = (urls[endpoints],) if isinstance(endpoints, str) else endpoints
        with pytest.raises(JudgeError, match=f"(?s){message}") as error:
            check(*asker(JudgeConfig(**{**options, "endpoints": endpoints})), wait_s=1.0)
        assert "hunter2" not in str(error.value)


def test_the_check_waits_out_a_burst_of_503():
    with JudgeServer("503", count=3) as server:
        check(*asker(JudgeConfig((server.url,))))


def test_the_check_asks_every_server_and_tells_the_position_bias():
    with JudgeServer("404") as bad, JudgeServer("contradict") as good:
        summary = "\n".join(check(*asker(JudgeConfig((bad.url, good.url))), known_answers=True).rows)
        assert f"{bad.url}: '{MODEL}' gave no verdict on a probe pair: " in summary
        assert f"{good.url}: ok, serves {MODEL}" in summary
        assert f"0 of 8 pairs right, mean P(first) over both orders {1 / (1 + np.exp(-3)):.3f}" in summary
        good.fault = ""
        good.delay_s = 0.6
        check(*asker(JudgeConfig((good.url,))), wait_s=0.3)  # the wait for a server is no limit of an answer


# ---- addresses and connections ---------------------------------------------------------------------------------------


def python(code, *arguments, **environment):
    """Run code in another process, with everything in this file imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])} | environment
    line = [sys.executable, "-c", f"import sys\nfrom tests.judge.test_http import *\n{code}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=600)


@pytest.mark.parametrize("key", ["\ufeff secret\r\n", "Bearer secret", "bearer  secret\n"])
def test_a_key_is_sent_and_one_that_is_refused_in_the_middle_pauses(key, monkeypatch):
    monkeypatch.setenv("RIGHT_KEY", key)
    with JudgeServer() as server:
        server.key = "secret"
        missing(ask(judge(server.url, model=MODEL, deadline_s=1)), "lists no model: /v1/models answered 401")
        with_key = judge(server.url, api_key_env="RIGHT_KEY", deadline_s=20)
        assert ask(with_key)[1].value > 0.9
        server.key = "rotated"
        answer = with_key.submit("p", *media([40, 200]))
        time.sleep(0.5)
        assert not answer.done()
        server.key = "secret"
        assert answer.result(20).value < 0.1


@contextlib.contextmanager
def process(port, *options):
    """The server in a separate process, ready to answer; `options` are those of servers.py."""
    script = Path(__file__).parents[1].joinpath("servers.py")
    command = [sys.executable, str(script), "--port", str(port), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and "serving" in child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait(600)


def test_a_server_killed_in_the_middle_of_a_group_and_restarted_loses_nothing():
    port, group = free_port(), media(LEVELS)
    j = judge(f"http://127.0.0.1:{port}", concurrency=4, retries=4, deadline_s=120, timeout_s=60)
    with process(port, "--answers", "12") as child:
        answers = [j.submit("p", group[a], group[b]) for a, b in PAIRS]
        until(lambda: sum(a.done() for a in answers) >= 10)
        child.send_signal(signal.SIGKILL)
        child.wait(600)
        assert sum(a.done() for a in answers) < len(PAIRS)
    with process(port):
        verdicts = [a.result(60) for a in answers]
    assert all((v.value > 0.5) == (a > b) for v, (a, b) in zip(verdicts, PAIRS, strict=True))


def test_servers_that_are_dead_and_come_back():
    port = free_port()
    gone = judge(f"http://127.0.0.1:{port}", concurrency=4)
    for _ in range(2):  # during the patience, and immediately afterwards
        missing(ask(gone, 50), "no server was usable for 2 s (http://127")
    with JudgeServer() as other:
        j = judge(f"http://127.0.0.1:{port}", other.url, concurrency=2)
        assert all(right(j)) and len(check(*j).rows) == 2
        with JudgeServer(port=port, delay_s=0.01) as back:
            until(lambda: all(right(j)) and back.requests)
            until(lambda: all(right(gone)))


def test_a_process_that_ends_with_requests_in_flight_ends_quietly():
    with JudgeServer("hang") as server:
        code = "j = judge(sys.argv[1]); [j.submit('p', *media([40, 200])) for _ in range(5)]; time.sleep(0.3)"
        done = python(code, server.url)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cancelled_pair_frees_its_slot():
    with JudgeServer("hang", count=1) as server:
        j, (dark, bright) = judge(server.url, concurrency=1, timeout_s=30.0), media([40, 200])
        stuck = j.submit("p", dark, bright)
        until(lambda: server.requests)
        waiting = j.submit("p", bright, dark)
        stuck.cancel()
        assert waiting.result(30).value > 0.9


# ---- another model ---------------------------------------------------------------------------------------------------


class Other(JudgeServer):
    """Ignores the requested model name, as some servers do; always prefers the first image."""

    model = "another"

    def __init__(self, **more):
        super().__init__("contradict", **more)


def test_two_servers_of_different_models_are_never_mixed():
    with JudgeServer() as mine, Other() as other:
        rows = check(*asker(JudgeConfig((mine.url, other.url), MODEL))).rows
        assert rows[0].startswith(f"WARNING: {other.url}: serves another, not '{MODEL}'; set the judge's model")
        seen = len(other.requests)
        assert all(right(judge(mine.url, other.url, model=MODEL, retries=5))) and len(other.requests) == seen
        missing(ask(judge(mine.url, model="third")), f"serves {MODEL}, not 'third'; set the judge's model")


def test_a_server_that_comes_back_with_another_model_gives_no_verdict():
    """The client asks for the served model again after a failed request."""
    port = free_port()
    with JudgeServer(port=port) as server:
        j = judge(server.url, retries=6, deadline_s=3.0)
        assert ask(j)[1].value > 0.9
    answer = j.submit("p", *media([200, 40]))
    until(lambda: j.judge.pool.endpoints[0].problem)
    with Other(port=port) as server:
        missing([answer.result(30)], f"serves another, not '{MODEL}'")
    assert not server.requests


# ---- everything at once ----------------------------------------------------------------------------------------------


KINDS = ("500", "429", "drop", "truncated", "hang", "no_choices", "no_logprobs", "garbage", "nan", "not_json", "html",
         "400")  # fmt: skip


class Chaos(JudgeServer):
    """On average every third chat request gets a random fault, and media are occasionally evicted."""

    def __init__(self, seed):
        super().__init__()
        self.rng, self.capacity, self.met = random.Random(seed), 12, Counter()

    def next_fault(self):
        fault = self.rng.choice(KINDS) if self.rng.random() < 1 / 3 else ""
        self.met[fault] += 1
        return fault


def test_among_all_faults_at_once_no_verdict_is_wrong_and_everything_ends():
    levels = list(range(10, 250, 22))
    group, pairs = media(levels), both_orders(len(levels), 0)
    with Chaos(0) as one, Chaos(1) as two:
        options = {"retries": 4, "concurrency": 8, "timeout_s": 0.5, "deadline_s": 10}
        j = judge(one.url, two.url, **options)
        answers = [j.submit("p", group[a], group[b]) for a, b in pairs]
        for answer in answers[::10]:
            answer.cancel()
        found = [(pair, a.result(90)) for pair, a in zip(pairs, answers, strict=True) if not a.cancelled()]
        assert all((v.value > 0.5) == (levels[a] > levels[b]) for (a, b), v in found if v.value is not None)
        assert all(v.reason for _, v in found if v.value is None)
        assert sum(v.value is not None for _, v in found) > 0.6 * len(found)
        assert len(one.met + two.met) == 13, "every fault occurred"
        until(lambda: not any(e.load for e in j.judge.pool.endpoints))
