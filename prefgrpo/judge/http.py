"""Requests to several equivalent HTTP servers: slots, retries, and servers that go down and come back.

Each request goes to the least loaded server. A failure is one of three kinds:

    GIVE_UP      no server would take this request (400, 413, 422)
    ELSEWHERE    too late, a refusal, or a reply that is no answer: tried once more, on another server if possible
    DOWN         no connection, 429 or 5xx: tried again; the server gets nothing until its check succeeds

A server is checked before its first request and after every failure, and rests after failures while another one is
healthy. Nothing here is specific to judges. Invariants: every request ends, in bounded time, with a reply or a reason;
the restart of a server loses no request.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import aiohttp

from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.verdict import JudgeError

RETRIES = 5
"""Most retries of a request."""
PATIENCE_S = 600.0
"""How long requests wait for a usable server if the configuration sets no limit."""
CHECK_S = 5.0
_CONNECT_S = 30.0
_MAX_BYTES = 16 << 20
_PAUSE_S = 0.25
"""First pause before a retry, and first rest of a server whose requests fail; doubles each time."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause or rest, also if the server asks for a longer one."""
_CHECK_PAUSE_S = 0.25
_LONGEST_CHECK_PAUSE_S = 5.0
"""First and longest pause between two checks of a server; many processes check the same one."""
SAY_S = 30.0
"""How often a wait for servers that start is reported."""
T = TypeVar("T")


class Kind(enum.Enum):
    """What a failure says about the request and the server; the value: after how many such failures to give up."""

    GIVE_UP = 1
    ELSEWHERE = 2
    DOWN = 1000


class Failure(Exception):
    """A request failed, on one server or, from `HttpPool.send`, even after retries; the message says why."""

    def __init__(self, reason: str, kind: Kind = Kind.ELSEWHERE, pause_s: float = 0.0) -> None:
        """pause_s: how long the server asked to be left alone."""
        super().__init__(reason)
        self.kind = kind
        self.pause_s = pause_s


class Starting(Exception):
    """Raised by a check: the server is there, but cannot answer yet; the message says what it said."""


class Endpoint:
    """One server; used on the event loop only."""

    def __init__(self, url: str, key_env: str = "", content_type: str = "application/json") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": content_type, "Accept-Encoding": "identity"}
        if key_env:
            self.headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        self.load = 0
        """Requests in flight."""
        self.problem = ""
        """Why it gets no requests; '' if it does."""
        self.down_since = 0.0
        """Since when it has a problem."""
        self.starting = False
        """Whether the last check met a server that is not up yet, rather than one that is wrong."""
        self.failures = 0
        """Failures since its last answer."""
        self.rests_until = 0.0
        self.check: asyncio.Task[None] | None = None

    def set_problem(self, problem: str) -> None:
        """Note why it must not get requests, or '' that it may."""
        if not self.problem:
            self.down_since = time.monotonic()
        self.problem = problem

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body) of a GET."""
        reply, payload = await self._request("GET", path, None, CHECK_S)
        return reply.status, payload

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """The payload of the 200 that answers a POST; Failure otherwise."""
        try:
            reply, payload = await self._request("POST", path, body, timeout_s)
        except aiohttp.ClientError as error:
            raise Failure(f"{self.url}: {describe_error(error)}", Kind.DOWN) from error
        except asyncio.TimeoutError as error:
            raise Failure(f"{self.url} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise Failure(f"{self.url}: {describe_error(error)}", Kind.DOWN) from error
        if reply.status == 200:
            return payload
        if 300 <= reply.status < 400:  # a POST would be repeated as a GET
            place = reply.headers.get("Location", "")[:200]
            raise Failure(f"{self.url} refused with {reply.status}, a redirect to {place}; correct the address")
        down = reply.status == 429 or reply.status >= 500
        reason = f"{self.url} {'answered' if down else 'refused with'} {reply.status}: {message_of(payload)}"
        if reply.status in (400, 413, 422):
            raise Failure(reason, Kind.GIVE_UP)
        if not down or reply.status == 504:
            raise Failure(reason)
        asked = reply.headers.get("Retry-After", "")
        seconds = float(asked) if asked.replace(".", "", 1).isdecimal() else 0.0
        raise Failure(reason, Kind.DOWN, min(seconds, _LONGEST_PAUSE_S))

    async def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        async with (
            loop_thread()
            .session()
            .request(
                method, self.url + path, data=body, headers=self.headers, timeout=timeout, allow_redirects=False
            ) as reply
        ):
            raw = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                raw += chunk
                if len(raw) > _MAX_BYTES:
                    reply.close()
                    raise Failure(
                        f"{self.url} sent more than {_MAX_BYTES >> 20} MiB, which is no answer to the request"
                    )
            return reply, bytes(raw)


Check = Callable[[Endpoint], Awaitable[str]]
"""Why a server must not get requests; '' if it may. Raises Starting if that may be over soon."""


class HttpPool:
    """Sends requests to servers, at most `concurrency` at a time to each; `send` runs on the event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        check: Check,
        *,
        concurrency: int = 64,
        patience_s: float = PATIENCE_S,
        key_env: str = "",
        content_type: str = "application/json",
    ) -> None:
        """patience_s: how long requests wait while no server is usable. key_env: environment variable that holds the
        API key. JudgeError for invalid addresses or a missing key."""
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise JudgeError(f"endpoints must be http:// or https:// addresses, got {list(urls)}")
        if key_env and key_env not in os.environ:
            raise JudgeError(f"the environment variable {key_env} (api_key_env) is not set")
        self.endpoints = [Endpoint(url, key_env, content_type) for url in urls]
        self.concurrency = concurrency
        self.retries = RETRIES
        self.patience_s = patience_s
        self._check = check
        self._waiting: deque[tuple[asyncio.Future[Endpoint], Endpoint | None]] = deque()
        """Slots that requests wait for, and the server that each avoids, first come first served."""

    async def send(self, attempt: Callable[[Endpoint], Awaitable[T]]) -> tuple[T, int]:
        """(result, number of retries) of an attempt on the best server; Failure if all fail.

        attempt: makes the request. Raises Failure, or ValueError for a reply that is no answer, which may have been
        corrupted in transit.
        """
        failures: Counter[Kind] = Counter()
        avoid: Endpoint | None = None
        for retries in itertools.count():
            endpoint = await self.acquire(avoid)
            try:
                result = await attempt(endpoint)
                endpoint.failures = 0
                return result, retries
            except (Failure, ValueError) as error:
                failure = error if isinstance(error, Failure) else Failure(str(error))
                self._failed(endpoint, failure)
                failures[failure.kind] += 1
                if failures[failure.kind] >= failure.kind.value or retries >= self.retries:
                    given_up = f"gave up after {retries + 1} requests; the last one: " if retries else ""
                    raise Failure(f"{given_up}{failure}") from error
            finally:
                self.release(endpoint)
            avoid = endpoint if failure.kind is Kind.ELSEWHERE else None
            await asyncio.sleep(max(failure.pause_s, _pause_s(retries) * random.uniform(0.5, 1.0)))
        raise AssertionError("unreachable")

    async def problems(self) -> list[str]:
        """Check every server now: why each cannot be used, '' if it can."""
        return await asyncio.gather(*(self._problem(endpoint) for endpoint in self.endpoints))

    async def until_usable(self, wait_s: float, say: Callable[[str], object]) -> list[str]:
        """`problems`, as soon as a server can be used or none is starting, or after `wait_s`.

        say: gets a line at once and every SAY_S.
        """
        start = time.monotonic()
        said = 0
        for checks in itertools.count():
            problems = await self.problems()
            waited_s = time.monotonic() - start
            if not all(problems) or not any(e.starting for e in self.endpoints) or waited_s >= wait_s:
                return problems
            if waited_s >= said * SAY_S:
                found = "; ".join(f"{e.url}: {problem}" for e, problem in zip(self.endpoints, problems, strict=True))
                say(f"waiting for a server ({waited_s:.0f} s of at most {wait_s:.0f} s): {found}")
                said += 1
            await asyncio.sleep(min(_check_pause_s(checks), wait_s - waited_s))
        raise AssertionError("unreachable")

    async def acquire(self, avoid: Endpoint | None = None) -> Endpoint:
        """A server with a free slot, when there is one; Failure if none is usable.

        avoid: a server that is not to be used while there is another.
        """
        for endpoint in self.endpoints:
            if endpoint.check is None or endpoint.problem:
                self._take_out(endpoint, "not checked yet")
        slot: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.append((slot, avoid))
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
        self._assign_slots()

    def _assign_slots(self) -> None:
        """Give free slots to waiting requests."""
        skipped = []
        while self._waiting:
            usable = self._usable()
            if all(e.load >= self.concurrency for e in usable):
                break
            slot, avoid = self._waiting.popleft()
            if slot.done():
                continue
            chosen = min([e for e in usable if e is not avoid] or usable, key=lambda e: e.load)
            if chosen.load < self.concurrency:
                chosen.load += 1
                slot.set_result(chosen)
            else:
                skipped.append((slot, avoid))
        self._waiting.extendleft(reversed(skipped))

    def _usable(self) -> list[Endpoint]:
        """Healthy servers and, for one request at a time, rested ones; all that are up if none is healthy."""
        up = [e for e in self.endpoints if not e.problem]
        if all(e.failures for e in up):
            return up
        now = time.monotonic()
        return [e for e in up if not e.failures or (not e.load and now >= e.rests_until)]

    def _failed(self, endpoint: Endpoint, failure: Failure) -> None:
        """Let a server rest, and check it."""
        if failure.kind is Kind.GIVE_UP:
            return
        now = time.monotonic()
        if now >= endpoint.rests_until:  # concurrent failures count once
            endpoint.rests_until = now + max(failure.pause_s, _pause_s(endpoint.failures))
            endpoint.failures += 1
        self._take_out(endpoint, str(failure) if failure.kind is Kind.DOWN else "")

    def _take_out(self, endpoint: Endpoint, problem: str) -> None:
        """Check a server in the background; with a problem it gets no requests until the check succeeds."""
        endpoint.set_problem(endpoint.problem or problem)
        if endpoint.check is None or endpoint.check.done():
            endpoint.check = asyncio.create_task(self._check_until_usable(endpoint))

    async def _check_until_usable(self, endpoint: Endpoint) -> None:
        """Ends when the server is usable, or when no server was for too long: then the waiting requests fail."""
        for checks in itertools.count():
            problem = await self._problem(endpoint)
            if not problem:
                break
            endpoint.set_problem(problem)
            left_s = max(e.down_since for e in self.endpoints) + self.patience_s - time.monotonic()
            if all(e.problem for e in self.endpoints) and left_s <= 0:
                self._refuse_waiting()
                return
            pause_s = _check_pause_s(checks)
            await asyncio.sleep(min(pause_s, left_s) if left_s > 0 else pause_s)  # requests fail when the patience ends
        endpoint.problem = ""
        self._assign_slots()

    def _refuse_waiting(self) -> None:
        """Fail the waiting requests."""
        seen = "; ".join(f"{e.url}: {e.problem}" for e in self.endpoints)
        for slot, _ in self._waiting:
            if not slot.done():
                slot.set_exception(Failure(f"no server was usable for {self.patience_s:g} s ({seen})"))
        self._waiting.clear()

    async def _problem(self, endpoint: Endpoint) -> str:
        endpoint.starting = True
        try:
            problem = await self._check(endpoint)
            endpoint.starting = False
            return problem
        except Starting as error:
            return str(error)
        except asyncio.TimeoutError:
            return f"no answer within {CHECK_S:g} s; is the server still loading, or stuck?"
        except (aiohttp.ClientError, OSError, Failure) as error:
            endpoint.starting = not isinstance(error, aiohttp.ClientSSLError | Failure)
            return f"not reachable ({describe_error(error)})"


def _pause_s(failures: int) -> float:
    """How long to pause after so many failures."""
    return min(_PAUSE_S * 2 ** min(failures, 10), _LONGEST_PAUSE_S)


def _check_pause_s(checks: int) -> float:
    """How long to pause after so many checks in a row; different in every process."""
    return min(_CHECK_PAUSE_S * 2 ** min(checks, 10), _LONGEST_CHECK_PAUSE_S) * random.uniform(0.8, 1.0)


def message_of(payload: bytes) -> str:
    """The server's error message, else the beginning of the payload."""
    try:
        value = json.loads(payload)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError, RecursionError):
        return payload[:200].decode("utf-8", "replace")


def describe_error(error: BaseException) -> str:
    """A short, non-empty description of an exception."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
