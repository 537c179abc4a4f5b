"""One request to the best of several servers of the same kind, repeated where that helps.

What may help is retried with backoff (connection errors, timeouts, 429, 5xx); any other refusal ends the request at
once with the server's message. It knows nothing of judges: a caller gives the path and writes the body. Invariants:
every request ends, in bounded time, with a payload or a reason; a restart of the server loses none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from prefgrpo.judge.endpoint import TRANSPORT_ERRORS, Endpoint, NoEndpoint, Pool, describe_error
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.traffic import TRAFFIC
from prefgrpo.judge.verdict import JudgeError

_MISS = ("Cache miss for", "Failed to apply")
_LONGEST_PAUSE_S = 60.0
Write = Callable[[Endpoint, Collection[str] | None], bytes]
"""(endpoint, which media the body must carry with data; None: all of them, without ids) -> body."""


@dataclass(frozen=True, kw_only=True)
class SendConfig:
    """How requests are sent."""

    endpoints: tuple[str, ...] = ()
    """Servers that answer the same; the least loaded one is asked."""
    concurrency: int = 64
    """Most requests in flight per endpoint."""
    timeout_s: float = 120.0
    """Longest that one request may take."""
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
        if self.concurrency < 1 or self.retries < 0 or not self.timeout_s > 0:
            bad.append("concurrency must be at least 1, retries at least 0, timeout_s positive")
        if not self.hedge_s >= 0:
            bad.append(f"hedge_s must be 0 or more seconds, got {self.hedge_s}")
        if self.api_key_env and self.api_key_env not in os.environ:
            bad.append(f"the environment variable {self.api_key_env} (api_key_env) is not set")
        return bad

    def authorization(self) -> dict[str, str]:
        """The header with the key, if there is one."""
        return {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}


class SendError(RuntimeError):
    """A request that got no payload; the message says why."""

    def __init__(self, reason: str, retries: int) -> None:
        super().__init__(reason)
        self.retries = retries


class _Retry(Exception):
    """A failure that a repetition may mend."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class _Refused(Exception):
    """A failure that no repetition mends."""


@dataclass(frozen=True)
class Reply:
    """What a server answered with status 200."""

    url: str
    """The endpoint."""
    payload: bytes
    """The body."""
    retries: int
    """Requests beyond the first that it took."""


class Sender:
    """Sends bodies to a pool of endpoints; everything but the constructor and `close` runs on the loop."""

    def __init__(self, config: SendConfig, *, openai: bool = True, content_type: str = "application/json") -> None:
        """`openai`: learn from /v1/models what a server is before its first request. JudgeError for bad options."""
        if bad := config.mistakes():
            raise JudgeError("judge: " + "; ".join(bad))
        headers = {"Content-Type": content_type} | config.authorization()
        self.config, self.openai = config, openai
        self.thread = loop_thread()
        model = getattr(config, "model", "")  # a judge's; other servers have one
        self.endpoints = [Endpoint(url, config.media_ids, headers, model) for url in config.endpoints]
        self._turns = itertools.count()
        self.pool = Pool(self.endpoints, config.concurrency, config.patience_s)

    def close(self) -> None:
        """Stop probing; the process's connection pool stays for others."""
        for endpoint in self.endpoints:
            self.thread.loop.call_soon_threadsafe(endpoint.close)

    async def send(self, path: str, write: Write, media: Sequence[str] = ()) -> Reply:
        """POST a body to `path` of the best endpoint; SendError if no repetition brought a payload.

        media: ids of the media in the body, in any order; `write` is told which of them must carry data.
        """
        retries, turn = 0, next(self._turns)
        while True:
            pause = min(self.config.backoff_s * 2**retries, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            try:
                url, payload = await self._attempt(turn, path, write, media)
                return Reply(url, payload, retries)
            except (_Refused, NoEndpoint) as error:
                raise SendError(str(error), retries) from error
            except _Retry as error:
                if retries >= self.config.retries:
                    reason = f"gave up after {retries + 1} requests; the last one: {error}"
                    raise SendError(reason, retries) from error
                pause = max(pause, min(error.pause_s, _LONGEST_PAUSE_S))
            retries += 1
            await asyncio.sleep(pause)

    async def only_model(self) -> str:
        """Name of the first model that any of the servers lists; '' if none can be asked."""
        for endpoint in self.endpoints:
            try:
                await endpoint.describe(self.thread.session(), self.config.timeout_s)
            except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
                continue
            if endpoint.models:
                return endpoint.models[0]
        return ""

    async def _attempt(self, turn: int, path: str, write: Write, media: Sequence[str]) -> tuple[str, bytes]:
        """One request to the best endpoint: (its address, the payload of a 200)."""
        endpoint = await self._slot(turn, media)
        try:
            if not self.config.hedge_s:
                return await self._exchange(endpoint, path, write, media)
            return await self._hedged(endpoint, path, write, media)
        finally:
            self.pool.release(endpoint)

    async def _slot(self, turn: int, media: Sequence[str]) -> Endpoint:
        """An endpoint with a free slot; a request that has to wait for media that another one carries holds none."""
        waited: set[str] = set()
        while True:
            endpoint = await self.pool.acquire(turn)
            busy = endpoint.carried(set(media) - waited)
            if not busy or not endpoint.uses_ids:
                return endpoint
            self.pool.release(endpoint)
            waited |= busy.keys()
            for event in busy.values():
                await event.wait()

    async def _hedged(self, endpoint: Endpoint, path: str, write: Write, media: Sequence[str]) -> tuple[str, bytes]:
        """A request, and a second one beside it if it is slow; the first payload counts, the other is given up."""
        tasks = [asyncio.ensure_future(self._exchange(endpoint, path, write, media))]
        other = None
        try:
            await asyncio.wait(tasks, timeout=self.config.hedge_s)
            if not tasks[0].done() and (other := self.pool.spare(endpoint)):
                TRAFFIC["hedges"] += 1
                ids = () if other is endpoint else media  # there the slow one carries the media that ids would name
                tasks.append(asyncio.ensure_future(self._exchange(other, path, write, ids)))
            return await _first_good(tasks)
        finally:
            for task in tasks:
                task.cancel()
            if other is not None:
                self.pool.release(other)

    async def _exchange(self, endpoint: Endpoint, path: str, write: Write, media: Sequence[str]) -> tuple[str, bytes]:
        """One request to an endpoint whose slot is taken: (its address, the payload of a 200)."""
        session = self.thread.session()
        try:
            if self.openai:
                await endpoint.describe(session, self.config.timeout_s)
            status, payload, pause = await self._deliver(session, endpoint, path, write, media)
        except asyncio.TimeoutError as error:
            self.pool.suspect(session, endpoint)
            raise _Retry(f"{endpoint.url} did not answer within {self.config.timeout_s:g} s") from error
        except TRANSPORT_ERRORS as error:
            await self.pool.eject(session, endpoint, describe_error(error))
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        except aiohttp.ClientError as error:
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        if status >= 500:
            self.pool.suspect(session, endpoint)
        if status == 429 or status >= 500:
            raise _Retry(f"{endpoint.url} answered {status}: {message_of(payload)}", pause)
        if status != 200:
            raise _Refused(f"{endpoint.url} refused with {status}: {message_of(payload)}")
        return endpoint.url, payload

    async def _deliver(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, path: str, write: Write, media: Sequence[str]
    ) -> tuple[int, bytes, float]:
        """Post with ids where the server has the media; once more with all data if it turns out that it has not."""
        if not endpoint.uses_ids or not media:
            return await self._post(session, endpoint, path, write(endpoint, None))
        carried = await endpoint.claim(media)
        success = False
        try:
            reply = await self._post(session, endpoint, path, write(endpoint, carried))
            if lean := len(carried) < len(set(media)):
                missed = reply[0] == 400 and any(text in reply[1].decode("utf-8", "replace") for text in _MISS)
                endpoint.lean_request(missed)
                if missed or (lean and reply[0] == 500):
                    reply = await self._post(session, endpoint, path, write(endpoint, set(media)))
            success = reply[0] == 200
            return reply
        finally:
            endpoint.settle(carried, success)

    async def _post(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, path: str, body: bytes
    ) -> tuple[int, bytes, float]:
        """(status, body, seconds of Retry-After) of one request."""
        url, timeout = endpoint.url + path, aiohttp.ClientTimeout(total=self.config.timeout_s)
        async with session.post(url, data=body, headers=endpoint.headers, timeout=timeout) as reply:
            return reply.status, await reply.read(), _retry_after(reply.headers.get("Retry-After"))


async def _first_good(tasks: Sequence[asyncio.Future[tuple[str, bytes]]]) -> tuple[str, bytes]:
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
    except (TypeError, ValueError, OverflowError):
        return 0.0
