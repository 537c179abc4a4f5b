"""Eight ranks send one loaded server the shipped recipes' questions: no request is lost and no answer wasted.

The server is a queueing model of an 8 B judge: a fixed number of tokens per second, shared among the answers being
written. Client and server run on one event loop whose clock jumps to the next timer when no socket has data, so
20 minutes of judging take seconds and the result does not depend on machine load.
"""

import asyncio
import heapq
import json
import selectors
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from aiohttp import web
from ranks import until
from servers import JudgeServer, reply
from world import noise

from prefgrpo.config.loading import load
from prefgrpo.judge import event_loop
from prefgrpo.judge.client import HttpJudge
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, load_class
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.run.rewards import judge_config

RANKS, TOKENS = 8, 1500
CATEGORIES = [
    {"name": name, "analysis": "", "cat_winner": "Image 1"} for name in ("Alignment", "Quality", "Aesthetics")
]
SAYS = {
    "think": "<think>so</think><answer>Image 1 is better</answer>",
    "flex": json.dumps({"categories": CATEGORIES, "reason": "", "winner": "Image 1"}),
}


class Clock(selectors.DefaultSelector):
    """A selector that never waits: once `runs` is set, it advances the loop's clock by the timeout instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.runs = 1000.0, False

    def select(self, timeout=None):
        if timeout is not None and timeout <= 0:
            return super().select(0)
        # data being sent by another thread or the peer; the server's timers are short, long ones are of timeouts
        events = super().select(0.01 if not self.runs else 0.05 if timeout is None or timeout > 5 else 0.0005)
        if not events and self.runs and timeout is not None:
            self.now += timeout
        return events


class LoadedServer(JudgeServer):
    """`rate` tokens per second, shared equally among the answers being written, each `TOKENS` long."""

    def __init__(self, rate: float, says: str, on: asyncio.AbstractEventLoop) -> None:
        super().__init__(vllm=False)
        self._loop, self.rate, self.says = on, rate, says
        self.share = self.at = 0.0  # tokens that an answer present from the start would have by now
        self.ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.used = self.wasted = 0.0
        self.asked = 0

    def advance(self) -> None:
        """Advance the answers to the current time, complete finished ones, and schedule the next completion."""
        now = self._loop.time()
        self.share += (now - self.at) * self.rate / max(self.in_flight, 1)
        self.at = now
        while self.ends and (self.ends[0][0] <= self.share + 1e-6 or self.ends[0][2].done()):
            done = heapq.heappop(self.ends)[2]
            if not done.done():
                done.set_result(None)
                self.in_flight -= 1
        if self.timer:
            self.timer.cancel()
        if self.ends:
            wait = (self.ends[0][0] - self.share) * self.in_flight / self.rate
            self.timer = self._loop.call_later(wait, self.advance)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.advance()
        start, done = self.share, self._loop.create_future()
        self.asked, self.in_flight = self.asked + 1, self.in_flight + 1
        self.peak = max(self.peak, self.in_flight)
        heapq.heappush(self.ends, (start + TOKENS, self.asked, done))
        self.advance()
        try:
            await done
        except asyncio.CancelledError:  # the client disconnected
            self.advance()
            if done.cancelled():
                self.in_flight -= 1
            self.wasted += min(self.share - start, TOKENS)
            self.advance()
            raise
        self.used += TOKENS
        found = web.json_response(reply(self.says) | {"model": self.model})
        found.force_close()
        return found


@pytest.fixture
def clock(monkeypatch):
    """Runs the judge's event loop on a simulated clock, which `time.monotonic` also returns."""
    found = Clock()

    def new_loop() -> asyncio.SelectorEventLoop:
        made = asyncio.SelectorEventLoop(found)
        made.time = lambda: found.now
        return made

    monkeypatch.setattr(event_loop, "_thread", None)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "new_event_loop", new_loop)
        thread = event_loop.loop_thread()
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    yield found
    found.runs = False
    thread.close()


@pytest.mark.parametrize(("recipe", "rate"), [("lora_think_flux", 2800), ("lora_flex_flux2_klein", 4700)])
def test_a_loaded_judge_of_eight_ranks_loses_nothing(recipe, rate, clock):
    """All questions of a step arrive at once, as after an instantaneous rollout, with the recipe's own values."""
    config = load(f"scripts/unifiedreward/{recipe}.yaml")
    entry = config.rewards[0]
    rollout = config.rollout
    name = entry.name
    section = config.judge
    thread = event_loop.loop_thread()
    scorers = []
    template = load_class(name).template
    server = LoadedServer(rate, SAYS[template], thread.loop)
    thread.submit(server.start()).result(10)
    for rank in range(RANKS):
        own = judge_config(config, entry, World(rank, RANKS, torch.device("cpu")))
        own = replace(own, endpoints=(server.url,), model=server.model)
        judge = HttpJudge(own)  # ranks are separate processes and share none
        reward = build(name, {name: {"judge": judge, "plan": entry.options["plan"]}})
        scorers.append(Scorer(reward, rollout.group_size, section.deadline_s, config.seed))
    for rank, scorer in enumerate(scorers):
        groups = range(rank, rollout.prompts_per_step, RANKS)
        scorer.begin(0, groups)
        for group in groups:
            for member in range(rollout.group_size):
                scorer.add(group, member, Sample("a red circle", noise(100 * group + member, 16, 16)))
    judges = [scorer.rewards[name].judge for scorer in scorers]
    pictures = rollout.prompts_per_step * rollout.group_size

    def encoded():
        made = [ways for judge in judges for ways in list(judge.encodings.futures.values())]
        return sum(future.done() for ways in made for future in ways.values())

    until(lambda: encoded() == pictures)
    start, clock.runs = clock.now, True
    found = [scorer.finish() for scorer in scorers]
    seconds = clock.now - start
    asked = sum(f.metrics["judge/requests"] for f in found)
    assert asked == rollout.prompts_per_step * rollout.group_size * (rollout.group_size - 1) // 2
    assert sum(f.metrics["judge/failures"] for f in found) == 0
    assert not any(np.isnan(f.values[name]).any() for f in found)
    assert server.peak <= section.concurrency, "one limit for all ranks together"
    assert server.used == asked * TOKENS and server.wasted <= 0.05 * (server.used + server.wasted)
    assert seconds < min(scorer.deadline_s for scorer in scorers)
    assert seconds == pytest.approx(asked * TOKENS / rate, rel=0.1), "the limit keeps the server busy"
