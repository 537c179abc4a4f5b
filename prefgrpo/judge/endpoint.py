"""One judge server as the client sees it, and the pool that picks one.

An endpoint is ejected on a connection error and comes back when its /health answers; which media it holds is
forgotten then. One that answers, but with failures, stands back while another one answers well, and is tried again with
one request at a time. A server has a medium once it has read the request that carries it, long before it answers: the
others that show it go after the answer or `grace_s`, whichever is first, and once more with data if that was too soon.
Invariants: a medium's first request carries its data and the others name it; nobody waits for a request that started
later, so waits cannot form a ring. Everything runs on the client's event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp

_KNOWN_MEDIA = 8192
_MIN_MISSES = 16
_GRACE_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_PROBE_LONGEST_S = 2.0
_REST_S, _LONGEST_REST_S = 0.5, 30.0
_MOST_BYTES = 16 << 20
_IDLE_S = 5.0
"""A server may have been restarted with another model in a pause of this length: it is asked what it serves."""
TRANSPORT_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, OSError)


class NoEndpoint(RuntimeError):
    """No endpoint has been alive for the client's patience."""


class TooLong(aiohttp.ClientError):
    """An answer that goes on and on."""


async def read_body(reply: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises TooLong for more than 16 MiB, which no answer to a question has."""
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise TooLong(f"it sent more than {_MOST_BYTES >> 20} MiB; is that the right server?")
    return bytes(body)


class Endpoint:
    """State of one server."""

    def __init__(self, url: str, media_ids: str, headers: dict[str, str], model: str = "") -> None:
        """`model`: the one that is asked, where the server may have several (`judge route`)."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers, self.model = headers, model
        self.load = 0
        self.strikes, self._rests_until = 0, 0.0
        self.alive = True
        self.trouble = ""
        self.refused = ""
        self.models: list[str] | None = None
        self.roots: dict[str, str] = {}
        self.root = ""
        self.idle_since = math.inf
        self.vllm = False
        self._media_ids = media_ids
        self._ids_off = media_ids == "off"
        self._known: OrderedDict[str, None] = OrderedDict()
        self._pending: dict[str, asyncio.Event] = {}
        self.grace_s = _GRACE_S
        self._misses = self._lean = 0
        self.probe: asyncio.Task[None] | None = None
        self._describing: asyncio.Task[None] | None = None

    async def describe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Learn what it serves and whether it is vLLM: once, and again after it came back or has been idle.

        A server that is restarted while nothing is asked fails no request. Who asks while somebody else does waits for
        the same reply, and shares its failure.
        """
        rested, self.idle_since = time.monotonic() - self.idle_since > _IDLE_S, math.inf
        if self.models is None or rested or (self._describing is not None and not self._describing.done()):
            if self._describing is None or self._describing.done():
                self._describing = asyncio.create_task(self._describe(session, timeout_s))
                self._describing.add_done_callback(lambda t: t.cancelled() or t.exception())  # who asked may be gone
            await asyncio.shield(self._describing)

    async def _describe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self.url}/v1/models"
        async with session.get(url, headers=self.headers, timeout=timeout, allow_redirects=False) as reply:
            raw = await read_body(reply) if reply.status == 200 else b""
        self.refused = "" if reply.status == 200 else f"/v1/models answered {reply.status}{redirect(reply)}"
        if reply.status >= 500:
            return  # it may know better when it is asked again
        try:
            value: Any = json.loads(raw or b"{}")
        except (ValueError, RecursionError):
            value = {}  # no OpenAI server; the first request or the check will say so
        rows = value.get("data") if isinstance(value, dict) else None
        rows = [r for r in rows if isinstance(r, dict) and r.get("id")] if isinstance(rows, list) else []
        self.vllm = any(r.get("owned_by") == "vllm" for r in rows)
        self.models = [str(r["id"]) for r in rows]
        self.roots = {str(r["id"]): str(r.get("root") or "") for r in rows}

    @property
    def uses_ids(self) -> bool:
        """Send ids instead of data for media that the server knows."""
        return not self._ids_off and (self.vllm or self._media_ids == "on")

    def carried(self, uuids: Collection[str]) -> dict[str, asyncio.Event]:
        """Which of the media another request is carrying just now, with what tells when they may be named."""
        return {u: e for u in uuids if (e := self._pending.get(u)) and not e.is_set()}

    async def claim(self, uuids: Sequence[str]) -> set[str]:
        """Which of the media this request must carry with data; waits until the others are known.

        What is unknown is claimed at once; then whatever earlier requests carry is awaited. `settle` must follow.
        """
        earlier = self.carried(uuids)
        mine = {u for u in uuids if u not in self._known and u not in self._pending}
        events = {u: asyncio.Event() for u in mine}
        self._pending |= events
        try:
            for event in earlier.values():
                await event.wait()
        except asyncio.CancelledError:
            self.settle(mine, False)
            raise
        for event in events.values():
            asyncio.get_running_loop().call_later(self.grace_s, event.set)
        # a carrier that failed is not waited for again
        return mine | {u for u in earlier if u not in self._known and u not in self._pending}

    def given(self, uuids: Collection[str], claimed: set[str]) -> float:
        """Seconds of grace that a request gives to media which it names while others carry them; 0 if to none."""
        return self.grace_s if any(u in self._pending and u not in claimed for u in uuids) else 0.0

    def settle(self, claimed: set[str], success: bool) -> None:
        """The request that carried `claimed` has ended; lets those go on that wait for it."""
        for uuid in claimed:
            if success:
                self._known[uuid] = None
                self._known.move_to_end(uuid)
            if event := self._pending.pop(uuid, None):
                event.set()
        while len(self._known) > _KNOWN_MEDIA:
            self._known.popitem(last=False)

    def lean_request(self, missed: bool, grace_s: float) -> None:
        """Count a request that relied on ids; many misses (several API processes behind one port) switch ids off.

        grace_s: what it had given to a medium that was still on its way, 0 if none was; a miss then asks for more.
        """
        if missed and grace_s:
            self.grace_s = max(self.grace_s, 2 * grace_s)
            return
        self._lean += 1
        self._misses += missed
        if self._media_ids != "on" and self._misses >= _MIN_MISSES and self._misses > 0.2 * self._lean:
            self._ids_off = True

    def strike(self, seconds: float = 0.0) -> None:
        """A request failed here: rest for `seconds`, or longer each time that a trial after a rest fails too."""
        if (now := time.monotonic()) >= self._rests_until:  # what was in flight together fails together
            self.strikes += 1
            rest = min(_REST_S * 2 ** min(self.strikes - 1, 10), _LONGEST_REST_S)
            self._rests_until = now + max(rest, seconds)

    @property
    def trial(self) -> bool:
        """Whether it may be tried again with a request."""
        return not self.load and time.monotonic() >= self._rests_until

    def forget(self) -> None:
        """The server may have restarted: it knows no media, and may serve another model."""
        self._known.clear()
        self.models = None

    def close(self) -> None:
        """Stop probing."""
        if self.probe:
            self.probe.cancel()


class Pool:
    """Picks the least loaded living endpoint; at most `concurrency` requests at a time on each."""

    def __init__(self, endpoints: list[Endpoint], concurrency: int, patience_s: float) -> None:
        self.endpoints, self.concurrency, self.patience_s = endpoints, concurrency, patience_s
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._dead_since: float | None = None

    async def acquire(self, turn: int, slow: Endpoint | None = None) -> Endpoint:
        """An endpoint with a free slot, low turns first; NoEndpoint when none has been alive for `patience_s`.

        slow: taken only if it is the only one with a free slot.
        """
        woken = False
        while True:
            free = self._free()
            if free and (woken or not self._queue or turn < self._queue[0][0]):
                chosen = min(free, key=lambda e: (e is slow, e.load))
                chosen.load += 1
                return chosen
            wake = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (turn, next(self._arrivals), wake))
            if free:
                self._wake()  # whoever is first takes it
            try:
                await self._wait(wake)
            except asyncio.CancelledError:
                if wake.done() and not wake.cancelled():
                    self._wake()  # it was meant for somebody who still waits
                raise
            woken = wake.done() and not wake.cancelled()

    def spare(self, busy: Endpoint) -> Endpoint | None:
        """A slot for a second request beside one at `busy`, elsewhere if anything else lives; None if all is full."""
        free = self._free()
        others = [e for e in free if e is not busy] or free
        chosen = min(others, key=lambda e: e.load, default=None)
        if chosen is not None:
            chosen.load += 1
        return chosen

    def well(self, besides: Endpoint | None = None) -> list[Endpoint]:
        """Living endpoints whose last request did not fail."""
        return [e for e in self.endpoints if e.alive and not e.strikes and e is not besides]

    def _free(self) -> list[Endpoint]:
        """Who takes a request now: who is well, and who has rested, one request at a time; anybody if nobody is."""
        alive = [e for e in self.endpoints if e.alive and e.load < self.concurrency]
        return [e for e in alive if not e.strikes or e.trial] if self.well() else alive

    def strike(self, endpoint: Endpoint, seconds: float = 0.0) -> None:
        """A request failed at the endpoint."""
        endpoint.strike(seconds)
        self._wake_all()  # if nobody is well now, anybody will do

    async def _wait(self, wake: asyncio.Future[None]) -> None:
        """Wait to be woken; while every endpoint is dead only until the patience is over."""
        if any(e.alive for e in self.endpoints):
            await wake
            return
        left = (self._dead_since or time.monotonic()) + self.patience_s - time.monotonic()
        if left <= 0:
            seen = "; ".join(f"{e.url}: {e.trouble}" for e in self.endpoints)
            raise NoEndpoint(f"no server was reachable for {self.patience_s:g} s ({seen})")
        try:
            await asyncio.wait_for(wake, left)
        except asyncio.TimeoutError:
            return

    def release(self, endpoint: Endpoint) -> None:
        """Give the slot back."""
        endpoint.load -= 1
        if not endpoint.load:
            endpoint.idle_since = time.monotonic()
        self._wake()

    def _wake(self) -> bool:
        """Wake the one of those who wait whose turn is lowest; False if nobody waits."""
        while self._queue:
            wake = heapq.heappop(self._queue)[2]
            if not wake.done():
                wake.set_result(None)
                return True
        return False

    async def eject(self, session: aiohttp.ClientSession, endpoint: Endpoint, trouble: str) -> None:
        """Send nothing more to this endpoint until its health probe succeeds."""
        endpoint.trouble = trouble
        endpoint.alive = False
        if self._dead_since is None and not any(e.alive for e in self.endpoints):
            self._dead_since = time.monotonic()
        self.suspect(session, endpoint)
        self._wake_all()  # those who wait for a slot there now wait for its return, with patience

    def suspect(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """Probe an endpoint in the background (one probe at a time)."""
        if endpoint.probe is None or endpoint.probe.done():
            endpoint.probe = asyncio.create_task(self._probe(session, endpoint))

    async def _probe(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """Ask /health until it answers; a failed answer of a living endpoint ejects it."""
        pause = 0.1
        while trouble := await health(session, endpoint):
            if endpoint.alive:
                await self.eject(session, endpoint, trouble)
            endpoint.trouble = trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PROBE_LONGEST_S)
        if not endpoint.alive:
            endpoint.forget()
            endpoint.alive = True
            self._dead_since = None
            self._wake_all()

    def _wake_all(self) -> None:
        while self._wake():
            pass


async def health(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    """'' if the server answers /health with anything below 500 (not every server has it), else what is wrong."""
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    url = f"{endpoint.url}/health" + (f"?{urlencode({'model': endpoint.model})}" if endpoint.model else "")
    try:
        async with session.get(url, headers=endpoint.headers, timeout=timeout, allow_redirects=False) as reply:
            return "" if reply.status < 500 else f"/health says {reply.status}"
    except asyncio.TimeoutError:
        return f"/health did not answer within {_PROBE_TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return describe_error(error)


def checkpoint_name(root: str) -> str:
    """Name of the checkpoint at a `root` of /v1/models: the last part of its path or hub id.

    Servers of one judge may keep it in different folders, one of them in the hub's cache (models--OWNER--NAME).
    """
    parts = root.rstrip("/").split("/")
    cached = next((p for p in parts if p.startswith("models--")), "")
    return (cached.rpartition("--")[2] or parts[-1]).casefold()


def redirect(reply: aiohttp.ClientResponse) -> str:
    """Where a server sends those who ask it, in words; a redirect is not followed: a POST would become a GET."""
    to = reply.headers.get("Location", "") if 300 <= reply.status < 400 else ""
    return f", a redirect to {to[:200]}; correct the address" if to else ""


def describe_error(error: BaseException) -> str:
    """An exception in a few words, never empty; for the usual mistakes with what to do."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"its TLS certificate is not trusted ({error.certificate_error}); set SSL_CERT_FILE to the authority's "
            "certificate, or use the http:// address"
        )
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS there ({error.strerror or error}); is it an http:// address?"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name '{error.host}' does not resolve ({error.strerror or error}); correct the address"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
