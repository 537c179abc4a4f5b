"""Every fault of a judge server that the project promises to survive, injected over real HTTP: FAULTS, CHECKS.

For each: bounded time, a missing pair (never 0.5) with a reason that names the fault, a retry if it may help, and the
other server keeps working. The servers decode the images and prefer the brighter one, so a verdict on the wrong pair
would show. Non-numeric log-probabilities and other malformed answers are in test_judge_template.py.
"""

import contextlib
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from judge_server import MODEL, JudgeServer, free_port, until
from tiny_media import grey

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.client import HttpJudge, check
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.traffic import collect_counts, metrics
from prefgrpo.judge.verdict import JudgeError

FAST = {"timeout_s": 1.0, "retries": 2, "patience_s": 2.0}
LEVELS = (20, 60, 100, 140, 180, 220)
PAIRS = both_orders(len(LEVELS), 0)


def media(levels):
    return [grey(level) for level in levels]


def judge(*urls, **changes):
    return HttpJudge(JudgeConfig(endpoints=urls, **{**FAST, **changes}))


def ask(j, count=1):
    """Verdicts on (dark, bright) and (bright, dark)."""
    return j.judge_group("p", media([40, 200]), [(0, 1), (1, 0)] * count)


def right(j, levels=LEVELS, pairs=PAIRS):
    """For each pair, whether the judge's verdict is present and correct."""
    verdicts = j.judge_group("p", media(levels), pairs)
    return [v.first is not None and (v.first > 0.5) == (a > b) for v, (a, b) in zip(verdicts, pairs, strict=True)]


def missing(verdicts, reason):
    assert [v.first for v in verdicts] == [None] * len(verdicts)
    assert all(reason in v.reason for v in verdicts), verdicts[0].reason


# fault -> (requests per pair while the fault persists, whether another server helps, reason)
FAULTS = {
    "hang": (2, True, "did not answer within 1 s"),
    "drip": (2, True, "did not answer within 1 s"),
    "504": (2, True, "answered 504: no answer from behind"),
    "429 0.1": (3, True, "answered 429: slow down"),
    "429 Fri, 31 Dec 9999 23:59:59 GMT": (3, True, "answered 429: slow down"),
    "500": (3, True, "gave up after 3 requests; the last one: http://127.0.0.1"),
    "503": (3, True, "answered 503: overloaded"),
    "drop": (3, True, "gave up after 3 requests"),
    "truncated": (3, True, "gave up after 3 requests"),
    "sick": (None, True, "no server was reachable for 2 s"),
    "html": (2, True, "no readable chat completion"),
    "not_json": (2, True, "no readable chat completion"),
    "no_choices": (2, True, "without choices"),
    "307": (1, True, "refused with 307, a redirect to /elsewhere; correct the address"),
    "403": (1, True, "refused with 403: not for you"),
    "404": (1, True, "refused with 404: no such path"),
    "400": (1, False, "refused with 400: At most 1 image"),
    "no_logprobs": (1, False, "no logprobs"),
    "garbage": (1, False, "neither label"),
    "nan": (1, False, "probability"),
}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.full] * (f == "drip")) for f in FAULTS])
def test_a_fault(fault):
    requests, mends, reason = FAULTS[fault]
    with JudgeServer(fault) as bad, JudgeServer(delay_s=0.02) as good:
        missing(ask(judge(bad.url)), reason)
        assert requests in (None, len(bad.requests) / 2)
        if requests not in (1, None):  # the fault is transient
            bad.count = 1
            dark_first, bright_first = ask(judge(bad.url, retries=5, patience_s=10))
            assert dark_first.first < 0.1 and bright_first.first > 0.9
        if mends:  # one of two servers stays faulty and must not attract the requests
            bad.count, seen = -1, len(bad.requests)
            assert all(right(judge(bad.url, good.url, concurrency=4, retries=5)))
            assert len(bad.requests) - seen < len(PAIRS)


def test_unreadable_answers_are_counted():
    done = Counter()
    with JudgeServer("garbage", count=1) as server, collect_counts(done):
        for _ in range(2):
            ask(judge(server.url, concurrency=1))
    found = metrics(done)
    assert 0 < found["judge/wasted_share"] < 1 and found["judge/parse_failure_rate"] == 0.25


def test_retry_after_is_waited_for():
    with JudgeServer("429 1.5", count=1) as server:
        start = time.monotonic()
        assert ask(judge(server.url, timeout_s=5.0))[1].first > 0.9 and time.monotonic() - start >= 1.5


# ---- the check at the start ------------------------------------------------------------------------------------------

# name -> (fault, judge options, message)
CHECKS = {
    "down": ("", {"endpoints": "down"}, r"127.0.0.1.*not reachable.*prefgrpo judge serve"),
    "no name": ("", {"endpoints": ("http://judge.invalid:8000",)}, "'judge.invalid' does not resolve .*correct"),
    "no TLS": ("", {"endpoints": "https"}, r"does not speak TLS .*is it an http:// address"),
    "another model": ("", {"model": "bright-juge"}, f"serves {MODEL}, not 'bright-juge' .did you mean '{MODEL}'"),
    "no verdict": ("garbage", {}, "no verdict on a probe pair: .*neither label"),
    "refuses": ("400", {}, "At most 1 image"),
    "hangs": ("hang", {"timeout_s": 0.5}, "no verdict.*did not answer within 1 s"),
    "mute": ("mute", {}, r"no answer from /v1/models within 1 s"),
    "loading": ("loading", {"patience_s": 0.5}, "/v1/models answered 503"),
    "overloaded": ("503", {"retries": 1}, "answered 503: overloaded"),
    "no server": ("listing", {}, "lists no model"),
    "key missing": ("key", {}, r"answered 401; give the name of the .* variable .* api_key_env\)"),
    "key wrong": ("key", {"api_key_env": "WRONG_KEY"}, r"api_key_env \(now WRONG_KEY\)\)"),
    "key unset": ("", {"api_key_env": "NO_KEY"}, r"variable NO_KEY \(api_key_env\) is not set"),
    "no address": ("", {"endpoints": ("here:80",)}, "endpoints must be http:// or https://"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_says_what_is_wrong(name, monkeypatch):
    monkeypatch.setenv("WRONG_KEY", "hunter2")
    fault, options, message = CHECKS[name]
    with JudgeServer(fault if fault not in ("listing", "key") else "") as server:
        server.key, server.listing = "secret" * (fault == "key"), "<html>welcome</html>" * (fault == "listing")
        urls = {"down": f"http://127.0.0.1:{free_port()}", "https": server.url.replace("http:", "https:")}
        endpoints = options.get("endpoints", (server.url,))
        endpoints = (urls[endpoints],) if isinstance(endpoints, str) else endpoints
        with pytest.raises(JudgeError, match=f"(?s){message}") as error:
            check(JudgeConfig(**{**options, "endpoints": endpoints}), timeout_s=1.0)
        assert "hunter2" not in str(error.value)


def test_the_check_waits_out_a_burst_of_503():
    with JudgeServer("loading") as server:
        threading.Timer(1.0, setattr, (server, "fault", "")).start()
        assert check(JudgeConfig((server.url,))).probe_p_first is not None
        server.fault, server.count = "503", 3
        assert check(JudgeConfig((server.url,))).probe_p_first is not None


def test_the_check_asks_every_server_and_measures_position_bias(tmp_path):
    text = tmp_path / "text.yaml"
    text.write_text("user: '{prompt} {media_1} {media_2}'\nanswer: plain\n")
    with JudgeServer("404") as bad, JudgeServer("contradict") as good:
        health = check(JudgeConfig((bad.url, good.url)), bias_pairs=4)
        assert f"{bad.url}: '{MODEL}' gave no verdict on a probe pair: " in health.summary()
        assert f"{good.url}: ok, serves {MODEL}" in health.summary()
        assert health.position_bias == pytest.approx(1 / (1 + np.exp(-3)))
        good.fault, good.delay_s = "", 1.0
        text_judge = check(JudgeConfig((good.url,), template=str(text)), timeout_s=0.4)
        assert text_judge.probe_p_first == 0.0, "judges that write text get more time"


# ---- addresses and connections ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A fresh self-signed certificate for 127.0.0.1: (certificate file, key file)."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    line += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*line, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def python(code, *arguments, **environment):
    """Run code in another process, with everything in this file imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])} | environment
    line = [sys.executable, "-c", f"import sys\nfrom test_judge_faults import *\n{code}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=600)


def test_a_certificate_that_is_not_trusted_is_named_with_what_to_do(certificate):
    server = JudgeServer()
    server.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.tls.load_cert_chain(*certificate)
    with server:
        with pytest.raises(JudgeError, match=r"its TLS certificate is not trusted .*self-signed.*set SSL_CERT_FILE"):
            check(JudgeConfig((server.url,)))
        missing(ask(judge(server.url)), "its TLS certificate is not trusted")
        done = python("print(right(judge(sys.argv[1]))[:2])", server.url, SSL_CERT_FILE=str(certificate[0]))
    assert done.stdout == "[True, True]\n", "the advice in the message works: " + done.stderr


def test_a_server_that_cannot_say_yet_what_it_serves_is_asked_again():
    with JudgeServer("loading") as server:
        answer = judge(server.url, retries=6, patience_s=10).submit("p", *media([40, 200]))
        time.sleep(0.3)
        server.fault = ""
        assert answer.result(20).first < 0.1 and server.requests[-1]["model"] == server.model


def test_a_key_is_sent(monkeypatch):
    monkeypatch.setenv("RIGHT_KEY", "secret")
    with JudgeServer() as server:
        server.key = "secret"
        missing(ask(judge(server.url, model=MODEL)), "lists no model (/v1/models answered 401; give the name")
        assert ask(judge(server.url, api_key_env="RIGHT_KEY"))[1].first > 0.9


@contextlib.contextmanager
def process(port, *options):
    """The server in a separate process, ready to answer; `options` are those of judge_server.py."""
    script = Path(__file__).with_name("judge_server.py")
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
    j = judge(f"http://127.0.0.1:{port}", concurrency=4, retries=4, patience_s=120, timeout_s=60)
    with process(port, "--answers", "12") as child:
        answers = [j.submit("p", group[a], group[b]) for a, b in PAIRS]
        until(lambda: sum(a.done() for a in answers) >= 10)
        child.send_signal(signal.SIGKILL)
        child.wait(600)
        assert sum(a.done() for a in answers) < len(PAIRS)
    with process(port):
        verdicts = [a.result(60) for a in answers]
    assert all((v.first > 0.5) == (a > b) for v, (a, b) in zip(verdicts, PAIRS, strict=True))


def test_servers_that_are_dead_and_come_back():
    port = free_port()
    gone = judge(f"http://127.0.0.1:{port}", concurrency=4)
    for _ in range(2):  # during the patience, and immediately afterwards
        missing(ask(gone, 50), "no server was reachable for 2 s (http://127")
    with JudgeServer() as other:
        j = judge(f"http://127.0.0.1:{port}", other.url, concurrency=2)
        assert all(right(j)) and [bool(e.problem) for e in check(j.config).endpoints] == [True, False]
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
        assert waiting.result(30).first > 0.9


# ---- another model ---------------------------------------------------------------------------------------------------


class Other(JudgeServer):
    """Ignores the requested model name, as some servers do; always prefers the first image."""

    model = "another"

    def __init__(self, **more):
        super().__init__("contradict", **more)


def test_two_servers_of_different_models_are_never_mixed():
    with JudgeServer() as mine, Other() as other:
        summary = check(JudgeConfig((mine.url, other.url), MODEL)).summary()
        assert f"{other.url}: serves another, not '{MODEL}'; set the judge's model" in summary
        seen = len(other.requests)
        assert all(right(judge(mine.url, other.url, model=MODEL, retries=5))) and len(other.requests) == seen
        missing(ask(judge(mine.url, model="third")), f"serves {MODEL}, not 'third'; set the judge's model")


@pytest.mark.parametrize("noticed", ["restart", "pause"])
@pytest.mark.parametrize("back", ["another model", "another checkpoint", "the same"])
def test_a_server_that_comes_back_with_another_model_gives_no_verdict(noticed, back, monkeypatch):
    """The client asks for the served model again after a failed request (restart) and after some idle seconds."""
    port = free_port()
    with JudgeServer(port=port) as server:
        server.root = "/runs/step-100/judge"
        j = judge(server.url, retries=6, patience_s=20.0)
        assert ask(j)[1].first > 0.9
    answers, pair = [], media([200, 40])
    if noticed == "restart":
        answers = [j.submit("p", *pair)]
        until(lambda: not j.client.sender.endpoints[0].alive)
    else:
        monkeypatch.setattr("prefgrpo.judge.endpoint._IDLE_S", 0.0)
    server = Other(port=port) if back == "another model" else JudgeServer(port=port)
    server.root = "/runs/step-200/judge" if back == "another checkpoint" else "/runs/step-100/judge"
    with server:
        verdicts = [a.result(30) for a in answers] or [j.submit("p", *pair).result(30)]
    if back == "the same":
        assert verdicts[0].first > 0.9
    elif back == "another model":
        missing(verdicts, f"serves another, not '{MODEL}'")
    else:
        missing(verdicts, "from /runs/step-200/judge, before that from /runs/step-100/judge")
    assert bool(server.requests) == (back == "the same")


@pytest.mark.parametrize(
    ("roots", "same"),
    [
        (("/a/judge-8b", "/b/judge-8b/"), True),
        (("org/judge-8b", "/hub/models--org--judge-8b/snapshots/0123abc"), True),
        (("org/judge-8b", ""), True),
        (("org/judge-8b", "org/judge-2b"), False),
    ],
)
def test_two_servers_of_different_checkpoints_are_never_mixed(roots, same):
    with JudgeServer() as mine, JudgeServer(delay_s=0.05) as other:
        mine.root, other.root = roots
        message = rf"'{MODEL}' is served by {mine.url} from {roots[0]}, by {other.url} from {roots[1]}; expected one"
        with contextlib.nullcontext() if same else pytest.raises(JudgeError, match=message):
            check(JudgeConfig((mine.url, other.url)))
        seen = [len(s.requests) for s in (mine, other)]
        assert all(right(judge(mine.url, other.url, retries=5, concurrency=2)))
        asked = [len(s.requests) > n for s, n in zip((mine, other), seen, strict=True)]
        assert asked == [True, True] if same else sum(asked) == 1


@pytest.mark.parametrize("name", [MODEL, f"org/{MODEL}", ""])
def test_one_model_answers_throughout(name):
    """A proxy may use its own name for the judge, but the name must not change."""
    with JudgeServer(f"named {name}") as server:
        j = judge(server.url)
        assert all(v.first is not None for v in ask(j) + ask(j))
        server.fault = "named changed"
        missing(ask(j), "'changed' answered, before that") if name else ask(j)


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
    levels = list(range(10, 250, 15))
    group, pairs = media(levels), both_orders(len(levels), 0)
    with Chaos(0) as one, Chaos(1) as two:
        options = {"retries": 4, "concurrency": 8, "timeout_s": 0.5, "patience_s": 10}
        j = judge(one.url, two.url, **options)
        answers = [j.submit("p", group[a], group[b]) for a, b in pairs]
        for answer in answers[::10]:
            answer.cancel()
        found = [(pair, a.result(90)) for pair, a in zip(pairs, answers, strict=True) if not a.cancelled()]
        assert all((v.first > 0.5) == (levels[a] > levels[b]) for (a, b), v in found if v.first is not None)
        assert all(v.reason for _, v in found if v.first is None)
        assert sum(v.first is not None for _, v in found) > 0.6 * len(found)
        assert len(one.met + two.met) == 13, "every fault occurred"
        until(lambda: not any(e.load for e in j.client.sender.endpoints))
