"""The client's view of one judge server, and the pool that picks a server for each request.

An unreachable server is ejected until its /health responds. A server that responds with failures is paused while
another one is healthy, then probed with single requests. Everything runs on the client's event loop.
"""

from __future__ import annotations

import asyncio
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
from prefgrpo.judge.verdict import did_you_mean

_PROBE_TIMEOUT_S = 5.0
_LONGEST_PROBE_PAUSE_S = 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_IDLE_S = 5.0
"""After this long without requests, /v1/models is queried again: the server may have restarted with another model."""


class SendError(RuntimeError):
    """A request that failed even after retries; the message says why."""

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
        """Why the server cannot be used; '' if it can."""
        self.failures, self.paused_until = 0, 0.0
        self.models: list[str] | None = None
        """Names of the served models; None: not known yet."""
        self.roots: dict[str, str] = {}
        """Checkpoint path of each model, if the server reports it."""
        self.root = ""
        self.vllm = False
        self.refusal = ""
        """How /v1/models failed to return a list."""
        self.idle_since = math.inf
        self.ids = MediaIds(config.media_ids)
        self.probe: asyncio.Task[None] | None = None
        self._describing: asyncio.Task[None] | None = None

    @property
    def uses_ids(self) -> bool:
        """Whether requests refer by id to media that the server already has."""
        return self.ids.enabled(self.vllm)

    async def get(self, path: str, timeout_s: float) -> tuple[aiohttp.ClientResponse, bytes]:
        """(response, body) of a GET."""
        session, timeout = loop_thread().session(), aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(self.url + path, headers=self.headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await reply.read()

    async def describe(self, timeout_s: float) -> None:
        """Find out which models it serves and whether it is vLLM: once, and again after a recovery or an idle period.

        Concurrent callers share one query and its failure.
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
            return  # still loading, or overloaded: ask again later
        try:
            value: Any = json.loads(raw) if reply.status == 200 else {}
            rows = [r for r in value["data"] if r.get("id")]
        except (ValueError, LookupError, TypeError, AttributeError):
            rows = []  # not an OpenAI-compatible server
        self.vllm = any(r.get("owned_by") == "vllm" for r in rows)
        self.roots = {str(r["id"]): str(r.get("root") or "") for r in rows}
        self.models = list(self.roots)

    def model_problem(self, model: str) -> str:
        """Why the server cannot serve `model` ('': its only model); '' if it can."""
        served = self.models or []
        if not served:
            refusal = self.refusal or "/v1/models is empty"
            return f"lists no model ({refusal}); expected an OpenAI-compatible chat server"
        if model in served or (not model and len(served) == 1):
            return ""
        if not model:
            return f"serves several models ({', '.join(served)}); set the judge's model to one of them"
        hint = did_you_mean(model, served)
        return f"serves {', '.join(served)}, not '{model}'{hint}; set the judge's model to a served name"

    async def health(self) -> str:
        """'' if /health returns a status below 500 (not every server implements it), else what is wrong."""
        try:
            reply, _ = await self.get("/health", _PROBE_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"/health did not answer within {_PROBE_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return describe_error(error)
        return "" if reply.status < 500 else f"/health answered {reply.status}"

    def reset(self) -> None:
        """Forget its media and models: the server may have restarted."""
        self.ids.known.clear()
        self.models = None


class Pool:
    """Picks the least loaded live endpoint, with at most `concurrency` requests in flight on each."""

    def __init__(self, endpoints: list[Endpoint], concurrency: int, patience_s: float) -> None:
        self.endpoints, self.concurrency, self.patience_s = endpoints, concurrency, patience_s
        self._queue: list[tuple[int, asyncio.Future[Endpoint], Endpoint | None]] = []
        self._patience: asyncio.TimerHandle | None = None
        self._unreachable = ""

    async def acquire(self, turn: int, slow: Endpoint | None = None) -> Endpoint:
        """Wait for an endpoint with a free slot, lowest `turn` first; SendError if none was alive for `patience_s`.

        turn: unique per request. slow: an endpoint to use only if no other has a free slot.
        """
        if self._unreachable:
            raise SendError(self._unreachable)
        slot: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (turn, slot, slow))
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
            _, slot, slow = heapq.heappop(self._queue)
            if not slot.done():
                chosen = min(free, key=lambda e: (e is slow, e.load))
                chosen.load += 1
                slot.set_result(chosen)

    def pause(self, endpoint: Endpoint, seconds: float = 0.0) -> None:
        """Pause an endpoint after a failed request: for at least `seconds`, longer with each failure after a pause."""
        if (now := time.monotonic()) >= endpoint.paused_until:  # concurrent failures count once
            endpoint.failures += 1
            pause = min(_PAUSE_S * 2 ** min(endpoint.failures - 1, 10), _LONGEST_PAUSE_S)
            endpoint.paused_until = now + max(pause, seconds)
        self._assign_slots()  # if none is healthy now, any endpoint is used

    def eject(self, endpoint: Endpoint, problem: str) -> None:
        """Send nothing more to this endpoint until its health probe succeeds."""
        endpoint.alive, endpoint.problem = False, problem
        if self._patience is None and not any(e.alive for e in self.endpoints):
            self._patience = asyncio.get_running_loop().call_later(self.patience_s, self._fail_waiting)
        self.start_probe(endpoint)

    def _fail_waiting(self) -> None:
        seen = "; ".join(f"{e.url}: {e.problem}" for e in self.endpoints)
        self._unreachable = f"no server was reachable for {self.patience_s:g} s ({seen})"
        for _, slot, _ in self._queue:
            if not slot.done():
                slot.set_exception(SendError(self._unreachable))
        self._queue.clear()

    def start_probe(self, endpoint: Endpoint) -> None:
        """Probe an endpoint in the background (one probe at a time)."""
        if endpoint.probe is None or endpoint.probe.done():
            endpoint.probe = asyncio.create_task(self._probe(endpoint))

    async def _probe(self, endpoint: Endpoint) -> None:
        """Poll /health until it responds; eject the endpoint in the meantime."""
        pause = 0.1
        while problem := await endpoint.health():
            self.eject(endpoint, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PROBE_PAUSE_S)
        if not endpoint.alive:
            endpoint.reset()
            endpoint.alive, endpoint.problem = True, ""
            if self._patience is not None:
                self._patience.cancel()
            self._patience, self._unreachable = None, ""
            self._assign_slots()

    def close(self) -> None:
        """Stop probing."""
        for endpoint in self.endpoints:
            if endpoint.probe:
                endpoint.probe.cancel()


def checkpoint_name(root: str) -> str:
    """Name of the checkpoint from the `root` field of /v1/models: the last part of its path or hub id.

    Servers of one judge may hold it in different folders, including the hub's cache (models--OWNER--NAME).
    """
    parts = root.rstrip("/").split("/")
    cached = next((p for p in parts if p.startswith("models--")), "")
    return (cached.rpartition("--")[2] or parts[-1]).casefold()


def redirect(reply: aiohttp.ClientResponse) -> str:
    """Describe a redirect for an error message. Redirects are not followed, because a POST would become a GET."""
    to = reply.headers.get("Location", "") if 300 <= reply.status < 400 else ""
    return f", a redirect to {to[:200]}; correct the address" if to else ""


def describe_error(error: BaseException) -> str:
    """A short, non-empty description of an exception; common mistakes come with advice."""
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
