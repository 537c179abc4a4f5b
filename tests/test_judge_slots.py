"""Slots of a judge server: bounded, never idle while somebody could use one, first come first served.

Cases: requests that wait for a picture that another one carries (a real server that answers slowly); pictures that are
named before their carrier is answered, too soon or not; cancellations at random moments, which must neither leak a slot
nor lose a wake-up; an endpoint that dies and comes back.
"""

import asyncio
import json
import random
import time

import numpy as np
import pytest
from judge_server import JudgeServer, images

from prefgrpo.data.media import Media
from prefgrpo.judge.client import HttpJudge, HttpJudgeConfig
from prefgrpo.judge.endpoint import Endpoint, NoEndpoint, Pool
from prefgrpo.judge.loop import loop_thread


def pictures(count):
    return [Media(np.full((8, 8, 3), 20 * k, np.uint8)) for k in range(count)]


def shown(server):
    """Which pictures each request showed, in the order of their arrival (by the grey that the server saw)."""
    grey = {uuid: round(value * 255 / 20) for uuid, value in server.media.items()}
    parts = [[p for p in r["messages"][0]["content"] if p["type"] == "image_url"] for r in server.requests]
    return [{grey[p["uuid"]] for p in pair} for pair in parts]


def test_who_waits_for_a_picture_holds_no_slot_and_comes_next():
    with JudgeServer(delay_s=0.3) as server:
        judge = HttpJudge(HttpJudgeConfig((server.url,), template="compare", concurrency=2, image_format="png"))
        media = pictures(9)
        judge.judge_group("p", media[7:], [(0, 1)])  # the server is known
        for picture in media:  # encoded beforehand: which one is ready first shall not be what is seen here
            loop_thread().submit(judge.client._encoded(picture)).result(10)
        pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (4, 5), (5, 6)]
        verdicts = judge.judge_group("p", media[:7], pairs)
        judge.close()
    assert all(v.first is not None for v in verdicts) and server.peak == 2
    order = shown(server)[1:]
    assert {frozenset(s) for s in order[:2]} == {frozenset({0, 1}), frozenset({4, 5})}
    assert order[-1] == {5, 6}  # asked last


class Reader(JudgeServer):
    """Has a picture when it has read the request, as vLLM does; answers nobody before `needed` requests are there."""

    needed, too_soon = 0, False
    refused = 0

    async def _chat(self, request):
        body = json.loads(await request.read())
        self.requests.append(body)
        parts = images(body)
        if self.too_soon and any(p["image_url"] is None and p["uuid"] not in self.media for p in parts):
            self.refused += 1
            return self._answer(body)
        if not self.too_soon:
            answer = self._answer(body)
        while len(self.requests) < self.needed:
            await asyncio.sleep(0.01)
        return self._answer(body) if self.too_soon else answer


def chain(server):
    """Verdicts on neighbours among 4 pictures, and the endpoint."""
    judge = HttpJudge(HttpJudgeConfig((server.url,), template="compare", retries=0, timeout_s=30))
    judge.judge_group("p", pictures(6)[4:], [(0, 1)])  # the server is known
    server.needed, server.requests = 3, []
    verdicts = judge.judge_group("p", pictures(4), [(0, 1), (1, 2), (2, 3)])
    judge.close()
    assert all(v.first is not None and v.first < 0.5 for v in verdicts), verdicts
    return judge.client.sender.endpoints[0]


def test_a_picture_is_named_while_its_carrier_is_being_answered():
    with Reader() as server:  # would wait for ever if each neighbour waited for the answer of the one before
        assert chain(server).grace_s == 0.1
    carried = [p["uuid"] for r in server.requests for p in images(r) if p["image_url"] is not None]
    assert len(carried) == len(set(carried)) == 4


def test_a_picture_named_too_soon_is_sent_and_waited_for_longer():
    with Reader() as server:
        server.too_soon = True
        endpoint = chain(server)
    assert server.refused and endpoint.grace_s >= 0.2
    assert endpoint.uses_ids and endpoint._misses == 0  # the server lost nothing


def endpoints(count):
    return [Endpoint(f"http://127.0.0.1:{k}", "off", {}) for k in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_every_turn_comes_whatever_is_cancelled(seed):
    rng = random.Random(seed)
    pool = Pool(endpoints(2), concurrency=3, patience_s=5.0)
    peak, done = [0], []

    async def work(turn):
        endpoint = await pool.acquire(turn)
        try:
            peak[0] = max(peak[0], sum(e.load for e in pool.endpoints))
            await asyncio.sleep(rng.choice([0.0, 0.001]))
            done.append(turn)
        finally:
            pool.release(endpoint)

    async def everything():
        tasks = [asyncio.create_task(work(rng.randrange(100))) for _ in range(200)]
        for task in rng.sample(tasks, 80):
            await asyncio.sleep(rng.choice([0.0, 0.0002]))
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        return sum(r is None for r in results)

    assert asyncio.run(everything()) == len(done) >= 120
    assert peak[0] == 6 and [e.load for e in pool.endpoints] == [0, 0]


def test_low_turns_go_first():
    pool, order = Pool(endpoints(1), concurrency=1, patience_s=5.0), []

    async def work(turn):
        endpoint = await pool.acquire(turn)
        order.append(turn)
        await asyncio.sleep(0)
        pool.release(endpoint)

    async def everything():
        await asyncio.gather(*(work(turn) for turn in (0, 5, 3, 9, 1)))

    asyncio.run(everything())
    assert order == [0, 1, 3, 5, 9]


def test_patience_ends_and_a_return_wakes_everybody():
    async def dead():
        pool = Pool(endpoints(1), concurrency=1, patience_s=0.2)
        pool.endpoints[0].alive, pool._dead_since = False, time.monotonic()
        with pytest.raises(NoEndpoint, match=r"no server was reachable for 0\.2 s"):
            await asyncio.wait_for(pool.acquire(0), 5)

    async def back():
        pool = Pool(endpoints(1), concurrency=2, patience_s=5.0)
        pool.endpoints[0].alive = False
        waiting = [asyncio.create_task(pool.acquire(turn)) for turn in range(2)]
        await asyncio.sleep(0.05)
        pool.endpoints[0].alive = True
        pool._wake_all()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)

    asyncio.run(dead())
    asyncio.run(back())
