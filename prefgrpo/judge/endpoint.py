"""One server: what it serves, whether it is healthy, and one request to it; every failure is one of three kinds.

    GIVE_UP     any server would refuse this request (400, 413, 422)
    ELSEWHERE   this server failed, is slow or sent something else than an answer; another one may do better
    DOWN        it cannot be reached; it gets no requests until its /health answers

Invariant: a request ends within its time limit, with at most MOST_BYTES read, in a parsed reply or a Failure.
"""

from __future__ import annotations

import asyncio
import enum
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import aiohttp

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.body import MediaIds
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.verdict import did_you_mean

MOST_BYTES = 16 << 20
"""Largest reply, after decompression."""
IDS_FROM = (0, 32)
"""First vLLM to which images are sent by id: it recovers if its API process and engine disagree on which they hold
(vLLM pull request 46747); before, such an image could stop the engine. Tested with 0.32."""
_MISS = (b"Cache miss for", b"Failed to apply")
_CONNECT_S = 30.0
"""Timeout of connecting and of /v1/models, neither of which waits for text generation."""
_HEALTH_S = 5.0
_IDLE_S = 5.0
"""After this long without requests, /v1/models is queried again: the server may have restarted with another model."""
_LONGEST_PAUSE_S = 60.0
Write = Callable[[Collection[str] | None], bytes]
"""Media whose data the body must include (None: all of them, without ids) -> body."""
Read = Callable[[str, bytes], Any]
"""(address, payload of a 200) -> parsed reply. Raises ValueError if the payload is not a valid reply."""


class Kind(enum.Enum):
    """What a failure says about the request and the server."""

    GIVE_UP = enum.auto()
    ELSEWHERE = enum.auto()
    DOWN = enum.auto()


class Failure(Exception):
    """A request failed on one server."""

    def __init__(
        self, reason: str, kind: Kind = Kind.ELSEWHERE, most: float = math.inf, alone: float = math.inf
    ) -> None:
        """most: such failures after which a request gives up; alone: the same while no other server is healthy."""
        super().__init__(reason)
        self.kind = kind
        self.most = most
        self.alone = alone
        self.pause_s = 0.0
        """Seconds that the server asked to be left alone."""
        self.probe = False
        """Whether to ask /health if the server is still there."""


@dataclass(frozen=True)
class Job:
    """What to send, and how to parse the reply."""

    path: str
    write: Write
    read: Read
    media: frozenset[str]
    timeout_s: float


class Endpoint:
    """State of one server; used on the event loop only."""

    def __init__(self, url: str, config: JudgeConfig, openai: bool = True) -> None:
        """`openai`: query /v1/models before the first request."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.openai = openai
        self.key_env = config.api_key_env
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"}
        if self.key_env:
            self.headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        self.load = 0
        self.alive = True
        self.problem = ""
        """Why the server cannot be used; '' if it can."""
        self.failures = 0
        self.paused_until = 0.0
        self.models: list[str] | None = None
        """Names of the served models; None: not known yet."""
        self.roots: dict[str, str] = {}
        """Checkpoint path of each model, if the server reports it."""
        self.root = ""
        self.version = ""
        """vLLM's version; '' for other servers."""
        self.refusal = ""
        """How /v1/models failed to return a list."""
        self.idle_since = math.inf
        self.ids = MediaIds()
        self.probe: asyncio.Task[None] | None = None
        self._describing: asyncio.Task[None] | None = None

    @property
    def uses_ids(self) -> bool:
        """Whether requests refer by id to media that the server already has."""
        return self.ids.enabled(takes_ids(self.version))

    async def get(self, path: str, timeout_s: float) -> tuple[aiohttp.ClientResponse, bytes]:
        """(response, body) of a GET."""
        session = loop_thread().session()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(self.url + path, headers=self.headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await read_body(reply)

    async def ask(self, job: Job, check: Callable[[Endpoint], None]) -> Any:
        """The parsed reply; Failure unless the server returns 200 with a valid body.

        check: raises Failure if the server must not be used; called once it has said what it serves.
        """
        asked = "/v1/models"
        limit_s = min(job.timeout_s, _CONNECT_S)
        try:
            if self.openai:
                await self.describe(limit_s)
                check(self)
            asked = ""
            limit_s = job.timeout_s
            reply, payload = await self._post_with_ids(job)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:  # some are TimeoutErrors as well
            raise Failure(f"{self.url}: {describe_error(error)}", Kind.DOWN) from error
        except asyncio.TimeoutError as error:
            slow = Failure(f"{self.url}{asked} did not answer within {limit_s:g} s", most=2)
            slow.probe = True
            raise slow from error
        except aiohttp.ClientError as error:
            raise Failure(f"{self.url}: {describe_error(error)}") from error
        except OSError as error:
            raise Failure(f"{self.url}: {describe_error(error)}", Kind.DOWN) from error
        except ValueError as error:
            raise Failure(f"{self.url} {error}", alone=2) from error
        if reply.status != 200:
            raise self._refused(reply, payload)
        try:
            return job.read(self.url, payload)
        except ValueError as error:  # a reply may be corrupted in transit once
            raise Failure(str(error), alone=2) from error

    def _refused(self, reply: aiohttp.ClientResponse, payload: bytes) -> Failure:
        """The failure for a status other than 200."""
        status = reply.status
        transient = status == 429 or status >= 500
        verb = "answered" if transient else "refused with"
        message = f"{self.url} {verb} {status}{redirect(reply) or f': {message_of(payload)}'}"
        if status in (400, 413, 422):
            return Failure(message, Kind.GIVE_UP)
        if not transient:
            return Failure(message, alone=1)
        failure = Failure(message, most=2 if status == 504 else math.inf)
        failure.pause_s = _retry_after(reply)
        failure.probe = status >= 500
        return failure

    async def _post_with_ids(self, job: Job) -> tuple[aiohttp.ClientResponse, bytes]:
        """POST with ids for media that the server should have; repeat with all data if it does not have them.

        A request that failed with 500 or 400 is repeated, now or later, without ids: vLLM's API process may believe
        that the engine has an image which it has not, and would drop the data that comes with the same id.
        """
        if self.uses_ids:
            await self.ids.uploaded(job.media)
        if not self.uses_ids or not self.ids.trusts(job.media):
            return await self._post(job, None)
        carried, early = self.ids.claim(job.media)
        status = 0
        try:
            reply, payload = await self._post(job, carried)
            status = reply.status
            missed = status == 400 and any(text in payload for text in _MISS)
            if len(carried) < len(job.media):
                self.ids.count(missed, early)
        finally:
            self.ids.finish(carried, status == 200)
        if missed:
            return await self._post(job, job.media)
        if status in (400, 500):
            self.ids.distrust(job.media)
            if status == 500 and len(carried) < len(job.media):
                return await self._post(job, None)
        return reply, payload

    async def _post(self, job: Job, carried: Collection[str] | None) -> tuple[aiohttp.ClientResponse, bytes]:
        """(response, body) of one POST."""
        body = job.write(carried)
        url = self.url + job.path
        timeout = aiohttp.ClientTimeout(total=job.timeout_s, sock_connect=_CONNECT_S)
        session = loop_thread().session()
        async with session.post(url, data=body, headers=self.headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await read_body(reply)

    async def describe(self, timeout_s: float) -> None:
        """Find out which models it serves and which vLLM it is: once, and again after a recovery or an idle period.

        Concurrent callers share one query and its failure.
        """
        idle = time.monotonic() - self.idle_since > _IDLE_S
        self.idle_since = math.inf
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
        rows = _rows(raw) if reply.status == 200 else []
        if any(r.get("owned_by") == "vllm" for r in rows):
            _, version = await self.get("/version", timeout_s)
            self.version = version_of(version)
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
            reply, _ = await self.get("/health", _HEALTH_S)
        except asyncio.TimeoutError:
            return f"/health did not answer within {_HEALTH_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return describe_error(error)
        return "" if reply.status < 500 else f"/health answered {reply.status}"

    def reset(self) -> None:
        """Forget its media and models: the server may have restarted."""
        self.ids.known.clear()
        self.models = None


async def read_body(reply: aiohttp.ClientResponse) -> bytes:
    """The decompressed body (the session does not decompress). ValueError for more than MOST_BYTES."""
    too_large = ValueError(f"sent more than {MOST_BYTES >> 20} MiB, which is no answer to the request")
    raw = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        raw += chunk
        if len(raw) > MOST_BYTES:
            reply.close()
            raise too_large
    coding = reply.headers.get("Content-Encoding", "identity")
    if coding == "identity":
        return bytes(raw)
    if coding not in ("gzip", "deflate"):
        raise ValueError(f"sent a body in the encoding {coding[:40]!r}, expected gzip, deflate or none")
    try:
        body = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(bytes(raw), MOST_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"sent a body that is not {coding}: {error}") from error
    if len(body) > MOST_BYTES:
        raise too_large
    return body


def _rows(raw: bytes) -> list[dict[str, Any]]:
    """Models in a reply of /v1/models; none if it is not from an OpenAI-compatible server."""
    try:
        return [row for row in json.loads(raw)["data"] if row.get("id")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def version_of(raw: bytes) -> str:
    """vLLM's version in a reply of /version; '' if there is none."""
    try:
        return str(json.loads(raw)["version"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def takes_ids(version: str) -> bool:
    """Whether a vLLM of this version may get images by id (IDS_FROM); False if the version cannot be read."""
    numbers = version.split("+")[0].split(".")[:2]
    return len(numbers) == 2 and all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) >= IDS_FROM


def checkpoint_name(root: str) -> str:
    """Name of the checkpoint from the `root` field of /v1/models: the last part of its path or hub id.

    Servers of one judge may hold it in different folders, including the hub's cache (models--OWNER--NAME).
    """
    parts = root.rstrip("/").split("/")
    cached = next((p for p in parts if p.startswith("models--")), "")
    return (cached.rpartition("--")[2] or parts[-1]).casefold()


def message_of(payload: bytes) -> str:
    """The server's error message, else the beginning of the payload."""
    try:
        value = json.loads(payload)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError, RecursionError):
        return payload[:200].decode("utf-8", "replace")


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


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    """Seconds of a Retry-After header, at most a minute; 0 if there is none (or a date)."""
    try:
        return min(max(float(reply.headers.get("Retry-After", 0)), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
