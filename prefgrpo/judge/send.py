"""One request to the best of several servers of the same kind, repeated where that helps.

STATUSES and ERRORS say what each failure means. A timeout is retried once, elsewhere if another server is free, because
the same question takes the same server as long again; what one server refuses another one may take; a refusal of the
request itself ends it at once with the server's message. It knows nothing of judges: a caller gives the path, writes
the body and reads the answer. Invariants: every request ends, in bounded time, with what was read or a reason; a
restart of the server loses none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import aiohttp

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import traffic
from prefgrpo.judge.endpoint import Endpoint, Pool, SendError, checkpoint_name, describe_error, redirect
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.verdict import JudgeError

_MISS = (b"Cache miss for", b"Failed to apply")
_BACKOFF_S = 0.25
"""First pause before a repetition; doubles each time, with jitter."""
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 30.0
"""Longest wait for a connection and for /v1/models, which wait for no answer to be written."""
PATIENCE_S = 600.0
"""How long a server that is down is waited for if the configuration sets no limit."""
Write = Callable[[Endpoint, Collection[str] | None], bytes]
"""(endpoint, which media the body must carry with data; None: all of them, without ids) -> body."""
Read = Callable[[str, bytes], Any]
"""(address, payload of a 200) -> what it says. Raises ValueError if a server of this kind would not send that."""


class Outcome(NamedTuple):
    """What a kind of failure means for the request, and for the server."""

    most: float = math.inf  # requests of one question that may end so, before it is given up
    most_alone: float = math.inf  # likewise while no other server is well
    strike: bool = True  # the server rests while another one is well
    probe: bool = False  # its /health is asked, and a server that does not answer that is ejected
    eject: bool = False  # it gets no request until its /health answers


REFUSED = Outcome(most=1, strike=False)
"""Any server would refuse this request."""
UNSUITABLE = Outcome(most_alone=1)
"""This server will never answer; another one may."""
UNREADABLE = Outcome(most_alone=2)
"""A body may be broken on its way once."""
BUSY = Outcome()
FAILING = Outcome(probe=True)
SLOW = Outcome(most=2, probe=True)
LOST = Outcome(eject=True)
STATUSES = dict.fromkeys(range(500, 600), FAILING) | {400: REFUSED, 413: REFUSED, 422: REFUSED, 429: BUSY, 504: SLOW}
"""Outcome of a status that is not 200; UNSUITABLE for those that are not listed."""
ERRORS = (
    (aiohttp.ClientConnectionError, LOST),  # a connection that takes too long is a TimeoutError as well
    (asyncio.TimeoutError, SLOW),
    (aiohttp.ClientPayloadError, LOST),
    (OSError, LOST),
    (aiohttp.ClientError, BUSY),
)
"""Outcome of an exception, the first that fits."""


class Failure(Exception):
    """A request that failed at one server."""

    def __init__(self, reason: str, outcome: Outcome, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.outcome, self.pause_s = outcome, pause_s
        self.endpoint: Endpoint | None = None


@dataclass(frozen=True)
class Reply:
    """What a server answered with status 200."""

    value: Any
    """What was read from the body."""
    retries: int = 0
    """Requests beyond the first that it took."""
    spent_us: int = 0
    """Microseconds of the request that was answered."""


@dataclass(frozen=True)
class _Job:
    """What is to be sent, and how the answer is read."""

    path: str
    write: Write
    read: Read
    media: frozenset[str]
    timeout_s: float


class Sender:
    """Sends bodies to a pool of endpoints; everything but the constructor and `close` runs on the loop."""

    def __init__(self, config: JudgeConfig, *, openai: bool = True) -> None:
        """`openai`: ask /v1/models what a server is before its first request. JudgeError for bad options."""
        validate(config)
        self.config, self.openai = config, openai
        self.thread = loop_thread()
        self.model = config.model
        self.root = ""
        self.endpoints = [Endpoint(url, config) for url in config.endpoints]
        patience_s = config.deadline_s or PATIENCE_S if config.patience_s is None else config.patience_s
        self.pool = Pool(self.endpoints, config.concurrency, patience_s)
        self._turns = itertools.count()

    def close(self) -> None:
        """Stop probing; the process's connection pool stays for others."""
        self.thread.loop.call_soon_threadsafe(self.pool.close)

    async def send(
        self, path: str, write: Write, read: Read, media: Sequence[str] = (), timeout_s: float = 120.0
    ) -> Reply:
        """POST a body to `path` of the best endpoint; SendError if no repetition brought what can be read.

        media: ids of the media in the body; `write` gets those that must carry data.
        timeout_s: longest that one request may take, unless the configuration has a limit of its own.
        """
        turn, job = next(self._turns), _Job(path, write, read, frozenset(media), self.config.timeout_s or timeout_s)
        ended, slow, longest = Counter[Outcome](), None, min(_LONGEST_PAUSE_S, job.timeout_s)
        exchange, retries = self._hedged if self.config.hedge_s else self._exchange, 0
        while True:
            try:
                endpoint = await self._slot(turn, job.media, slow)
            except SendError as error:  # no server is reachable
                error.retries = retries
                raise
            try:
                return replace(await exchange(endpoint, job), retries=retries)
            except Failure as failure:
                outcome = failure.outcome
                ended[outcome] += 1
                slow = failure.endpoint if outcome is SLOW else slow
                others = self.pool.well(besides=failure.endpoint)
                most = outcome.most if others else min(outcome.most, outcome.most_alone)
                if ended[outcome] >= most or retries >= self.config.retries:
                    given_up = f"gave up after {retries + 1} requests; the last one: " if retries else ""
                    raise SendError(f"{given_up}{failure}", retries) from failure
                backoff = min(_BACKOFF_S * 2**retries, longest) * random.uniform(0.5, 1.0)
                pause_s = max(backoff, min(failure.pause_s, longest))
            finally:
                self.pool.release(endpoint)
            retries += 1
            await asyncio.sleep(pause_s)

    async def named(self) -> str:
        """The model that every request asks: the configured one, else the first that is listed; '' if none is."""
        for endpoint in () if self.model else self.endpoints:
            try:
                await endpoint.describe(_CONNECT_S)
            except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
                continue
            self.model = self.model or (endpoint.models or [""])[0]
        return self.model

    async def _slot(self, turn: int, media: frozenset[str], slow: Endpoint | None) -> Endpoint:
        """The best endpoint with a free slot, not `slow` if another one has one; one that has to wait for media that
        another one carries holds none."""
        while True:
            endpoint = await self.pool.acquire(turn, slow)
            if not (events := endpoint.ids.on_the_way(media)):
                return endpoint
            self.pool.release(endpoint)
            for event in events:
                await event.wait()

    async def _hedged(self, endpoint: Endpoint, job: _Job) -> Reply:
        """A request, and a second one beside it if it is slow; the first answer counts, the other is given up."""
        tasks = [asyncio.create_task(self._exchange(endpoint, job))]
        other = None
        try:
            _, waiting = await asyncio.wait(tasks, timeout=self.config.hedge_s)
            if waiting and (other := self.pool.spare(endpoint)):
                traffic.count(hedges=1)
                lone = replace(job, media=frozenset()) if other is endpoint else job  # there the slow one carries them
                tasks.append(asyncio.create_task(self._exchange(other, lone)))
                waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if good := [task for task in done if not task.cancelled() and task.exception() is None]:
                    return good[0].result()
            return await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            if other is not None:
                self.pool.release(other)

    async def _exchange(self, endpoint: Endpoint, job: _Job) -> Reply:
        """One request to an endpoint whose slot is taken; how it ends counts when the next one is chosen."""
        start, reply = time.monotonic(), None
        try:
            reply = Reply(await self._ask(endpoint, job))
        except Failure as failure:
            failure.endpoint, outcome = endpoint, failure.outcome
            if outcome.eject:
                self.pool.eject(endpoint, str(failure).removeprefix(f"{endpoint.url}: "))
            elif outcome.probe:
                self.pool.suspect(endpoint)
            if outcome.strike:
                self.pool.strike(endpoint, failure.pause_s)
            raise
        finally:
            spent_us = round(1e6 * (time.monotonic() - start))
            if self.openai:
                traffic.count(spent_us=spent_us, wasted_us=spent_us if reply is None else 0)
        endpoint.strikes = 0
        return replace(reply, spent_us=spent_us)

    async def _ask(self, endpoint: Endpoint, job: _Job) -> Any:
        """What the server says; Failure if it does not answer 200 with something that can be read."""
        asked, limit_s = "/v1/models", min(job.timeout_s, _CONNECT_S)
        try:
            if self.openai:
                await endpoint.describe(limit_s)
                self._check_model(endpoint)
            asked, limit_s = "", job.timeout_s
            reply, payload = await self._deliver(endpoint, job)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            outcome = next(outcome for kind, outcome in ERRORS if isinstance(error, kind))
            if outcome is SLOW:
                raise Failure(f"{endpoint.url}{asked} did not answer within {limit_s:g} s", SLOW) from error
            raise Failure(f"{endpoint.url}: {describe_error(error)}", outcome) from error
        if reply.status != 200:
            outcome = STATUSES.get(reply.status, UNSUITABLE)
            verb = "refused with" if outcome in (REFUSED, UNSUITABLE) else "answered"
            message = redirect(reply) or f": {message_of(payload)}"
            raise Failure(f"{endpoint.url} {verb} {reply.status}{message}", outcome, _retry_after(reply))
        try:
            return job.read(endpoint.url, payload)
        except ValueError as error:
            raise Failure(str(error), UNREADABLE) from error

    def _check_model(self, endpoint: Endpoint) -> None:
        """A server may come back with another model, and some do not check the name that they are asked for."""
        if endpoint.models is None:
            raise Failure(f"{endpoint.url} does not list its models yet: {endpoint.refusal}", BUSY)
        self.model = self.model or (endpoint.models or [""])[0]
        root = endpoint.roots.get(self.model, "")
        endpoint.root, self.root = endpoint.root or root, self.root or root
        problem = endpoint.model_problem(self.model)
        if not problem and root and (root != endpoint.root or checkpoint_name(root) != checkpoint_name(self.root)):
            before = endpoint.root if root != endpoint.root else self.root
            problem = (
                f"serves '{self.model}' from {root}, where it was {before} at first: expected one checkpoint "
                "throughout a run, on all servers of a judge"
            )
        if problem:
            endpoint.forget()
            raise Failure(f"{endpoint.url} {problem}", UNSUITABLE)

    async def _deliver(self, endpoint: Endpoint, job: _Job) -> tuple[aiohttp.ClientResponse, bytes]:
        """Post with ids where the server has the media; once more with all data if it turns out that it has not."""
        if not endpoint.uses_ids or not job.media:
            return await self._post(endpoint, job, None)
        ids, success = endpoint.ids, False
        carried, grace_s = await ids.claim(job.media)
        try:
            reply, payload = await self._post(endpoint, job, carried)
            if len(carried) < len(job.media):
                missed = reply.status == 400 and any(text in payload for text in _MISS)
                ids.count(missed, grace_s)
                if missed or reply.status == 500:
                    reply, payload = await self._post(endpoint, job, job.media)
            success = reply.status == 200
            return reply, payload
        finally:
            ids.settle(carried, success)

    async def _post(
        self, endpoint: Endpoint, job: _Job, carried: Collection[str] | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """What one request brought."""
        body, url = job.write(endpoint, carried), endpoint.url + job.path
        timeout = aiohttp.ClientTimeout(total=job.timeout_s, sock_connect=_CONNECT_S)
        session, headers = self.thread.session(), endpoint.headers
        async with session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await reply.read()


def validate(config: JudgeConfig) -> None:
    """Raise JudgeError for addresses that are none and a key that is not there."""
    mistakes = []
    if not config.endpoints or not all(url.startswith(("http://", "https://")) for url in config.endpoints):
        mistakes.append(f"endpoints must be http:// or https:// addresses, got {list(config.endpoints)}")
    if config.api_key_env and config.api_key_env not in os.environ:
        mistakes.append(f"the environment variable {config.api_key_env} (api_key_env) is not set")
    if mistakes:
        raise JudgeError("judge: " + "; ".join(mistakes))


def message_of(payload: bytes) -> str:
    """The server's own error message, else the start of what it sent."""
    try:
        value = json.loads(payload)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError, RecursionError):
        return payload[:200].decode("utf-8", "replace")


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    """Seconds of a Retry-After header, at most a minute; 0 if there is none (or a date)."""
    try:
        return min(max(float(reply.headers.get("Retry-After", 0)), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
