"""One judge server as the client sees it, and the pool that picks one.

A server that cannot be reached is ejected until its /health answers. One that answers, but with failures, rests while
another one answers well, and is tried again with one request at a time. Everything runs on the client's event loop.
"""

from __future__ import annotations

import asyncio
import difflib
import heapq
import json
import math
import os
import time
from typing import Any

import aiohttp

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.body import MediaIds
from prefgrpo.judge.loop import loop_thread

_PROBE_TIMEOUT_S = 5.0
_LONGEST_PROBE_PAUSE_S = 2.0
_REST_S, _LONGEST_REST_S = 0.5, 30.0
_IDLE_S = 5.0
"""A server may have been restarted with another model in a pause of this length: it is asked what it serves."""


class SendError(RuntimeError):
    """A request that no repetition got answered; the message says why."""

    def __init__(self, reason: str, retries: int = 0) -> None:
        super().__init__(reason)
        self.retries = retries


class Endpoint:
    """State of one server."""

    def __init__(self, url: str, config: JudgeConfig) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key_env = config.api_key_env
        self.headers = {"Content-Type": "application/json"}
        if self.key_env:
            self.headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        self.load = 0
        self.alive = True
        self.problem = ""
        """Why it cannot be used; '' if it can."""
        self.strikes, self.rests_until = 0, 0.0
        self.models: list[str] | None = None
        """Names that it serves; None: not known yet."""
        self.roots: dict[str, str] = {}
        """Checkpoint of each model, as far as the server says."""
        self.root = ""
        self.vllm = False
        self.refusal = ""
        """What /v1/models answered instead of a list."""
        self.idle_since = math.inf
        self.ids = MediaIds(config.media_ids)
        self.probe: asyncio.Task[None] | None = None
        self._describing: asyncio.Task[None] | None = None

    @property
    def uses_ids(self) -> bool:
        """Whether requests name media that the server knows."""
        return self.ids.used(self.vllm)

    async def get(self, path: str, timeout_s: float) -> tuple[aiohttp.ClientResponse, bytes]:
        """What it answers to a GET."""
        session, timeout = loop_thread().session(), aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(self.url + path, headers=self.headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await reply.read()

    async def describe(self, timeout_s: float) -> None:
        """Learn what it serves and whether it is vLLM: once, and again after it came back or has been idle.

        Requests that need this while another one asks wait for the same reply, and share its failure.
        """
        idle, self.idle_since = time.monotonic() - self.idle_since > _IDLE_S, math.inf
        if self._describing is None or self._describing.done():
            if self.models is not None and not idle:
                return
            self._describing = asyncio.create_task(self._describe(timeout_s))
        await asyncio.shield(self._describing)

    async def _describe(self, timeout_s: float) -> None:
        reply, raw = await self.get("/v1/models", timeout_s)
        self.refusal = "" if reply.status == 200 else f"/v1/models answered {reply.status}{redirect(reply)}"
        if reply.status in (401, 403):
            self.refusal += "; give the name of the environment variable with its key as api_key_env"
            self.refusal += f" (now {self.key_env})" if self.key_env else ""
        if reply.status >= 500:
            return  # still loading, or overloaded: it is asked again
        try:
            value: Any = json.loads(raw) if reply.status == 200 else {}
            rows = [r for r in value["data"] if r.get("id")]
        except (ValueError, LookupError, TypeError, AttributeError):
            rows = []  # no OpenAI-compatible server
        self.vllm = any(r.get("owned_by") == "vllm" for r in rows)
        self.roots = {str(r["id"]): str(r.get("root") or "") for r in rows}
        self.models = list(self.roots)

    def model_problem(self, model: str) -> str:
        """Why it cannot answer as `model` (empty: as the only one that it serves); '' if it can."""
        served = self.models or []
        if not served:
            refusal = self.refusal or "/v1/models is empty"
            return f"lists no model ({refusal}); expected an OpenAI-compatible chat server"
        if model in served or (not model and len(served) == 1):
            return ""
        if not model:
            return f"serves several models ({', '.join(served)}); set the judge's model to one of them"
        near = difflib.get_close_matches(model, served, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "set the judge's model to a served name"
        return f"serves {', '.join(served)}, not '{model}'; {hint}"

    async def health(self) -> str:
        """'' if it answers /health with anything below 500 (not every server has it), else what is wrong."""
        try:
            reply, _ = await self.get("/health", _PROBE_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"/health did not answer within {_PROBE_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return describe_error(error)
        return "" if reply.status < 500 else f"/health answered {reply.status}"

    def forget(self) -> None:
        """The server may have restarted: it knows no media, and may serve another model."""
        self.ids.known.clear()
        self.models = None


class Pool:
    """Picks the least loaded living endpoint; at most `concurrency` requests at a time on each."""

    def __init__(self, endpoints: list[Endpoint], concurrency: int, patience_s: float) -> None:
        self.endpoints, self.concurrency, self.patience_s = endpoints, concurrency, patience_s
        self._queue: list[tuple[int, asyncio.Future[Endpoint], Endpoint | None]] = []
        self._patience: asyncio.TimerHandle | None = None
        self._unreachable = ""

    async def acquire(self, turn: int, slow: Endpoint | None = None) -> Endpoint:
        """An endpoint with a free slot, low turns first; SendError when none has been alive for `patience_s`.

        turn: a number of its own. slow: taken only if it is the only one with a free slot.
        """
        if self._unreachable:
            raise SendError(self._unreachable)
        slot: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (turn, slot, slow))
        self._hand_out()
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(slot.result())
            raise

    def spare(self, busy: Endpoint) -> Endpoint | None:
        """A slot for a second request beside one at `busy`, elsewhere if anything else lives; None if all is full."""
        free = self._free()
        chosen = min([e for e in free if e is not busy] or free, key=lambda e: e.load, default=None)
        if chosen is not None:
            chosen.load += 1
        return chosen

    def release(self, endpoint: Endpoint) -> None:
        """Give a slot back."""
        endpoint.load -= 1
        if not endpoint.load:
            endpoint.idle_since = time.monotonic()
        self._hand_out()

    def well(self, besides: Endpoint | None = None) -> list[Endpoint]:
        """Living endpoints whose last request did not fail."""
        return [e for e in self.endpoints if e.alive and not e.strikes and e is not besides]

    def _free(self) -> list[Endpoint]:
        """Endpoints that take a request now: those that are well or have rested; all living ones if none is well."""
        alive = [e for e in self.endpoints if e.alive and e.load < self.concurrency]
        now = time.monotonic()
        return [e for e in alive if not e.strikes or (not e.load and now >= e.rests_until)] if self.well() else alive

    def _hand_out(self) -> None:
        """Give free slots to those that wait."""
        while self._queue and (free := self._free()):
            _, slot, slow = heapq.heappop(self._queue)
            if not slot.done():
                chosen = min(free, key=lambda e: (e is slow, e.load))
                chosen.load += 1
                slot.set_result(chosen)

    def strike(self, endpoint: Endpoint, seconds: float = 0.0) -> None:
        """A request failed there: it rests for `seconds`, or longer each time that a trial after a rest fails too."""
        if (now := time.monotonic()) >= endpoint.rests_until:  # what was in flight together fails together
            endpoint.strikes += 1
            rest = min(_REST_S * 2 ** min(endpoint.strikes - 1, 10), _LONGEST_REST_S)
            endpoint.rests_until = now + max(rest, seconds)
        self._hand_out()  # if none is well now, any will do

    def eject(self, endpoint: Endpoint, problem: str) -> None:
        """Send nothing more to this endpoint until its health probe succeeds."""
        endpoint.alive, endpoint.problem = False, problem
        if self._patience is None and not any(e.alive for e in self.endpoints):
            self._patience = asyncio.get_running_loop().call_later(self.patience_s, self._give_up)
        self.suspect(endpoint)

    def _give_up(self) -> None:
        seen = "; ".join(f"{e.url}: {e.problem}" for e in self.endpoints)
        self._unreachable = f"no server was reachable for {self.patience_s:g} s ({seen})"
        for _, slot, _ in self._queue:
            if not slot.done():
                slot.set_exception(SendError(self._unreachable))
        self._queue.clear()

    def suspect(self, endpoint: Endpoint) -> None:
        """Probe an endpoint in the background (one probe at a time)."""
        if endpoint.probe is None or endpoint.probe.done():
            endpoint.probe = asyncio.create_task(self._probe(endpoint))

    async def _probe(self, endpoint: Endpoint) -> None:
        """Ask /health until it answers; a living endpoint that fails to is ejected."""
        pause = 0.1
        while problem := await endpoint.health():
            self.eject(endpoint, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PROBE_PAUSE_S)
        if not endpoint.alive:
            endpoint.forget()
            endpoint.alive, endpoint.problem = True, ""
            if self._patience is not None:
                self._patience.cancel()
            self._patience, self._unreachable = None, ""
            self._hand_out()

    def close(self) -> None:
        """Stop probing."""
        for endpoint in self.endpoints:
            if endpoint.probe:
                endpoint.probe.cancel()


def checkpoint_name(root: str) -> str:
    """Name of the checkpoint at a `root` of /v1/models: the last part of its path or hub id.

    Servers of one judge may keep it in different folders, one of them in the hub's cache (models--OWNER--NAME).
    """
    parts = root.rstrip("/").split("/")
    cached = next((p for p in parts if p.startswith("models--")), "")
    return (cached.rpartition("--")[2] or parts[-1]).casefold()


def redirect(reply: aiohttp.ClientResponse) -> str:
    """Where a server redirects to, in words; a redirect is not followed, because a POST would become a GET."""
    to = reply.headers.get("Location", "") if 300 <= reply.status < 400 else ""
    return f", a redirect to {to[:200]}; correct the address" if to else ""


def describe_error(error: BaseException) -> str:
    """An exception in a few words, never empty; for the usual mistakes with what to do."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return (
                f"its TLS certificate is not trusted ({error.certificate_error}); set SSL_CERT_FILE to the "
                "authority's certificate, or use the http:// address"
            )
        case aiohttp.ClientConnectorSSLError():
            return f"it does not speak TLS ({error.strerror or error}); is it an http:// address?"
        case aiohttp.ClientConnectorDNSError():
            return f"the name '{error.host}' does not resolve ({error.strerror or error}); correct the address"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
