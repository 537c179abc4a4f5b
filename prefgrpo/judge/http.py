"""Requests to several equivalent HTTP servers: slots, retries, and servers that are busy, fail, or come and go.

Requests with the same key (a group's, whose images a server encodes once) prefer one server, while its load is near the
mean; others take the least loaded. A failure is one of these kinds:

    GIVE_UP      no server would take this request (400, 413, 422)
    ELSEWHERE    a refusal, or a reply that is not an answer: tried once more, on another server if possible
    LATE         no answer in time, or 504: tried once more; if others got answers meanwhile, only on another server
    BROKEN       500: tried RETRIES times more
    BUSY         429, 502 or 503: tried again after the pause that the server asks for
    DOWN         no connection, 401 or another 5xx: tried again; the server gets nothing until its check succeeds

BUSY and DOWN are tried again until the pool has had failures and no answer for its patience; DOWN at most twice as
often as BROKEN while others are answered: the request may be what breaks the connection. After a failure a server
rests, longer each time, and then gets single requests while another one is healthy; BROKEN, BUSY and DOWN halve its
concurrency, which grows again by one per round of answers. A process has one event loop and one pool of connections
(`event_loop`). Nothing here is specific to judges. Invariants: every request ends, in bounded time, with a
reply or a reason; a restart, a rate limit or a full queue loses no request.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import json
import os
import random
import re
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from prefgrpo.config.recipe import UserError
from prefgrpo.judge.event_loop import loop_thread

RETRIES = 5
"""Maximum retries of a request that a server answers with 500."""
PATIENCE_S = 600.0
"""How long requests wait for an answer from any server if the configuration sets no limit."""
CHECK_S = 5.0
_CONNECT_S = 30.0
_MAX_BYTES = 16 << 20
_PAUSE_S = 0.25
"""Initial pause of a server after a failure, and initial interval between two checks; both double."""
_LONGEST_REST_S = 20.0
_LONGEST_CHECK_PAUSE_S = 5.0
_LOAD_RATIO = 1.25
_LOAD_MORE = 8
"""A key's preferred server is used, or waited for, while its load is at most _LOAD_RATIO · mean + _LOAD_MORE."""
_LOOK_AHEAD = 256
"""Requests that may be passed over because they wait for their preferred server."""
SAY_S = 30.0
"""How often a wait for servers that start is reported."""
T = TypeVar("T")
Kind = enum.Enum("Kind", "GIVE_UP ELSEWHERE LATE BROKEN BUSY DOWN")
_KINDS = {400: Kind.GIVE_UP, 413: Kind.GIVE_UP, 422: Kind.GIVE_UP, 429: Kind.BUSY, 500: Kind.BROKEN, 503: Kind.BUSY}
_KINDS |= {501: Kind.ELSEWHERE, 502: Kind.BUSY, 504: Kind.LATE, 401: Kind.DOWN}


class JudgeError(UserError, RuntimeError):
    """A judge cannot be used; the message says what was expected, what was found, and what to do."""


class Failure(Exception):
    """A request failed, on one server or, from `HttpPool.send`, even after retries; the message says why."""

    def __init__(self, reason: str, kind: Kind = Kind.ELSEWHERE, pause_s: float = 0.0) -> None:
        """pause_s: the pause that the server asked for."""
        super().__init__(reason)
        self.kind = kind
        self.pause_s = pause_s


class Starting(Exception):
    """Raised by a check: the server is up, but cannot answer yet; the message is the server's."""


class Endpoint:
    """One server; used on the event loop only."""

    def __init__(self, url: str, key: str = "", content_type: str = "application/json") -> None:
        self.url = url.rstrip("/")
        self.proxy = _proxy(url)
        self.headers = {"Content-Type": content_type, "Accept-Encoding": "identity"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.load = 0
        """Requests in flight."""
        self.limit = 1.0
        """Maximum requests in flight."""
        self.problem = ""
        """Why it gets no requests; '' if it does."""
        self.starting = False
        """Whether the last check met a server that is not up yet, rather than one that is wrong."""
        self.failures = 0
        """Failures since its last answer; those during one rest count once."""
        self.last_failure = ""
        self.rests_until = 0.0
        self.check: asyncio.Task[None] | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body) of a GET."""
        reply, payload = await self._request("GET", path, None, CHECK_S)
        return reply.status, payload

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """The payload of the 200 that answers a POST; Failure otherwise."""
        try:
            reply, payload = await self._request("POST", path, body, timeout_s)
        except asyncio.TimeoutError as error:
            raise Failure(f"{self.url} did not answer within {timeout_s:g} s", Kind.LATE) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failure(f"{self.url}: {describe_error(error)}", Kind.DOWN) from error
        if reply.status == 200:
            return payload
        if 300 <= reply.status < 400:  # a POST would be repeated as a GET
            place = reply.headers.get("Location", "")[:200]
            raise Failure(f"{self.url} refused with {reply.status}, a redirect to {place}; correct the address")
        kind = _KINDS.get(reply.status, Kind.DOWN if reply.status >= 500 else Kind.ELSEWHERE)
        verb = "refused with" if kind in (Kind.GIVE_UP, Kind.ELSEWHERE) else "answered"
        raise Failure(f"{self.url} {verb} {reply.status}: {message_of(payload)}", kind, asked_pause_s(reply.headers))

    async def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        session = loop_thread().session()
        how: dict[str, Any] = {"allow_redirects": False, "proxy": self.proxy, "timeout": timeout}
        async with session.request(method, self.url + path, data=body, headers=self.headers, **how) as reply:
            raw = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                raw += chunk
                if len(raw) > _MAX_BYTES:
                    reply.close()
                    most = f"{_MAX_BYTES >> 20} MiB"
                    raise Failure(f"{self.url} sent more than {most}, which is no answer to the request")
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
        key = api_key(key_env)
        self.endpoints = [Endpoint(url, key, content_type) for url in urls]
        for endpoint in self.endpoints:
            endpoint.limit = concurrency
        self.concurrency = concurrency
        self.retries = RETRIES
        self.patience_s = patience_s
        self._check = check
        self._answers: deque[float] = deque(maxlen=10_000)
        """When there were answers, one per 0.1 s."""
        self._failing_since: float | None = None
        """When the first failure since the last answer began; None: there is none."""
        self._waiting: deque[tuple[asyncio.Future[Endpoint], list[Endpoint], Endpoint | None]] = deque()
        """Slots that requests wait for, their preferences, and the server that each avoids, first come first served."""

    async def send(self, attempt: Callable[[Endpoint], Awaitable[T]], key: str = "") -> tuple[T, int]:
        """(result, number of retries) of an attempt on the best server; Failure if all fail.

        attempt: makes the request. Raises Failure, or ValueError for a reply that is not an answer, which may have been
        corrupted in transit. key: requests with the same one prefer the same server; '': the least loaded one.
        """
        idle = not any(e.load for e in self.endpoints) and all(slot.done() for slot, *_ in self._waiting)
        if idle and not all(e.problem for e in self.endpoints):
            self._failing_since = None  # what happened before a pause of the client means nothing
        failures: Counter[Kind] = Counter()
        began = time.monotonic()
        avoid: Endpoint | None = None
        for retries in itertools.count():
            endpoint = await self.acquire(key, avoid)
            sent = time.monotonic()
            try:
                result = await attempt(endpoint)
                self._answered(endpoint)
                return result, retries
            except (Failure, ValueError) as error:
                failure = error if isinstance(error, Failure) else Failure(str(error))
                self._failed(endpoint, failure, sent)
                failures[failure.kind] += 1
                if self._is_final(failure.kind, failures[failure.kind], endpoint, began, sent):
                    given_up = f"gave up after {retries + 1} requests; the last one: " if retries else ""
                    raise Failure(f"{given_up}{failure}") from error
            finally:
                self.release(endpoint)
            avoid = endpoint if failure.kind in (Kind.ELSEWHERE, Kind.LATE) else None
        raise AssertionError("unreachable")

    def _is_final(self, kind: Kind, count: int, endpoint: Endpoint, began: float, sent: float) -> bool:
        """Whether a request is given up after its count-th failure of a kind; its last attempt was sent at `sent`."""
        most = {Kind.GIVE_UP: 1, Kind.ELSEWHERE: 2, Kind.LATE: 2, Kind.BROKEN: self.retries + 1}
        if self._last_answer() > began:  # others are answered
            most[Kind.DOWN] = 2 * (self.retries + 1)
        if count >= most.get(kind, count + 1):
            return True
        if kind in (Kind.ELSEWHERE, Kind.BROKEN):
            return False
        middle = (sent + time.monotonic()) / 2
        if kind is Kind.LATE and any(sent < answered < middle for answered in self._answers):
            return not any(e is not endpoint for e in self._usable())
        if not self._out_of_patience():
            return False
        self._refuse_waiting()
        return True

    def _last_answer(self) -> float:
        return self._answers[-1] if self._answers else 0.0

    def _out_of_patience(self) -> bool:
        return self._failing_since is not None and time.monotonic() >= self._failing_since + self.patience_s

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
            await asyncio.sleep(min(_pause_s(checks, _LONGEST_CHECK_PAUSE_S), wait_s - waited_s))
        raise AssertionError("unreachable")

    async def acquire(self, key: str = "", avoid: Endpoint | None = None) -> Endpoint:
        """A server with a free slot, when there is one; Failure if none is usable.

        key: as in `send`. avoid: a server that is not to be used while there is another.
        """
        for endpoint in self.endpoints:
            if endpoint.check is None or endpoint.problem:
                self._take_out(endpoint, "not checked yet")
        slot: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.append((slot, _preferences(self.endpoints, key), avoid))
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
        skipped: list[tuple[asyncio.Future[Endpoint], list[Endpoint], Endpoint | None]] = []
        while self._waiting and len(skipped) < _LOOK_AHEAD:
            usable = self._usable()
            if all(e.load >= int(e.limit) for e in usable):
                break
            slot, order, avoid = self._waiting.popleft()
            if slot.done():
                continue
            chosen = _choose([e for e in usable if e is not avoid] or usable, order)
            if chosen:
                chosen.load += 1
                slot.set_result(chosen)
            else:
                skipped.append((slot, order, avoid))
        self._waiting.extendleft(reversed(skipped))

    def _usable(self) -> list[Endpoint]:
        """Servers that are up and do not rest; one with failures gets one request at a time while another has none."""
        now = time.monotonic()
        up = [e for e in self.endpoints if not e.problem and now >= e.rests_until]
        if all(e.failures for e in up):
            return up
        return [e for e in up if not e.failures or not e.load]

    def _answered(self, endpoint: Endpoint) -> None:
        endpoint.failures = 0
        endpoint.limit = min(endpoint.limit + 1 / endpoint.limit, self.concurrency)
        self._failing_since = None
        now = time.monotonic()
        if now - self._last_answer() >= 0.1:
            self._answers.append(now)

    def _failed(self, endpoint: Endpoint, failure: Failure, sent: float) -> None:
        """Let a server rest, and check it unless it is only busy. sent: when the failed request was."""
        if failure.kind is Kind.GIVE_UP:
            return
        now = time.monotonic()
        endpoint.last_failure = str(failure)
        if self._failing_since is None:
            self._failing_since = max(sent, self._last_answer()) if failure.kind is Kind.LATE else now
        rest_s = min(failure.pause_s, self.patience_s) * random.uniform(1.0, 1.1)  # not all processes at once
        if now >= endpoint.rests_until:  # concurrent failures count once
            rest_s = rest_s or _pause_s(endpoint.failures, _LONGEST_REST_S)
            endpoint.failures += 1
            if failure.kind in (Kind.BUSY, Kind.DOWN, Kind.BROKEN):
                endpoint.limit = max(endpoint.limit / 2, 1.0)
        endpoint.rests_until = max(endpoint.rests_until, now + rest_s)
        asyncio.get_running_loop().call_later(rest_s + 0.01, self._assign_slots)
        if failure.kind is not Kind.BUSY:
            self._take_out(endpoint, str(failure) if failure.kind is Kind.DOWN else "")

    def _take_out(self, endpoint: Endpoint, problem: str) -> None:
        """Check a server in the background; with a problem it gets no requests until the check succeeds."""
        endpoint.problem = endpoint.problem or problem
        if endpoint.check is None or endpoint.check.done():
            endpoint.check = asyncio.create_task(self._check_until_usable(endpoint))

    async def _check_until_usable(self, endpoint: Endpoint) -> None:
        """Ends when the server is usable, or when no server was for too long: then the waiting requests fail."""
        for checks in itertools.count():
            problem = await self._problem(endpoint)
            if not problem:
                break
            endpoint.problem = problem
            endpoint.last_failure = problem
            now = time.monotonic()
            self._failing_since = now if self._failing_since is None else self._failing_since
            left_s = self._failing_since + self.patience_s - now
            if all(e.problem for e in self.endpoints) and left_s <= 0:
                self._refuse_waiting()
                return
            pause_s = _pause_s(checks, _LONGEST_CHECK_PAUSE_S)
            await asyncio.sleep(min(pause_s, left_s) if left_s > 0 else pause_s)  # requests fail when the patience ends
        if self._out_of_patience():  # a server is back that was given up
            self._failing_since = None
        endpoint.problem = ""
        self._assign_slots()

    def _refuse_waiting(self) -> None:
        """Fail the waiting requests."""
        seen = "; ".join(f"{e.url}: {e.problem or e.last_failure}" for e in self.endpoints)
        for slot, *_ in self._waiting:
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


def api_key(variable: str) -> str:
    """The key in an environment variable, without what surrounds it in a file from Windows, and without `Bearer`, which
    the header has; '' without a variable.

    Raises JudgeError if there is none, or one that no header can carry.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip().strip("\ufeff").strip()
    key = re.sub(r"^bearer(\s+|$)", "", key, flags=re.I)
    if not key:
        raise JudgeError(f"the environment variable {variable} (api_key_env) is not set, or empty")
    if not (key.isascii() and key.isprintable()):
        raise JudgeError(f"the environment variable {variable} (api_key_env): expected one line of ASCII characters")
    return key


def _preferences(endpoints: Sequence[Endpoint], key: str) -> list[Endpoint]:
    """The servers in a key's own order, the same in every process; none without a key."""
    if not key or len(endpoints) == 1:
        return []
    return sorted(endpoints, key=lambda e: hashlib.blake2b(f"{e.url} {key}".encode("utf-8", "replace")).digest())


def _choose(usable: Sequence[Endpoint], order: Sequence[Endpoint]) -> Endpoint | None:
    """The server for a request, of several that are usable; None if the one that it should get has no free slot.

    Rendezvous hashing with bounded loads (Mirrokni et al. 2018): the first in the key's order whose load, as a share of
    its limit, is not far above the mean. Without an order: the least loaded.
    """
    most = _LOAD_RATIO * sum(e.load for e in usable) + _LOAD_MORE * len(usable)
    limits = sum(e.limit for e in usable)
    near = [e for e in order if e in usable and e.load * limits <= most * e.limit]
    free = [e for e in near[:1] or usable if e.load < int(e.limit)]
    return min(free, key=lambda e: e.load / e.limit, default=None)


def _proxy(url: str) -> str | None:
    """The proxy of the environment for an https address outside the cluster; http is taken to be inside."""
    if not url.startswith("https://") or urllib.request.proxy_bypass(urlsplit(url).netloc):
        return None
    return urllib.request.getproxies().get("https")


def asked_pause_s(headers: Mapping[str, str]) -> float:
    """The pause in seconds that a reply asks for: retry-after-ms, or Retry-After as seconds or as a date; else 0."""
    try:
        if "retry-after-ms" in headers:
            return max(float(headers["retry-after-ms"]) / 1000, 0.0)
        asked = headers.get("Retry-After", "0")
        return max(float(asked) if asked[:1].isdecimal() else parsedate_to_datetime(asked).timestamp() - time.time(), 0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _pause_s(failures: int, longest_s: float) -> float:
    """How long to pause after so many failures in a row; different in every process."""
    return min(_PAUSE_S * 2 ** min(failures, 10), longest_s) * random.uniform(0.5, 1.0)


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
