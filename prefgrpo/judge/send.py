"""One request to the best of several servers of the same kind, repeated where that helps.

What may help is retried with backoff (connection errors, 429, 5xx, another server where one refuses); a timeout is
retried once, elsewhere if another server is free, because the same question takes the same server as long again; a 200
that cannot be read is asked for once more; a refusal of the request itself ends it at once with the server's message.
It knows nothing of judges: a caller gives the path, writes the body and reads the answer. Invariants: every request
ends, in bounded time, with what was read or a reason; a restart of the server loses none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import aiohttp

from prefgrpo.judge.endpoint import (
    TRANSPORT_ERRORS,
    Endpoint,
    NoEndpoint,
    Pool,
    checkpoint_name,
    describe_error,
    read_body,
    redirect,
)
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.traffic import TRAFFIC
from prefgrpo.judge.verdict import JudgeError

_MISS = ("Cache miss for", "Failed to apply")
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 30.0
"""Longest wait for a connection and for /v1/models, which wait for no answer to be written."""
_TIMEOUTS = 2
"""Requests of one question that may run into the time limit."""
_OWN_FAULT = (400, 413, 422)
"""What any server would answer to the request."""
Write = Callable[[Endpoint, Collection[str] | None], bytes]
"""(endpoint, which media the body must carry with data; None: all of them, without ids) -> body."""
Read = Callable[[str, bytes], Any]
"""(address, payload of a 200) -> what it says. Raises ValueError if a server of this kind would not send that."""


@dataclass(frozen=True, kw_only=True)
class SendConfig:
    """How requests are sent."""

    endpoints: tuple[str, ...] = ()
    """Servers that answer the same; the least loaded one is asked."""
    concurrency: int = 64
    """Most requests in flight per endpoint."""
    timeout_s: float | None = None
    """Longest that one request may take, in seconds; none: what the caller of `send` says."""
    retries: int = 5
    """Repetitions of a failed request."""
    backoff_s: float = 0.25
    """First pause before a repetition; doubles each time, with jitter."""
    patience_s: float = 180.0
    """How long requests wait for a server to come back while none is reachable."""
    hedge_s: float = 0.0
    """Send a request that takes longer than this to a second server too; the first answer counts. 0: never."""
    media_ids: str = "auto"
    """Send each medium once, then its id: auto (vLLM servers), on, off."""
    api_key_env: str = ""
    """Environment variable that holds the API key, if one is needed."""

    def mistakes(self) -> list[str]:
        """What is out of range, in words."""
        bad = []
        if not self.endpoints or any(not str(u).startswith(("http://", "https://")) for u in self.endpoints):
            bad.append(f"endpoints must be http:// or https:// addresses, got {list(self.endpoints)}")
        if self.media_ids not in ("auto", "on", "off"):
            bad.append(f"media_ids must be auto, on or off, got {self.media_ids!r}")
        if self.concurrency < 1 or self.retries < 0 or (self.timeout_s is not None and not self.timeout_s > 0):
            bad.append("concurrency must be at least 1, retries at least 0, timeout_s positive")
        if not self.hedge_s >= 0:
            bad.append(f"hedge_s must be 0 or more seconds, got {self.hedge_s}")
        if self.api_key_env and self.api_key_env not in os.environ:
            bad.append(f"the environment variable {self.api_key_env} (api_key_env) is not set")
        return bad

    def authorization(self) -> dict[str, str]:
        """The header with the key, if there is one."""
        return {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}


Response = tuple[int, bytes, float, str]
"""Status, body, seconds of Retry-After, and where it redirects to, in words."""


class SendError(RuntimeError):
    """A request that got no payload; the message says why."""

    def __init__(self, reason: str, retries: int) -> None:
        super().__init__(reason)
        self.retries = retries


class _Retry(Exception):
    """A failure that a repetition may mend."""

    def __init__(self, reason: str, pause_s: float = 0.0, slow: Endpoint | None = None) -> None:
        """`slow`: the server, if the time limit was what failed."""
        super().__init__(reason)
        self.pause_s, self.slow = pause_s, slow


class _Refused(Exception):
    """A failure that no repetition mends."""


@dataclass(frozen=True)
class Reply:
    """What a server answered with status 200."""

    url: str
    """The endpoint."""
    value: Any
    """What was read from the body."""
    retries: int
    """Requests beyond the first that it took."""
    spent_us: int = 0
    """Microseconds of the request that was answered."""


@dataclass(frozen=True)
class _Job:
    """What is to be sent, and how the answer is read."""

    path: str
    write: Write
    read: Read
    media: Sequence[str]
    timeout_s: float
    unread: list[str] = field(default_factory=list)
    """What could not be read so far, a reason each."""


class Sender:
    """Sends bodies to a pool of endpoints; everything but the constructor and `close` runs on the loop."""

    def __init__(self, config: SendConfig, *, openai: bool = True, content_type: str = "application/json") -> None:
        """`openai`: learn from /v1/models what a server is before its first request. JudgeError for bad options."""
        if bad := config.mistakes():
            raise JudgeError("judge: " + "; ".join(bad))
        headers = {"Content-Type": content_type} | config.authorization()
        self.config, self.openai = config, openai
        self.thread = loop_thread()
        self.model: str = getattr(config, "model", "")  # a judge's; other servers have one
        self.endpoints = [Endpoint(url, config.media_ids, headers, self.model) for url in config.endpoints]
        self.root = ""
        self._turns = itertools.count()
        self.pool = Pool(self.endpoints, config.concurrency, config.patience_s)

    def close(self) -> None:
        """Stop probing; the process's connection pool stays for others."""
        for endpoint in self.endpoints:
            self.thread.loop.call_soon_threadsafe(endpoint.close)

    async def send(
        self, path: str, write: Write, read: Read, media: Sequence[str] = (), timeout_s: float = 120.0
    ) -> Reply:
        """POST a body to `path` of the best endpoint; SendError if no repetition brought what can be read.

        media: ids of the media in the body, in any order; `write` is told which of them must carry data.
        timeout_s: longest that one request may take, unless the configuration has a limit of its own.
        """
        retries, timeouts, turn = 0, 0, next(self._turns)
        job = _Job(path, write, read, media, self.config.timeout_s or timeout_s)
        longest, slow = min(_LONGEST_PAUSE_S, job.timeout_s), None
        while True:
            pause = min(self.config.backoff_s * 2**retries, longest) * random.uniform(0.5, 1.0)
            try:
                return replace(await self._attempt(turn, job, slow), retries=retries)
            except (_Refused, NoEndpoint) as error:
                raise SendError(str(error), retries) from error
            except _Retry as error:
                slow, timeouts = error.slow or slow, timeouts + (error.slow is not None)
                if retries >= self.config.retries or timeouts >= _TIMEOUTS:
                    reason = f"gave up after {retries + 1} requests; the last one: {error}"
                    raise SendError(reason, retries) from error
                pause = max(pause, min(error.pause_s, longest))
            retries += 1
            await asyncio.sleep(pause)

    async def named(self) -> str:
        """The model that every request asks: the configured one, else the first that is listed; '' if none is."""
        for endpoint in () if self.model else self.endpoints:
            try:
                await endpoint.describe(self.thread.session(), _CONNECT_S)
            except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
                continue
            self.model = self.model or (endpoint.models or [""])[0]
        return self.model

    async def _attempt(self, turn: int, job: _Job, slow: Endpoint | None) -> Reply:
        """One request to the best endpoint, not to `slow` if another one is free."""
        endpoint = await self._slot(turn, job.media, slow)
        try:
            if not self.config.hedge_s:
                return await self._exchange(endpoint, job)
            return await self._hedged(endpoint, job)
        finally:
            self.pool.release(endpoint)

    async def _slot(self, turn: int, media: Sequence[str], slow: Endpoint | None) -> Endpoint:
        """An endpoint with a free slot; a request that has to wait for media that another one carries holds none."""
        waited: set[str] = set()
        while True:
            endpoint = await self.pool.acquire(turn, slow)
            busy = endpoint.carried(set(media) - waited)
            if not busy or not endpoint.uses_ids:
                return endpoint
            self.pool.release(endpoint)
            waited |= busy.keys()
            for event in busy.values():
                await event.wait()

    async def _hedged(self, endpoint: Endpoint, job: _Job) -> Reply:
        """A request, and a second one beside it if it is slow; the first payload counts, the other is given up."""
        tasks = [asyncio.ensure_future(self._exchange(endpoint, job))]
        other = None
        try:
            await asyncio.wait(tasks, timeout=self.config.hedge_s)
            if not tasks[0].done() and (other := self.pool.spare(endpoint)):
                TRAFFIC["hedges"] += 1
                lone = replace(job, media=()) if other is endpoint else job  # there the slow one carries the media
                tasks.append(asyncio.ensure_future(self._exchange(other, lone)))
            return await _first_good(tasks)
        finally:
            for task in tasks:
                task.cancel()
            if other is not None:
                self.pool.release(other)

    async def _exchange(self, endpoint: Endpoint, job: _Job) -> Reply:
        """One request to an endpoint whose slot is taken; how it ends counts when the next one is chosen."""
        start, spent, answered = time.monotonic(), 0, False
        try:
            found = await self._ask(endpoint, job)
            answered = True
        except _Retry as error:
            self.pool.strike(endpoint, error.pause_s)
            raise
        finally:
            spent = round(1e6 * (time.monotonic() - start))
            if self.openai:
                TRAFFIC.update(spent_us=spent, wasted_us=0 if answered else spent)
        endpoint.strikes = 0
        return Reply(endpoint.url, found, 0, spent)

    async def _ask(self, endpoint: Endpoint, job: _Job) -> Any:
        """One request: what a 200 said."""
        session = self.thread.session()
        try:
            if self.openai:
                await self._describe(session, endpoint, job)
            status, payload, pause, to = await self._deliver(session, endpoint, job)
        except asyncio.TimeoutError as error:
            if isinstance(error, aiohttp.ClientConnectionError):  # no connection: nobody was busy with an answer
                await self.pool.eject(session, endpoint, describe_error(error))
                raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
            self.pool.suspect(session, endpoint)
            message = f"{endpoint.url} did not answer within {job.timeout_s:g} s"
            raise _Retry(message, slow=endpoint) from error
        except TRANSPORT_ERRORS as error:
            await self.pool.eject(session, endpoint, describe_error(error))
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        except aiohttp.ClientError as error:
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        if status >= 500:
            self.pool.suspect(session, endpoint)
        if status == 429 or status >= 500:
            slow = endpoint if status == 504 else None  # a gateway's time limit
            raise _Retry(f"{endpoint.url} answered {status}: {message_of(payload)}", pause, slow)
        if status in _OWN_FAULT:
            raise _Refused(f"{endpoint.url} refused with {status}: {message_of(payload)}")
        if status != 200:
            self._refused(endpoint, f"{endpoint.url} refused with {status}{to or f': {message_of(payload)}'}")
        try:
            return job.read(endpoint.url, payload)
        except ValueError as error:
            job.unread.append(str(error))
            if len(job.unread) == 1:  # a body may be broken on its way
                raise _Retry(str(error)) from error
            self._refused(endpoint, str(error))

    async def _describe(self, session: aiohttp.ClientSession, endpoint: Endpoint, job: _Job) -> None:
        """Learn what the server is, if nobody has yet, and that it serves the model."""
        limit = min(job.timeout_s, _CONNECT_S)
        try:
            await endpoint.describe(session, limit)
        except asyncio.TimeoutError as error:
            self.pool.suspect(session, endpoint)
            raise _Retry(f"{endpoint.url} did not answer /v1/models within {limit:g} s") from error
        self._check_model(endpoint)

    def _check_model(self, endpoint: Endpoint) -> None:
        """A server may come back with another model, and not every one looks at the name that it is asked for."""
        self.model = self.model or (endpoint.models or [""])[0]
        if endpoint.models is None:
            raise _Retry(f"{endpoint.url} cannot say yet what it serves ({endpoint.refused or 'it is asked again'})")
        if not self.model:
            self._refused(endpoint, f"{endpoint.url} lists no model ({endpoint.refused or '/v1/models is empty'})")
        if endpoint.models and self.model not in endpoint.models:
            served = ", ".join(endpoint.models)
            endpoint.forget()
            self._refused(
                endpoint, f"{endpoint.url} serves {served}, not '{self.model}'; correct the model or the endpoint"
            )
        root = endpoint.roots.get(self.model, "")
        endpoint.root, self.root = endpoint.root or root, self.root or root
        before = endpoint.root if root != endpoint.root else self.root
        if root and (root != endpoint.root or checkpoint_name(root) != checkpoint_name(self.root)):
            endpoint.forget()
            message = f"{endpoint.url} serves '{self.model}' from {root}, where it was {before} at first"
            self._refused(endpoint, f"{message}: expected one checkpoint throughout a run, on all servers of a judge")

    def _refused(self, endpoint: Endpoint, told: str) -> NoReturn:
        """What this server refuses another one may take, if there is one."""
        raise _Retry(told) if self.pool.well(besides=endpoint) else _Refused(told)

    async def _deliver(self, session: aiohttp.ClientSession, endpoint: Endpoint, job: _Job) -> Response:
        """Post with ids where the server has the media; once more with all data if it turns out that it has not."""
        if not endpoint.uses_ids or not job.media:
            return await self._post(session, endpoint, job, None)
        carried = await endpoint.claim(job.media)
        grace_s = endpoint.given(job.media, carried)
        success = False
        try:
            reply = await self._post(session, endpoint, job, carried)
            if lean := len(carried) < len(set(job.media)):
                missed = reply[0] == 400 and any(text in reply[1].decode("utf-8", "replace") for text in _MISS)
                endpoint.lean_request(missed, grace_s)
                if missed or (lean and reply[0] == 500):
                    reply = await self._post(session, endpoint, job, set(job.media))
            success = reply[0] == 200
            return reply
        finally:
            endpoint.settle(carried, success)

    async def _post(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, job: _Job, carried: Collection[str] | None
    ) -> Response:
        """What one request brought."""
        body, url, headers = job.write(endpoint, carried), endpoint.url + job.path, endpoint.headers
        timeout = aiohttp.ClientTimeout(total=job.timeout_s, sock_connect=_CONNECT_S)
        async with session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as reply:
            pause = _retry_after(reply.headers.get("Retry-After"))
            return reply.status, await read_body(reply), pause, redirect(reply)


async def _first_good(tasks: Sequence[asyncio.Future[Reply]]) -> Reply:
    """The first result of `tasks`; what the first task raises if none has one."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and task.exception() is None:
                return task.result()
    return await tasks[0]


def message_of(payload: bytes) -> str:
    """The server's own error message, else the start of what it sent."""
    try:
        value = json.loads(payload)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError, RecursionError):
        return payload[:200].decode("utf-8", "replace")


def _retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header (a number or a date), 0 if there is none."""
    if not header:
        return 0.0
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0
