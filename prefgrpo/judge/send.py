"""Sends one request to the best of several equivalent servers, with retries where they can help.

STATUSES and ERRORS define how each failure is handled. A timeout is retried once, on another server if one is free,
because the same server would take as long again. If one server cannot handle a request, another is tried; if the
request itself is rejected, it fails at once with the server's message. Nothing here is specific to judges: the caller
supplies the path and functions that write the body and parse the reply. Invariants: every request ends, in bounded
time, with a parsed reply or a reason; a server restart loses no request.
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
"""First pause before a retry, in seconds; doubles each time, with jitter."""
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 30.0
"""Timeout of connecting and of /v1/models, neither of which waits for text generation."""
PATIENCE_S = 600.0
"""How long to wait for unreachable servers if the configuration sets no limit."""
Write = Callable[[Collection[str] | None], bytes]
"""Media whose data the body must include (None: all of them, without ids) -> body."""
Read = Callable[[str, bytes], Any]
"""(address, payload of a 200) -> parsed reply. Raises ValueError if the payload is not a valid reply."""


class Outcome(NamedTuple):
    """How a kind of failure affects the request and the server."""

    max_failures: float = math.inf  # give up after this many such failures of one request
    max_failures_alone: float = math.inf  # the same while no other server is healthy
    pause: bool = True  # pause the server while another one is healthy
    probe: bool = False  # query /health, and eject the server if it does not respond
    eject: bool = False  # send no requests until /health responds


REFUSED = Outcome(max_failures=1, pause=False)
"""Any server would refuse this request."""
UNSUITABLE = Outcome(max_failures_alone=1)
"""This server can never handle the request; another one may."""
UNREADABLE = Outcome(max_failures_alone=2)
"""A reply may be corrupted in transit once."""
BUSY = Outcome()
FAILING = Outcome(probe=True)
SLOW = Outcome(max_failures=2, probe=True)
LOST = Outcome(eject=True)
STATUSES = dict.fromkeys(range(500, 600), FAILING) | {400: REFUSED, 413: REFUSED, 422: REFUSED, 429: BUSY, 504: SLOW}
"""Outcome by HTTP status other than 200; UNSUITABLE if not listed."""
ERRORS = (
    (aiohttp.ClientConnectionError, LOST),  # first: connection timeouts are TimeoutErrors as well
    (asyncio.TimeoutError, SLOW),
    (aiohttp.ClientPayloadError, LOST),
    (OSError, LOST),
    (aiohttp.ClientError, BUSY),
)
"""Outcome by exception class; the first match counts."""


class Failure(Exception):
    """A request failed on one server."""

    def __init__(self, reason: str, outcome: Outcome, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.outcome, self.pause_s = outcome, pause_s
        self.endpoint: Endpoint | None = None


@dataclass(frozen=True)
class Reply:
    """A server's reply with status 200."""

    value: Any
    """The parsed body."""
    retries: int = 0
    """Number of retries before it."""
    spent_us: int = 0
    """Duration of the successful request, in microseconds."""


@dataclass(frozen=True)
class _Job:
    """What to send, and how to parse the reply."""

    path: str
    write: Write
    read: Read
    media: frozenset[str]
    timeout_s: float


class Sender:
    """Sends requests to a pool of endpoints; everything except the constructor and `close` runs on the event loop."""

    def __init__(self, config: JudgeConfig, *, openai: bool = True) -> None:
        """`openai`: query /v1/models before the first request to a server. JudgeError for invalid options."""
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
        """Stop health probes; the process's connection pool stays open for others."""
        self.thread.loop.call_soon_threadsafe(self.pool.close)

    async def send(
        self, path: str, write: Write, read: Read, media: Sequence[str] = (), timeout_s: float = 120.0
    ) -> Reply:
        """POST a body to `path` on the best endpoint; SendError if all retries fail.

        media: ids of the media in the body; `write` is told which of them need data.
        timeout_s: timeout of one request, unless the configuration sets one.
        """
        turn, job = next(self._turns), _Job(path, write, read, frozenset(media), self.config.timeout_s or timeout_s)
        ended, slow, longest = Counter[Outcome](), None, min(_LONGEST_PAUSE_S, job.timeout_s)
        retries = 0
        while True:
            try:
                endpoint = await self._acquire_endpoint(turn, job.media, slow)
            except SendError as error:  # no server is reachable
                error.retries = retries
                raise
            try:
                return replace(await self._exchange(endpoint, job), retries=retries)
            except Failure as failure:
                outcome = failure.outcome
                ended[outcome] += 1
                slow = failure.endpoint if outcome is SLOW else slow
                others = self.pool.healthy(besides=failure.endpoint)
                max_failures = outcome.max_failures if others else min(outcome.max_failures, outcome.max_failures_alone)
                if ended[outcome] >= max_failures or retries >= self.config.retries:
                    given_up = f"gave up after {retries + 1} requests; the last one: " if retries else ""
                    raise SendError(f"{given_up}{failure}", retries) from failure
                backoff = min(_BACKOFF_S * 2**retries, longest) * random.uniform(0.5, 1.0)
                pause_s = max(backoff, min(failure.pause_s, longest))
            finally:
                self.pool.release(endpoint)
            retries += 1
            await asyncio.sleep(pause_s)

    async def _acquire_endpoint(self, turn: int, media: frozenset[str], slow: Endpoint | None) -> Endpoint:
        """The best endpoint with a free slot, avoiding `slow` if possible. A request that must wait for media in upload
        by another request holds no slot meanwhile."""
        while True:
            endpoint = await self.pool.acquire(turn, slow)
            if not (events := endpoint.ids.pending_uploads(media)):
                return endpoint
            self.pool.release(endpoint)
            for event in events:
                await event.wait()

    async def _exchange(self, endpoint: Endpoint, job: _Job) -> Reply:
        """Send one request to an endpoint with an acquired slot, and record the outcome for later choices."""
        start, reply = time.monotonic(), None
        try:
            reply = Reply(await self._ask(endpoint, job))
        except Failure as failure:
            failure.endpoint, outcome = endpoint, failure.outcome
            if outcome.eject:
                self.pool.eject(endpoint, str(failure).removeprefix(f"{endpoint.url}: "))
            elif outcome.probe:
                self.pool.start_probe(endpoint)
            if outcome.pause:
                self.pool.pause(endpoint, failure.pause_s)
            raise
        finally:
            spent_us = round(1e6 * (time.monotonic() - start))
            if self.openai:
                traffic.count(spent_us=spent_us, wasted_us=spent_us if reply is None else 0)
        endpoint.failures = 0
        return replace(reply, spent_us=spent_us)

    async def _ask(self, endpoint: Endpoint, job: _Job) -> Any:
        """The parsed reply; Failure unless the server returns 200 with a valid body."""
        asked, limit_s = "/v1/models", min(job.timeout_s, _CONNECT_S)
        try:
            if self.openai:
                await endpoint.describe(limit_s)
                self._check_model(endpoint)
            asked, limit_s = "", job.timeout_s
            reply, payload = await self._post_with_ids(endpoint, job)
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
        """Fail if a server changed its model; some servers do not check the requested name, and some restart."""
        if endpoint.models is None:
            raise Failure(f"{endpoint.url} does not list its models yet: {endpoint.refusal}", BUSY)
        self.model = self.model or (endpoint.models or [""])[0]
        root = endpoint.roots.get(self.model, "")
        endpoint.root, self.root = endpoint.root or root, self.root or root
        problem = endpoint.model_problem(self.model)
        if not problem and root and (root != endpoint.root or checkpoint_name(root) != checkpoint_name(self.root)):
            before = endpoint.root if root != endpoint.root else self.root
            problem = (
                f"serves '{self.model}' from {root}, before that from {before}: expected one checkpoint "
                "throughout a run, on all servers of a judge"
            )
        if problem:
            endpoint.reset()
            raise Failure(f"{endpoint.url} {problem}", UNSUITABLE)

    async def _post_with_ids(self, endpoint: Endpoint, job: _Job) -> tuple[aiohttp.ClientResponse, bytes]:
        """POST with ids for media that the server should have; repeat with all data if it does not have them."""
        if not endpoint.uses_ids or not job.media:
            return await self._post(endpoint, job, None)
        ids, success = endpoint.ids, False
        carried, grace_s = await ids.claim_uploads(job.media)
        try:
            reply, payload = await self._post(endpoint, job, carried)
            if len(carried) < len(job.media):
                missed = reply.status == 400 and any(text in payload for text in _MISS)
                ids.record_request(missed, grace_s)
                if missed or reply.status == 500:
                    reply, payload = await self._post(endpoint, job, job.media)
            success = reply.status == 200
            return reply, payload
        finally:
            ids.finish_uploads(carried, success)

    async def _post(
        self, endpoint: Endpoint, job: _Job, carried: Collection[str] | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """(response, body) of one POST."""
        body = job.write(carried)
        url = endpoint.url + job.path
        timeout = aiohttp.ClientTimeout(total=job.timeout_s, sock_connect=_CONNECT_S)
        session, headers = self.thread.session(), endpoint.headers
        async with session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as reply:
            return reply, await reply.read()


def validate(config: JudgeConfig) -> None:
    """Raise JudgeError for invalid addresses or a missing API key."""
    errors = []
    if not config.endpoints or not all(url.startswith(("http://", "https://")) for url in config.endpoints):
        errors.append(f"endpoints must be http:// or https:// addresses, got {list(config.endpoints)}")
    if config.api_key_env and config.api_key_env not in os.environ:
        errors.append(f"the environment variable {config.api_key_env} (api_key_env) is not set")
    if errors:
        raise JudgeError("judge: " + "; ".join(errors))


def message_of(payload: bytes) -> str:
    """The server's error message, else the beginning of the payload."""
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
