"""Several judge servers behind one port: a request goes to the server of the model that its JSON names.

Answers are passed on as they come, token by token; a client that goes away ends its request at the backend too.
Invariant: what a backend answered arrives unchanged, errors included; what the router itself refuses or could not
deliver is an OpenAI-style error (400, 404, 502, 504) that names the model, or a connection that breaks off.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from prefgrpo.judge.verdict import JudgeError

_LARGEST_BODY = 1 << 30
_HEALTH_S = 5.0
_HOP_HEADERS = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


@dataclass
class Backend:
    """One server and what went through it."""

    url: str
    """Its address, without /v1."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Its entries of /v1/models."""
    in_flight: int = 0
    """Requests that wait for it now."""
    seconds: float = 0.0
    """Time that finished requests took, summed."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by HTTP status, the router's own 502 and 504 included."""

    @property
    def names(self) -> list[str]:
        """Models that it serves."""
        return [str(row["id"]) for row in self.rows]


class Router:
    """Forwards OpenAI requests by model name; `open` before use, `close` after."""

    def __init__(self, backends: list[Backend], timeout_s: float = 600.0, key: str = "") -> None:
        """`timeout_s`: the longest that one request may take; then the client gets a 504.

        `key`: the backends' API key, for asking what they serve; requests carry their client's own.
        """
        self.backends, self.timeout_s = backends, timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.models: dict[str, Backend] = {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Ask every backend what it serves. Raises JudgeError if one does not answer or two serve the same name."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),  # below the servers' 5 s, as in the client
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            auto_decompress=False,
        )
        for backend in self.backends:
            backend.rows = await self._describe(backend)
            for name in backend.names:
                if name in self.models:
                    other = self.models[name].url
                    raise JudgeError(
                        f"'{name}' is served by {other} and by {backend.url}: serve them under different names, or "
                        "give the client both as endpoints of one judge"
                    )
                self.models[name] = backend

    async def close(self) -> None:
        """Close the connections to the backends."""
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pool of connections to the backends."""
        if self._session is None:
            raise RuntimeError("the router is not open")
        return self._session

    async def renew(self, backend: Backend) -> None:
        """Ask a backend again, so that clients see another checkpoint (`root`) under the same name."""
        try:
            rows = await self._describe(backend)
        except JudgeError:
            return  # its requests and /health say what is wrong
        if {row["id"] for row in rows} == set(backend.names):
            backend.rows = rows

    async def _describe(self, backend: Backend) -> list[dict[str, Any]]:
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
            url = f"{backend.url}/v1/models"
            async with self.session.get(url, headers=self._headers, timeout=timeout) as reply:
                reply.raise_for_status()
                value = json.loads(await reply.read())
                rows = [row for row in value["data"] if isinstance(row, dict) and row.get("id")]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            raise JudgeError(
                f"{backend.url}/v1/models gave no list of models ({type(error).__name__}: {error}); expected a running "
                "OpenAI-compatible server: start it with 'prefgrpo judge serve', or correct the address"
            ) from error
        if not rows:
            raise JudgeError(f"{backend.url} serves no model; expected an OpenAI-compatible chat server")
        return rows

    async def trouble(self, backend: Backend) -> str:
        """'' if the backend answers /health, else what is wrong."""
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
            url = f"{backend.url}/health"
            async with self.session.get(url, headers=self._headers, timeout=timeout) as reply:
                return "" if reply.status < 500 else f"/health says {reply.status}"
        except asyncio.TimeoutError:
            return f"/health did not answer within {_HEALTH_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    async def forward(self, backend: Backend, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send the request on and pass the answer back as it comes."""
        start, reply = time.monotonic(), None
        url, headers = f"{backend.url}{request.rel_url.raw_path_qs}", _end_to_end(request.headers)
        backend.in_flight += 1
        try:
            data = io.BytesIO(body)
            async with self.session.request(
                request.method, url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                reply = web.StreamResponse(
                    status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers)
                )
                reply.content_length = answer.content_length
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
            backend.statuses[reply.status] += 1
            return reply
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            refusal = _failed(backend, error, self.timeout_s)
            backend.statuses[refusal.status] += 1
            if reply is None or not reply.prepared:
                return refusal
            if request.transport is not None:
                request.transport.abort()  # half an answer went out: the client must see that the rest is missing
            return reply
        finally:
            backend.seconds += time.monotonic() - start
            backend.in_flight -= 1


_ROUTER = web.AppKey("router", Router)


def _end_to_end(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Headers without those that belong to one connection; a name may come twice."""
    return [(k, v) for k, v in headers.items() if k.lower() not in _HOP_HEADERS]


def application(router: Router) -> web.Application:
    """The HTTP face of a router."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    app[_ROUTER] = router
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/{path:.*}", _proxy)
    return app


async def _models(request: web.Request) -> web.Response:
    router = request.app[_ROUTER]
    await asyncio.gather(*(router.renew(backend) for backend in router.backends))
    rows = [row for backend in router.backends for row in backend.rows]
    return web.json_response({"object": "list", "data": rows})


async def _health(request: web.Request) -> web.Response:
    """200 if all backends are well, else 503 with what is wrong; `?model=NAME` asks for that model's backend alone."""
    router, name = request.app[_ROUTER], request.query.get("model", "")
    if name and name not in router.models:
        return _unknown(router, name)
    asked = {name: router.models[name]} if name else {" ".join(b.names): b for b in router.backends}
    found = await asyncio.gather(*(router.trouble(b) for b in asked.values()))
    degraded = {k: f"{b.url}: {t}" for (k, b), t in zip(asked.items(), found, strict=True) if t}
    body = {"status": "degraded" if degraded else "ok", "degraded": degraded}
    return web.json_response(body, status=503 if degraded else 200)


async def _metrics(request: web.Request) -> web.Response:
    """Prometheus text: requests by status, seconds, in flight, per model."""
    lines: list[str] = []
    for backend in request.app[_ROUTER].backends:
        label = f"model={json.dumps(' '.join(backend.names), ensure_ascii=False)}"
        lines += [f'prefgrpo_router_requests_total{{{label},status="{s}"}} {n}' for s, n in backend.statuses.items()]
        lines.append(f"prefgrpo_router_seconds_total{{{label}}} {backend.seconds:.6f}")
        lines.append(f"prefgrpo_router_in_flight{{{label}}} {backend.in_flight}")
    return web.Response(text="\n".join(sorted(lines)) + "\n")


async def _proxy(request: web.Request) -> web.StreamResponse:
    router, body = request.app[_ROUTER], await request.read()
    try:
        name = json.loads(body)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _error(400, f"expected a JSON object with 'model', one of: {', '.join(router.models)}")
    backend = router.models.get(name) if isinstance(name, str) else None
    return await router.forward(backend, request, body) if backend else _unknown(router, name)


def _unknown(router: Router, name: object) -> web.Response:
    return _error(404, f"The model `{name}` does not exist; served here: {', '.join(router.models)}")


def _failed(backend: Backend, error: BaseException, timeout_s: float) -> web.Response:
    what = f"the server of {', '.join(backend.names)} at {backend.url}"
    if isinstance(error, asyncio.TimeoutError):
        return _error(504, f"{what} did not answer within {timeout_s:g} s")
    return _error(502, f"{what} cannot be reached ({type(error).__name__}: {error}); is it still running?")


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError", 502: "BadGatewayError", 504: "GatewayTimeoutError"}[status]
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
