"""Every fault of a judge server that the project promises to survive, injected over real HTTP: FAULTS.

For each: bounded time, a missing pair (never 0.5) with a reason that names the fault, a retry if it may help, and the
other server keeps working. A judge that is shared by many processes refuses what it cannot take, and says for how long:
nothing may be lost that the deadline allows. The servers decode the images and prefer the brighter one, so a verdict on
the wrong pair would show, and count, so that none is asked much more often than it answers. Malformed answers are in
tests/judge/test_answers.py.
"""

import asyncio
import contextlib
import email.utils
import gzip
import itertools
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import time
import urllib.request
import zlib
from collections import Counter
from pathlib import Path

import brotli
import numpy as np
import pytest
from aiohttp import web
from ranks import free_port, until
from servers import MODEL, Balancer, JudgeServer, _zipped, asker, completion

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge import http
from prefgrpo.judge.check import check
from prefgrpo.judge.http import PATIENCE_S, Endpoint, Failure, HttpPool, Kind, asked_pause_s
from prefgrpo.rewards.pairs import both_orders, get_plan

if sys.version_info >= (3, 14):  # the other part can go when Python 3.14 is the floor, as can backports.zstd
    from compression import zstd
else:
    from backports import zstd

FAST = {"timeout_s": 1.0, "deadline_s": 2.0}
PATIENT = {"timeout_s": 20.0, "deadline_s": 60.0, "retries": 5}
LEVELS = (20, 60, 100, 140, 180, 220)
PAIRS = both_orders(len(LEVELS), 0)
NUMBERS = itertools.count()


def media(levels):
    return [Media(np.full((32, 32, 3), level, np.uint8)) for level in levels]


def judge(*urls, retries=2, template="compare", **changes):
    made = asker(JudgeConfig(endpoints=urls, **{**FAST, **changes}), template)
    made.judge.pool.retries = retries
    return made


def ask(j, count=1):
    """Verdicts on (dark, bright) and (bright, dark)."""
    return j.judge_group("p", media([40, 200]), [(0, 1), (1, 0)] * count)


def right(j, groups=1):
    """For every pair of new prompts, all asked at once, whether the verdict is present and correct. Another prompt may
    prefer another server."""
    asked = []
    for group in range(groups):
        prompt = f"p {next(NUMBERS)}"
        shown = media([level + group for level in LEVELS])
        asked += [(a > b, j.submit(prompt, shown[a], shown[b])) for a, b in PAIRS]
    verdicts = [(first, answer.result(120)) for first, answer in asked]
    return [v.value is not None and (v.value > 0.5) == first for first, v in verdicts]


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


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.full] * (f in ("drip", "hang"))) for f in FAULTS])
def test_a_fault(fault):
    _zipped(json.dumps(completion(0.0) | {"model": MODEL}).encode(), 64)
    requests, mends, reason = FAULTS[fault]
    with JudgeServer(fault) as bad, JudgeServer(delay_s=0.02) as good:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        missing(ask(judge(bad.url, **{"timeout_s": 20.0, "deadline_s": 40.0} if fault == "endless" else {})), reason)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB: no reply costs more"
        assert requests == len(bad.requests) / 2 or (requests is None and len(bad.requests) < 2 * 20)
        assert bad.checks <= 12, "ever more rarely"
        if requests != 1 and fault != "sick":  # the fault is transient
            bad.count = 2
            dark_first, bright_first = ask(judge(bad.url, retries=5, deadline_s=10))
            assert dark_first.value < 0.1 and bright_first.value > 0.9
        if mends:  # one of two servers stays faulty and must not attract the requests
            bad.count, seen = -1, len(bad.requests)
            assert all(right(judge(bad.url, good.url, concurrency=4, retries=5, deadline_s=60.0)))
            assert len(bad.requests) - seen < len(PAIRS)


def test_a_hung_answer_costs_the_limit_of_one_request():
    with JudgeServer("hang", count=1, delay_s=0.02) as server:
        start = time.monotonic()
        verdicts = judge(server.url, timeout_s=2.0, deadline_s=60.0).judge_group("p", media(LEVELS), PAIRS)
        assert time.monotonic() - start < 10, "not ten times that"
    missing([v for v in verdicts if v.value is None], "did not answer within 2 s")
    assert sum(v.value is None for v in verdicts) == 1


def test_requests_that_wait_for_a_hung_server_end_with_the_patience():
    with JudgeServer("hang") as server:
        start = time.monotonic()
        verdicts = judge(server.url, concurrency=2).judge_group("p", media(LEVELS), PAIRS)
        assert time.monotonic() - start < 15 and len(server.requests) <= 8
    reasons = Counter(v.reason.split(" (")[0] for v in verdicts)
    assert reasons["no server was usable for 2 s"] >= len(PAIRS) - 4


# ---- everything at once ----------------------------------------------------------------------------------------------


KINDS = ("500", "429", "drop", "truncated", "hang", "no_choices", "no_logprobs", "garbage", "nan", "not_json", "html",
         "400")  # fmt: skip


class Chaos(JudgeServer):
    """On average every third chat request gets a random fault, and media are occasionally evicted."""

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)
        self.capacity = 12
        self.met = Counter()

    def next_fault(self):
        fault = self.rng.choice(KINDS) if self.rng.random() < 1 / 3 else ""
        self.met[fault] += 1
        return fault


def test_among_all_faults_at_once_no_verdict_is_wrong_and_everything_ends():
    levels = list(range(10, 250, 22))
    group = media(levels)
    pairs = both_orders(len(levels), 0)
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


# ---- servers that come and go ----------------------------------------------------------------------------------------


def python(code, *arguments):
    """Run code in another process, with everything in this file imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    line = [sys.executable, "-c", f"import sys\nfrom tests.judge.test_http import *\n{code}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=600)


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


@pytest.mark.full
def test_behind_a_balancer_images_travel_with_every_request_and_a_restart_loses_nothing():
    """Half of the requests by id would meet the server that lacks the image; and 502 half of the time."""
    ports = free_port(), free_port()
    with process(ports[0], "--delay", "0.01"), Balancer(*(f"http://127.0.0.1:{port}" for port in ports)) as balancer:
        j = judge(balancer.url, concurrency=8, **PATIENT)
        with process(ports[1], "--delay", "0.01"):
            assert all(right(j, 4)) and balancer.answers[400] <= 3 + 8, balancer.answers
            more = [j.submit("p", *media([40, 200 + k % 50])) for k in range(100)]
            until(lambda: sum(a.done() for a in more) >= 30)
        until(lambda: sum(a.done() for a in more) >= 60)
        with process(ports[1], "--delay", "0.01"):
            verdicts = [a.result(120) for a in more]
    assert all(v.value is not None and v.value < 0.1 for v in verdicts), {v.reason for v in verdicts}


def test_a_process_that_ends_with_requests_in_flight_ends_quietly():
    with JudgeServer("hang") as server:
        code = "j = judge(sys.argv[1]); [j.submit('p', *media([40, 200])) for _ in range(5)]; time.sleep(0.3)"
        done = python(code, server.url)
    assert (done.returncode, done.stderr) == (0, "")


# ---- addresses and connections ---------------------------------------------------------------------------------------


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


def test_an_https_address_goes_through_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    urls = ("https://api.example/v1", "https://inside.example", "http://node1:8000")
    assert [Endpoint(url).proxy for url in urls] == ["http://proxy:3128", None, None]


class Compressing(JudgeServer):
    """Compresses every reply, of its checks and refusals too, although no request accepts it."""

    encoding = "gzip"
    write = staticmethod(gzip.compress)

    def add_routes(self, app):
        @web.middleware
        async def compress(request, handler):
            reply = await handler(request)
            headers = {"Content-Encoding": self.encoding, "Content-Type": "application/json"}
            return web.Response(body=self.write(reply.body or b""), status=reply.status, headers=headers)

        app.middlewares.append(compress)


@pytest.mark.parametrize(
    ("encoding", "write"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress), ("zstd", zstd.compress)],
)
def test_a_judge_behind_a_proxy_that_compresses_is_read(encoding, write):
    """With the encoders of the standard library and of the packages that aiohttp names."""
    with Compressing() as server:
        server.encoding = encoding
        server.write = write
        dark, bright = ask(judge(server.url, timeout_s=5.0))
        assert dark.value < 0.1 and bright.value > 0.9
        server.fault = "400"
        missing(ask(judge(server.url, timeout_s=5.0)), "At most 1 image")


def test_what_cannot_be_unpacked_is_missing_with_the_reason():
    with Compressing() as server:
        server.write = lambda body: b"\x7f" + body
        missing(ask(judge(server.url)), "Can not decode content-encoding: gzip")


# ---- overload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["seconds", "date", "milliseconds", "centuries"])
def test_the_only_server_is_left_alone_as_long_as_it_asks(kind):
    """By all requests, also those that it has not refused; but no longer than the patience (here 2 s)."""
    asks = {
        "seconds": "1.5",
        "date": email.utils.formatdate(time.time() + 2.5, usegmt=True),  # without fractions of a second
        "milliseconds": "retry-after-ms: 1500",
        "centuries": "Fri, 31 Dec 9999 23:59:59 GMT",
    }
    with JudgeServer(f"429 {asks[kind]}", count=3) as server:
        start = time.monotonic()
        patience = FAST if kind == "centuries" else PATIENT
        assert all(right(judge(server.url, concurrency=3, **patience)))
        assert 1.4 <= time.monotonic() - start < 30
        assert len(server.requests) == len(PAIRS) + 3, "each refused request was sent twice, and no other"
        assert server.checks == 1, "a busy server needs no check"


def test_what_a_reply_asks_for():
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert asked_pause_s({"Retry-After": later}) == pytest.approx(100, abs=2)
    for headers, expected in (
        ({"retry-after-ms": "250", "Retry-After": "9"}, 0.25),
        ({"Retry-After": "9"}, 9),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "-1"}, 0),
        ({}, 0),
    ):
        assert asked_pause_s(headers) == expected


CLIENTS = """
import multiprocessing
def count(_):
    return sum(right(judge(sys.argv[1], concurrency=8, **PATIENT)))
with multiprocessing.get_context("fork").Pool(8) as pool:  # each imports nothing again
    print(json.dumps(pool.map(count, range(8), chunksize=1)))
"""


@pytest.mark.full
def test_eight_processes_share_a_server_that_refuses_what_is_too_much():
    port = free_port()
    with process(port, "--delay", "0.02", "--rate", "80", "--burst", "10", "--queue", "4"):
        done = python(CLIENTS, f"http://127.0.0.1:{port}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=60) as reply:
            seen = json.loads(reply.read())
    assert json.loads(done.stdout) == [len(PAIRS)] * 8, done.stderr
    assert seen["answered"] == 8 * len(PAIRS) and seen["asked"] <= 3 * seen["answered"], seen
    assert seen["checks"] == 8 and seen["refused"], "the rate, or the queue"


def test_a_group_prefers_one_server_and_no_server_is_idle():
    with JudgeServer(delay_s=0.02) as one, JudgeServer(delay_s=0.02) as two:
        answers = right(judge(one.url, two.url, concurrency=64, **PATIENT), 12)
        encoded = len(one.media) + len(two.media)
        shares = [len(server.requests) / len(answers) for server in (one, two)]
    assert all(answers) and min(shares) > 0.25, shares
    assert encoded <= 1.5 * 12 * len(LEVELS), "without a preference, nearly every image is encoded twice"


# ---- slots -----------------------------------------------------------------------------------------------------------


async def usable(endpoint):
    return ""


def test_concurrency_halves_once_per_pause_and_recovers():
    limits = []

    async def everything():
        pool = HttpPool(["http://127.0.0.1:1"], usable, concurrency=16)
        refuse = 0

        async def attempt(endpoint):
            nonlocal refuse
            await asyncio.sleep(0.001)
            limits.append(endpoint.limit)
            if refuse:
                refuse -= 1
                raise Failure("busy", Kind.BUSY, 0.05)

        for refused in (16, 8):
            refuse = refused
            await asyncio.gather(*(pool.send(attempt) for _ in range(refused)))
        for _ in range(150):
            await pool.send(attempt)

    asyncio.run(everything())
    assert limits[0] == 16 and min(limits) == pytest.approx(4, abs=1.5)
    assert limits[-1] == 16


@pytest.mark.parametrize("seed", range(5))
def test_every_turn_comes_whatever_is_cancelled(seed):
    """Cancellations neither leak a slot nor skip a waiting request; slots are never idle while one could use them."""
    rng = random.Random(seed)
    peak = [0]
    done = []
    slots = HttpPool([f"http://127.0.0.1:{k}" for k in range(2)], usable, concurrency=3)

    async def work(turn):
        endpoint = await slots.acquire()
        try:
            peak[0] = max(peak[0], sum(e.load for e in slots.endpoints))
            await asyncio.sleep(rng.choice([0.0, 0.001]))
            done.append(turn)
        finally:
            slots.release(endpoint)

    async def everything():
        tasks = [asyncio.create_task(work(turn)) for turn in rng.sample(range(200), 200)]
        for task in rng.sample(tasks, 80):
            await asyncio.sleep(rng.choice([0.0, 0.0002]))
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        return sum(r is None for r in results)

    assert asyncio.run(everything()) == len(done) >= 120
    assert peak[0] == 6 and [e.load for e in slots.endpoints] == [0, 0]


# ---- eight ranks and a loaded server, simulated ----------------------------------------------------------------------

RANKS = 8
TOKENS = 1500


class Clock(selectors.DefaultSelector):
    """Never waits for a socket: the loop's time jumps to its next timer."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def select(self, timeout=None):
        assert timeout is not None, "everybody waits, and no timer is set"
        self.now += max(timeout, 0.0)
        return []


class LoadedServer:
    """A queueing model of an 8 B judge: `rate` tokens per second, shared equally among the answers being written, each
    of TOKENS tokens."""

    def __init__(self, rate, clock):
        self.rate = rate
        self.clock = clock
        self.writing = self.peak = 0
        self.at = clock.now
        self.share = self.used = self.wasted = 0.0
        """share: tokens that an answer has that was begun at the start."""

    def advance(self, more=0):
        """Up to now; then the number of answers being written changes."""
        self.share += (self.clock.now - self.at) * self.rate / max(self.writing, 1)
        self.at = self.clock.now
        self.writing += more
        self.peak = max(self.peak, self.writing)

    async def write(self):
        self.advance(+1)
        begin = self.share
        try:
            while (left := begin + TOKENS - self.share) > 1e-6:
                await asyncio.sleep(min(left * self.writing / self.rate, 5.0))  # others come and go meanwhile
                self.advance()
            self.used += TOKENS
        except asyncio.CancelledError:
            self.wasted += self.share - begin
            raise
        finally:
            self.advance(-1)

    async def answer(self, timeout_s):
        """One request."""
        try:
            await asyncio.wait_for(self.write(), timeout_s)
        except asyncio.TimeoutError as error:
            raise Failure("no answer in time", Kind.LATE) from error


@pytest.mark.parametrize(("recipe", "rate"), [("lora_think_flux", 2800), ("lora_flex_flux2_klein", 4700)])
def test_a_loaded_judge_of_eight_ranks_loses_nothing(recipe, rate, monkeypatch):
    """All questions of a step arrive at once, as after an instantaneous rollout, with the shipped recipe's own values:
    no request is lost, hardly an answer wasted, and the limits keep the server busy."""
    import torch

    from prefgrpo.config.loading import load
    from prefgrpo.judge.template import load_template
    from prefgrpo.parallel.world import World
    from prefgrpo.rewards import load_class
    from prefgrpo.run.rewards import judge_config  # imports diffusers, which the client processes need not

    config = load(f"scripts/unifiedreward/{recipe}.yaml")
    entry = config.rewards[0]
    timeout_s = config.judge.timeout_s or load_template(load_class(entry.reward).template).timeout_s
    pairs = len(get_plan(entry.options["plan"])(config.rollout.group_size, 0))
    clock = Clock()
    server = LoadedServer(rate, clock)
    monkeypatch.setattr(http, "time", clock)

    async def everything():
        requests = []
        for rank in range(RANKS):
            own = judge_config(config, entry, World(rank, RANKS, torch.device("cpu")))
            patience_s = own.deadline_s or PATIENCE_S
            pool = HttpPool(["http://judge"], usable, concurrency=own.concurrency, patience_s=patience_s)
            for prompt in range(rank, config.rollout.prompts_per_step, RANKS):
                requests += [pool.send(lambda _: server.answer(timeout_s), str(prompt)) for _ in range(pairs)]
        await asyncio.gather(*requests)
        return len(requests)

    with contextlib.closing(asyncio.SelectorEventLoop(clock)) as loop:
        loop.time = clock.monotonic
        asked = loop.run_until_complete(everything())
    seconds = clock.now - Clock.now
    assert asked == config.rollout.prompts_per_step * pairs
    assert server.peak <= config.judge.concurrency, "one limit for all ranks together"
    assert server.used == asked * TOKENS and server.wasted <= 0.05 * (server.used + server.wasted)
    assert seconds < (config.judge.deadline_s or JudgeConfig.deadline_s)
    assert seconds == pytest.approx(asked * TOKENS / rate, rel=0.1), "the limit keeps the server busy"
