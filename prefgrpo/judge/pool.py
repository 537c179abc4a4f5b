"""Several equivalent servers: slots, retries, and servers that go down and come back.

Each request goes to the least loaded server. A server that responds with failures is paused while another one is
healthy, then tried with single requests; one that is down gets nothing until its /health answers. A timeout is retried
once, because the same server would take as long again. Nothing here is specific to judges. Invariants: every request
ends, in bounded time, with a parsed reply or a reason; a server restart loses no request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import traffic
from prefgrpo.judge.endpoint import Endpoint, Failure, Job, Kind, Read, Write, checkpoint_name
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.verdict import JudgeError

_BACKOFF_S = 0.25
"""First pause before a retry, in seconds; doubles each time, with jitter."""
_LONGEST_PAUSE_S = 60.0
_PAUSE_S = 0.5
_LONGEST_SERVER_PAUSE_S = 30.0
_LONGEST_PROBE_PAUSE_S = 2.0
RETRIES = 5
PATIENCE_S = 600.0
"""How long to wait for unreachable servers if the configuration sets no limit."""


class SendError(RuntimeError):
    """A request that failed even after retries; the message says why."""

    def __init__(self, reason: str, retries: int = 0) -> None:
        super().__init__(reason)
        self.retries = retries


@dataclass(frozen=True)
class Reply:
    """A server's reply with status 200."""

    value: Any
    """The parsed body."""
    retries: int
    """Number of retries before it."""
    spent_us: int
    """Duration of the successful request, in microseconds."""


class Pool:
    """Slots of several endpoints, at most `concurrency` requests in flight on each; used on the event loop only."""

    def __init__(self, endpoints: list[Endpoint], concurrency: int, patience_s: float) -> None:
        """patience_s: how long requests wait while no server is reachable."""
        self.endpoints = endpoints
        self.concurrency = concurrency
        self.patience_s = patience_s
        self._queue: list[tuple[int, asyncio.Future[Endpoint]]] = []
        self._patience: asyncio.TimerHandle | None = None
        self._unreachable = ""

    async def acquire(self, turn: int) -> Endpoint:
        """Wait for an endpoint with a free slot, lowest `turn` (unique) first; SendError if none is reachable."""
        if self._unreachable:
            raise SendError(self._unreachable)
        slot: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (turn, slot))
        self._assign_slots()
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(slot.result())
            raise

    def release(self, endpoint: Endpoint) -> None:
        """Release a slot."""
        endpoint.load -= 1
        if not endpoint.load:
            endpoint.idle_since = time.monotonic()
        self._assign_slots()

    def healthy(self, besides: Endpoint | None = None) -> list[Endpoint]:
        """Live endpoints whose last request did not fail, except `besides`."""
        return [e for e in self.endpoints if e.alive and not e.failures and e is not besides]

    def _free(self) -> list[Endpoint]:
        """Endpoints with a free slot: healthy ones and those whose pause is over; any live one if none is healthy."""
        alive = [e for e in self.endpoints if e.alive and e.load < self.concurrency]
        now = time.monotonic()
        usable = [e for e in alive if not e.failures or (not e.load and now >= e.paused_until)]
        return usable if self.healthy() else alive

    def _assign_slots(self) -> None:
        """Assign free slots to waiting requests."""
        while self._queue and (free := self._free()):
            _, slot = heapq.heappop(self._queue)
            if not slot.done():
                chosen = min(free, key=lambda e: e.load)
                chosen.load += 1
                slot.set_result(chosen)

    def failed(self, endpoint: Endpoint, failure: Failure) -> None:
        """Record a failure for later choices: pause, probe or eject the endpoint."""
        if failure.kind is Kind.DOWN:
            self.eject(endpoint, str(failure).removeprefix(f"{endpoint.url}: "))
        elif failure.probe:
            self._start_probe(endpoint)
        if failure.kind is Kind.GIVE_UP:
            return
        now = time.monotonic()
        if now >= endpoint.paused_until:  # concurrent failures count once
            endpoint.failures += 1
            pause_s = min(_PAUSE_S * 2 ** min(endpoint.failures - 1, 10), _LONGEST_SERVER_PAUSE_S)
            endpoint.paused_until = now + max(pause_s, failure.pause_s)
        self._assign_slots()  # if none is healthy now, any endpoint is used

    def eject(self, endpoint: Endpoint, problem: str) -> None:
        """Send nothing more to this endpoint until its health probe succeeds."""
        endpoint.alive = False
        endpoint.problem = problem
        if self._patience is None and not any(e.alive for e in self.endpoints):
            self._patience = asyncio.get_running_loop().call_later(self.patience_s, self._fail_waiting)
        self._start_probe(endpoint)

    def _fail_waiting(self) -> None:
        seen = "; ".join(f"{e.url}: {e.problem}" for e in self.endpoints)
        self._unreachable = f"no server was reachable for {self.patience_s:g} s ({seen})"
        for _, slot in self._queue:
            if not slot.done():
                slot.set_exception(SendError(self._unreachable))
        self._queue.clear()

    def _start_probe(self, endpoint: Endpoint) -> None:
        """Probe an endpoint in the background (one probe at a time)."""
        if endpoint.probe is None or endpoint.probe.done():
            endpoint.probe = asyncio.create_task(self._probe(endpoint))

    async def _probe(self, endpoint: Endpoint) -> None:
        """Poll /health until it responds; eject the endpoint in the meantime."""
        pause_s = 0.1
        while problem := await endpoint.health():
            self.eject(endpoint, problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PROBE_PAUSE_S)
        if not endpoint.alive:
            endpoint.reset()
            endpoint.alive = True
            endpoint.problem = ""
            if self._patience is not None:
                self._patience.cancel()
            self._patience = None
            self._unreachable = ""
            self._assign_slots()

    def close(self) -> None:
        """Stop probing."""
        for endpoint in self.endpoints:
            if endpoint.probe:
                endpoint.probe.cancel()


class HttpPool:
    """Sends requests to the configured servers; `send` runs on the event loop."""

    def __init__(
        self, config: JudgeConfig, *, openai: bool = True, retries: int = RETRIES, patience_s: float | None = None
    ) -> None:
        """openai: the servers list models in /v1/models, and must serve `config.model`. retries: most retries of a
        failed request. patience_s: how long requests wait while no server is reachable; None: the deadline of a step,
        or PATIENCE_S without one. JudgeError for invalid options."""
        validate(config)
        self.config = config
        self.model = config.model
        self.root = ""
        self.endpoints = [Endpoint(url, config, openai) for url in config.endpoints]
        self.retries = retries
        self.pool = Pool(self.endpoints, config.concurrency, patience_s or config.deadline_s or PATIENCE_S)
        self._turns = itertools.count()

    def close(self) -> None:
        """Stop health probes; the process's connections stay open for others."""
        loop_thread().loop.call_soon_threadsafe(self.pool.close)

    async def send(
        self, path: str, write: Write, read: Read, media: Sequence[str] = (), timeout_s: float = 120.0
    ) -> Reply:
        """POST a body to `path` on the best endpoint; SendError if all retries fail.

        media: ids of the media in the body; `write` is told which of them need data.
        timeout_s: timeout of one request, unless the configuration sets one.
        """
        turn = next(self._turns)
        job = Job(path, write, read, frozenset(media), self.config.timeout_s or timeout_s)
        longest_s = min(_LONGEST_PAUSE_S, job.timeout_s)
        seen: Counter[tuple[float, float]] = Counter()
        for retries in itertools.count():
            endpoint = await self._acquire(turn, job.media, retries)
            start = time.monotonic()
            spent_us = wasted_us = 0
            try:
                value = await endpoint.ask(job, self._check_model)
                endpoint.failures = 0
                spent_us = round(1e6 * (time.monotonic() - start))
                return Reply(value, retries, spent_us)
            except Failure as failure:
                self.pool.failed(endpoint, failure)
                limits = (failure.most, failure.alone)
                seen[limits] += 1
                most = failure.most if self.pool.healthy(besides=endpoint) else min(limits)
                give_up = failure.kind is Kind.GIVE_UP or seen[limits] >= most or retries >= self.retries
                if give_up:
                    given_up = f"gave up after {retries + 1} requests; the last one: " if retries else ""
                    raise SendError(f"{given_up}{failure}", retries) from failure
                backoff_s = min(_BACKOFF_S * 2**retries, longest_s) * random.uniform(0.5, 1.0)
                pause_s = max(backoff_s, min(failure.pause_s, longest_s))
            finally:
                if not spent_us:
                    spent_us = wasted_us = round(1e6 * (time.monotonic() - start))
                if endpoint.openai:
                    traffic.count(spent_us=spent_us, wasted_us=wasted_us)
                self.pool.release(endpoint)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _acquire(self, turn: int, media: frozenset[str], retries: int) -> Endpoint:
        """The best endpoint with a free slot. A request that must wait for media which another one is uploading holds
        no slot meanwhile."""
        while True:
            try:
                endpoint = await self.pool.acquire(turn)
            except SendError as error:
                error.retries = retries
                raise
            if not endpoint.uses_ids or not endpoint.ids.busy(media):
                return endpoint
            self.pool.release(endpoint)
            await endpoint.ids.uploaded(media)

    def _check_model(self, endpoint: Endpoint) -> None:
        """Fail if a server changed its model; some servers do not check the requested name, and some restart."""
        if endpoint.models is None:
            raise Failure(f"{endpoint.url} does not list its models yet: {endpoint.refusal}")
        self.model = self.model or (endpoint.models or [""])[0]
        root = endpoint.roots.get(self.model, "")
        endpoint.root = endpoint.root or root
        self.root = self.root or root
        problem = endpoint.model_problem(self.model)
        if not problem and root and (root != endpoint.root or checkpoint_name(root) != checkpoint_name(self.root)):
            before = endpoint.root if root != endpoint.root else self.root
            problem = (
                f"serves '{self.model}' from {root}, before that from {before}: expected one checkpoint "
                "throughout a run, on all servers of a judge"
            )
        if problem:
            endpoint.reset()
            raise Failure(f"{endpoint.url} {problem}", alone=1)


def validate(config: JudgeConfig) -> None:
    """Raise JudgeError for invalid addresses or a missing API key."""
    errors = []
    if not config.endpoints or not all(url.startswith(("http://", "https://")) for url in config.endpoints):
        errors.append(f"endpoints must be http:// or https:// addresses, got {list(config.endpoints)}")
    if config.api_key_env and config.api_key_env not in os.environ:
        errors.append(f"the environment variable {config.api_key_env} (api_key_env) is not set")
    if errors:
        raise JudgeError("judge: " + "; ".join(errors))
