"""The judge behind an OpenAI-compatible server: vLLM first, others as far as they answer.

One pair is one request: temperature 0, rubric and caption before the images. What may help is retried with backoff
(connection errors, timeouts, 429, 5xx); any other refusal ends the pair at once with the server's message.
Invariants: every pair ends, in bounded time, with a verdict or a reason; a restart of the server loses no pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from prefgrpo.judge import answers
from prefgrpo.judge.body import FORMATS, Encoded, RequestKind, encode
from prefgrpo.judge.endpoint import TRANSPORT_ERRORS, Endpoint, NoEndpoint, Pool, describe_error
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.template import label_ids, load_template
from prefgrpo.judge.verdict import JudgeError, Pair, PairJudge, Verdict, soft_verdict
from prefgrpo.media import Media

_MISS = ("Cache miss for", "Failed to apply")
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class HttpJudgeConfig:
    """The judge behind HTTP."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """OpenAI-compatible servers of the same model, with or without /v1; the least loaded one is asked."""
    model: str = ""
    """Served model name; empty: the only model that the server has."""
    template: str = "compare"
    """Name of a shipped template or path to one."""
    tokenizer: str = ""
    """Folder or hub id of the judge's tokenizer: asks for the labels' own ids instead of the 20 likeliest tokens."""
    concurrency: int = 64
    """Most requests in flight per endpoint."""
    timeout_s: float = 120.0
    """Longest that one request may take."""
    retries: int = 5
    """Repetitions of a failed request."""
    backoff_s: float = 0.25
    """First pause before a repetition; doubles each time, with jitter."""
    patience_s: float = 180.0
    """How long pairs wait for a server to come back while none is reachable."""
    image_format: str = "jpeg"
    """jpeg (quality 95), webp or png (lossless)."""
    media_ids: str = "auto"
    """Send each medium once, then its id: auto (vLLM servers), on, off."""
    min_label_mass: float = 0.01
    """A soft verdict is missing if the two labels together have less probability than this."""
    seed: int = 0
    """Sampling seed sent with every request."""
    api_key_env: str = ""
    """Environment variable that holds the API key, if one is needed."""


class _Retry(Exception):
    """A failure that a repetition may mend."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class _Refused(Exception):
    """A failure that no repetition mends."""


class HttpJudge(PairJudge):
    """Asks one or several servers; pairs may be submitted from any thread."""

    streams = True
    clips = True

    def __init__(self, config: HttpJudgeConfig) -> None:
        _validate(config)
        self.config, self.template = config, load_template(config.template)
        self._label_ids = _ids_from(config.tokenizer, self.template.prefill, self.template.labels)
        headers = {"Content-Type": "application/json"}
        if config.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._thread = loop_thread()
        self._endpoints = [Endpoint(url, config.media_ids, headers) for url in config.endpoints]
        self._pool = Pool(self._endpoints, config.concurrency, config.patience_s)
        self._encodings: WeakKeyDictionary[Media, asyncio.Future[Encoded]] = WeakKeyDictionary()

    def submit(self, prompt: str, first: Media, second: Media) -> Future[Verdict]:
        """Send one pair; the future always ends with a Verdict unless it is cancelled."""
        return self._thread.submit(self._judge(prompt, first, second))

    def judge_group(self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair]) -> list[Verdict]:
        """All pairs at once; waits for the answers."""
        futures = [self.submit(prompt, media[i], media[j]) for i, j in pairs]
        return [f.result() for f in futures]

    def close(self) -> None:
        """Stop probing; the process's connection pool stays for other judges."""
        for endpoint in self._endpoints:
            self._thread.loop.call_soon_threadsafe(endpoint.close)

    async def _judge(self, prompt: str, first: Media, second: Media) -> Verdict:
        start, retries, reason = time.monotonic(), 0, ""
        try:
            media = (await self._encoded(first), await self._encoded(second))
        except (OSError, ValueError, TypeError, SystemError) as error:  # what PIL raises for pixels it cannot write
            return Verdict(None, f"an image could not be encoded ({describe_error(error)})", time.monotonic() - start)
        while retries <= self.config.retries:
            pause = min(self.config.backoff_s * 2**retries, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            try:
                choice = await self._ask(prompt, media)
                return self._read(choice, time.monotonic() - start, retries)
            except (_Refused, NoEndpoint, answers.Unreadable) as error:
                return Verdict(None, str(error), time.monotonic() - start, retries=retries)
            except _Retry as error:
                reason, pause = str(error), max(pause, min(error.pause_s, _LONGEST_PAUSE_S))
            retries += 1
            if retries <= self.config.retries:
                await asyncio.sleep(pause)
        reason = f"gave up after {retries} requests; the last one: {reason}"
        return Verdict(None, reason, time.monotonic() - start, retries=retries - 1)

    async def _encoded(self, media: Media) -> Encoded:
        """The medium's request parts, encoded once, off the loop."""
        if media not in self._encodings:
            loop = asyncio.get_running_loop()
            self._encodings[media] = loop.run_in_executor(None, encode, media, self.config.image_format)
        return await asyncio.shield(self._encodings[media])

    async def _ask(self, prompt: str, media: tuple[Encoded, Encoded]) -> dict[str, Any]:
        """One request to the best endpoint: the first choice of its answer."""
        endpoint, session = await self._pool.acquire(), self._thread.session()
        try:
            await endpoint.describe(session, self.config.timeout_s)
            status, payload, pause = await self._send(session, endpoint, prompt, media)
        except asyncio.TimeoutError as error:
            self._pool.suspect(session, endpoint)
            raise _Retry(f"{endpoint.url} did not answer within {self.config.timeout_s:g} s") from error
        except TRANSPORT_ERRORS as error:
            await self._pool.eject(session, endpoint, describe_error(error))
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        except aiohttp.ClientError as error:
            raise _Retry(f"{endpoint.url}: {describe_error(error)}") from error
        finally:
            await self._pool.release(endpoint)
        if status >= 500:
            self._pool.suspect(session, endpoint)
        return _choice(endpoint.url, status, payload, pause)

    async def _send(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, prompt: str, media: tuple[Encoded, Encoded]
    ) -> tuple[int, bytes, float]:
        """Post with ids where the server has the media; once more with all data if it turns out that it has not."""
        kind = RequestKind(self._model(endpoint), self.template, self.config.seed, self._label_ids, endpoint.vllm)
        if not endpoint.uses_ids:
            return await self._post(session, endpoint, kind.body(prompt, (media[0].plain, media[1].plain)))
        carried = await endpoint.claim([m.uuid for m in media])
        success = False
        try:
            parts = [m.with_data if m.uuid in carried else m.id_only for m in media]
            reply = await self._post(session, endpoint, kind.body(prompt, (parts[0], parts[1])))
            if lean := len(carried) < len({m.uuid for m in media}):
                missed = reply[0] == 400 and any(text in reply[1].decode("utf-8", "replace") for text in _MISS)
                endpoint.lean_request(missed)
                if missed or (lean and reply[0] == 500):
                    body = kind.body(prompt, (media[0].with_data, media[1].with_data))
                    reply = await self._post(session, endpoint, body)
            success = reply[0] == 200
            return reply
        finally:
            endpoint.settle(carried, success)

    async def _post(self, session: aiohttp.ClientSession, endpoint: Endpoint, body: bytes) -> tuple[int, bytes, float]:
        """(status, body, seconds of Retry-After) of one chat completion."""
        url, timeout = f"{endpoint.url}/v1/chat/completions", aiohttp.ClientTimeout(total=self.config.timeout_s)
        async with session.post(url, data=body, headers=endpoint.headers, timeout=timeout) as reply:
            return reply.status, await reply.read(), _retry_after(reply.headers.get("Retry-After"))

    def _model(self, endpoint: Endpoint) -> str:
        return self.config.model or (endpoint.models or [""])[0]

    def _read(self, choice: dict[str, Any], seconds: float, retries: int) -> Verdict:
        """The verdict that a choice states; Unreadable if it states none."""
        if self.template.answer == "soft" and self.template.labels:
            first, second = answers.label_logprobs(choice, self.template.labels)
            return soft_verdict(first, second, self.config.min_label_mass, seconds, retries)
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise answers.Unreadable("the server's answer has no text")
        verdict = Verdict(None, "", seconds, text, retries)
        try:
            if self.template.answer == "flex":
                value, parts = answers.flex(text)
                return replace(verdict, first=value, parts=parts)
            return replace(verdict, first=(answers.think if self.template.answer == "think" else answers.plain)(text))
        except answers.Unreadable as error:
            return replace(verdict, reason=str(error))


def _choice(url: str, status: int, payload: bytes, pause: float) -> dict[str, Any]:
    """The first choice of an HTTP answer; _Retry or _Refused otherwise."""
    if status == 429 or status >= 500:
        raise _Retry(f"{url} answered {status}: {_message(payload)}", pause)
    if status != 200:
        raise _Refused(f"{url} refused with {status}: {_message(payload)}")
    try:
        choices = json.loads(payload)["choices"]
    except (ValueError, KeyError, TypeError) as error:
        raise _Refused(f"{url} sent no readable chat completion ({describe_error(error)}): {payload[:80]!r}") from error
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _Refused(f"{url} sent a chat completion without choices")
    return choices[0]


def _message(payload: bytes) -> str:
    """The server's own error message, else the start of what it sent."""
    try:
        value = json.loads(payload)
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    except (ValueError, AttributeError):
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
    except (TypeError, ValueError):
        return 0.0


def _validate(config: HttpJudgeConfig) -> None:
    """JudgeError naming every option that is out of range."""
    bad = []
    if not config.endpoints or any(not str(u).startswith(("http://", "https://")) for u in config.endpoints):
        bad.append(f"endpoints must be http:// or https:// addresses, got {list(config.endpoints)}")
    if config.image_format not in FORMATS:
        bad.append(f"image_format must be one of {', '.join(FORMATS)}, got {config.image_format!r}")
    if config.media_ids not in ("auto", "on", "off"):
        bad.append(f"media_ids must be auto, on or off, got {config.media_ids!r}")
    if config.concurrency < 1 or config.retries < 0 or not config.timeout_s > 0:
        bad.append("concurrency must be at least 1, retries at least 0, timeout_s positive")
    if config.api_key_env and config.api_key_env not in os.environ:
        bad.append(f"the environment variable {config.api_key_env} (api_key_env) is not set")
    if bad:
        raise JudgeError("judge: " + "; ".join(bad))


def _ids_from(tokenizer: str, prefill: str, labels: tuple[str, str] | None) -> tuple[int, int] | None:
    if not tokenizer or labels is None:
        return None
    from transformers import AutoTokenizer  # only where it is asked for

    return label_ids(AutoTokenizer.from_pretrained(tokenizer), prefill, labels)
