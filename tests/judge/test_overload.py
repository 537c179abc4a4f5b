"""Overload of a judge, over real HTTP: rate limits, full queues, a balancer in front of two servers, hung answers.

Why these cases: a judge that is shared by many processes refuses what it cannot take, and says for how long. Nothing
may be lost that the deadline allows, and the servers, which count, must not be asked much more often than they answer.
Slots are never idle while a request could use one; cancellations must neither leak a slot nor skip a waiting request.
"""

import asyncio
import email.utils
import json
import random
import time
import urllib.request
from collections import Counter

import pytest
from ranks import free_port, until
from servers import Balancer, JudgeServer, images

from prefgrpo.judge.http import Failure, HttpPool, Kind, asked_pause_s
from prefgrpo.rewards.pairs import both_orders
from tests.judge.test_http import judge, media, process, python, right

LEVELS = (20, 60, 100, 140, 180, 220)
PAIRS = both_orders(len(LEVELS), 0)
PATIENT = {"timeout_s": 20.0, "deadline_s": 60.0}


def groups(*urls, count=4, **options):
    """For every pair of `count` groups, whether its verdict is right, all asked at once; and the judge."""
    j = judge(*urls, **{**PATIENT, **options})
    asked = []
    for group in range(count):
        shown = media([level + group for level in LEVELS])
        asked += [(a > b, j.submit(f"prompt {group}", shown[a], shown[b])) for a, b in PAIRS]
    verdicts = [(first, answer.result(120)) for first, answer in asked]
    return [v.value is not None and (v.value > 0.5) == first for first, v in verdicts], j


def counts(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=60) as reply:
        return json.loads(reply.read())


def asked_for(kind):
    return {
        "seconds": "1.5",
        "date": email.utils.formatdate(time.time() + 2.5, usegmt=True),  # without fractions of a second
        "milliseconds": "retry-after-ms: 1500",
    }[kind]


@pytest.mark.parametrize("kind", ["seconds", "date", "milliseconds"])
def test_the_only_server_is_left_alone_as_long_as_it_asks(kind):
    """By all requests, also those that it has not refused."""
    with JudgeServer(f"429 {asked_for(kind)}", count=3) as server:
        start = time.monotonic()
        answers, _ = groups(server.url, count=1, concurrency=3)
        assert all(answers) and time.monotonic() - start >= 1.4
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


def test_concurrency_halves_once_per_pause_and_recovers():
    limits = []

    async def usable(endpoint):
        return ""

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


@pytest.mark.full
def test_a_run_whose_judge_refuses_every_other_request_ends_with_every_verdict(place):
    from ranks import train  # imports torch, which the client processes need not
    from world import recipe, rows

    class Half(JudgeServer):
        def next_fault(self):
            return "429 0.1" if rng.random() < 0.5 else ""

    rng = random.Random(1)
    with Half() as server:
        judge = {"endpoints": [server.url], "timeout_s": 2.0, "deadline_s": 60.0}
        code, output = train(recipe(place, "half", rewards="vlm_pairwise", judge=judge, eval={"every": 0}))
    assert code == 0, output
    found = rows(place / "runs" / "half")
    assert found and all(r["judge/failures"] == 0 and r["judge/requests"] > 0 for r in found if r["kind"] == "train")


CLIENTS = """
import json, multiprocessing
from tests.judge.test_overload import groups
def right(_):
    return [sum(groups(sys.argv[1], count=1, concurrency=8)[0])]
with multiprocessing.get_context("fork").Pool(8) as pool:  # each imports nothing again
    print(json.dumps(pool.map(right, range(8), chunksize=1)))
"""


def test_eight_processes_share_a_server_that_refuses_what_is_too_much():
    port = free_port()
    with process(port, "--delay", "0.02", "--rate", "80", "--burst", "10", "--queue", "4"):
        done = python(CLIENTS, f"http://127.0.0.1:{port}")
        seen = counts(port)
    assert json.loads(done.stdout) == [[len(PAIRS)]] * 8, done.stderr
    assert seen["answered"] == 8 * len(PAIRS) and seen["asked"] <= 3 * seen["answered"], seen
    assert seen["checks"] == 8 and min(seen["refused"].values()) > 0 and len(seen["refused"]) == 2


def test_behind_a_balancer_images_travel_with_every_request_and_a_restart_loses_nothing():
    """Half of the requests by id would meet the server that lacks the image; and 502 half of the time."""
    ports = free_port(), free_port()
    with process(ports[0], "--delay", "0.01"), Balancer(*(f"http://127.0.0.1:{port}" for port in ports)) as balancer:
        with process(ports[1], "--delay", "0.01"):
            answers, j = groups(balancer.url, concurrency=8)
            assert all(answers) and balancer.answers[400] <= 3 + 8, balancer.answers
            assert groups(balancer.url, concurrency=8)[0] == answers
            more = [j.submit("p", *media([40, 200 + k % 50])) for k in range(100)]
            until(lambda: sum(a.done() for a in more) >= 30)
        until(lambda: sum(a.done() for a in more) >= 60)
        with process(ports[1], "--delay", "0.01"):
            verdicts = [a.result(120) for a in more]
    assert all(v.value is not None and v.value < 0.1 for v in verdicts), {v.reason for v in verdicts}


def test_a_restarted_server_gets_ids_again():
    port = free_port()
    group = media(LEVELS)
    j = judge(f"http://127.0.0.1:{port}", **PATIENT)
    with JudgeServer(port=port):
        assert all(right(j))
    answer = j.submit("p", group[0], group[1])
    until(lambda: j.judge.pool.endpoints[0].problem)
    with JudgeServer(port=port) as server:
        assert answer.result(60).value < 0.5
        assert all(v.value is not None for v in j.judge_group("p", group, PAIRS))
        sent = [p for r in server.requests for p in images(r)]
        assert sum(p["image_url"] is not None for p in sent) <= len(LEVELS) + 4, "not every image with every request"


def test_a_group_prefers_one_server_and_no_server_is_idle():
    with JudgeServer(delay_s=0.02) as one, JudgeServer(delay_s=0.02) as two:
        answers, _ = groups(one.url, two.url, count=12, concurrency=64)
        encoded = len(one.media) + len(two.media)
        shares = [len(server.requests) / len(answers) for server in (one, two)]
    assert all(answers) and min(shares) > 0.25, shares
    assert encoded <= 1.5 * 12 * len(LEVELS), "without a preference, nearly every image is encoded twice"


def test_a_hung_answer_costs_the_limit_of_one_request():
    with JudgeServer("hang", count=1, delay_s=0.02) as server:
        start = time.monotonic()
        verdicts = judge(server.url, timeout_s=2.0, deadline_s=60.0).judge_group("p", media(LEVELS), PAIRS)
        assert time.monotonic() - start < 10, "not ten times that"
    (hung,) = (v for v in verdicts if v.value is None)
    assert "did not answer within 2 s" in hung.reason


def test_requests_that_wait_for_a_hung_server_end_with_the_patience():
    with JudgeServer("hang") as server:
        start = time.monotonic()
        verdicts = judge(server.url, timeout_s=1.0, deadline_s=2.0, concurrency=2).judge_group(
            "p", media(LEVELS), PAIRS
        )
        assert time.monotonic() - start < 15 and len(server.requests) <= 8
    reasons = Counter(v.reason.split(" (")[0] for v in verdicts)
    assert reasons["no server was usable for 2 s"] >= len(PAIRS) - 4


def test_a_server_that_fails_is_checked_ever_more_rarely():
    with JudgeServer("drop") as server:
        groups(server.url, count=1, deadline_s=3.0)
        assert server.checks <= 12 and len(server.requests) <= 100


@pytest.mark.parametrize("seed", range(5))
def test_every_turn_comes_whatever_is_cancelled(seed):
    rng, peak, done = random.Random(seed), [0], []

    async def usable(endpoint):
        return ""

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
