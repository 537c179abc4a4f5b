"""A reward that runs behind `prefgrpo reward serve`: the same values as in process, over the judges' connection pool.

Each sample is sent to the least loaded server as soon as it exists; failures are handled as for a judge (retries,
ejection, recovery, patience). Invariant: every sample ends, in bounded time, with the exact value from the server or
with a reason.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import aiohttp

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.body import EncodeError, Encodings
from prefgrpo.judge.endpoint import Endpoint, describe_error, redirect
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.pool import HttpPool, SendError
from prefgrpo.judge.verdict import JudgeError
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.wire import CONTENT_TYPE, WireError, encode_frames, read_score, request_body

CHECK_S = 10.0
"""Timeout of the initial check of a server."""
SHARED = ("timeout_s", "concurrency", "api_key_env")
"""Options shared with judges."""


@dataclass(eq=False)
class RemoteReward(PointwiseReward):
    """Any pointwise reward behind HTTP. RewardError, within seconds, if no server of `url` is ready to score `name`.

    name, cls: registry name or path under which it is served, and its class. url: address of the server, or of several
    equivalent ones. timeout_s: timeout of one request, including the wait for its batch. retries: most retries of a
    failed request. patience_s: how long samples wait while no server is reachable. concurrency: most requests in
    flight per server. api_key_env: environment variable with the API key for a proxy.
    """

    streams = True
    name: str
    cls: type[PointwiseReward]
    url: str | Sequence[str]
    timeout_s: float = 120.0
    retries: int = 5
    patience_s: float = 180.0
    concurrency: int = 64
    api_key_env: str = ""

    def __post_init__(self) -> None:
        name, cls, url = self.name, self.cls, self.url
        if not issubclass(cls, PointwiseReward):
            raise RewardError(
                f"reward '{name}' compares the samples of a group, so it takes no url; set its judge instead"
            )
        self.takes, self.needs_source, self.meta_keys = cls.takes, cls.needs_source, cls.meta_keys
        options = {key: getattr(self, key) for key in SHARED}
        try:
            endpoints = [url] if isinstance(url, str) else list(url)
            config = section(JudgeConfig, {"endpoints": endpoints} | options, "judge")
            self._pool = HttpPool(config, openai=False, retries=self.retries, patience_s=self.patience_s)
        except ConfigError as error:
            message = "; ".join(mistake.removeprefix("judge.") for mistake in error.mistakes)
            raise RewardError(f"options of reward '{name}': {message}") from error
        except JudgeError as error:
            raise RewardError(f"url of reward '{name}': {str(error).removeprefix('judge: ')}") from error
        self._encodings = Encodings(encode_frames)
        for endpoint in self._pool.endpoints:
            endpoint.headers["Content-Type"] = CONTENT_TYPE
        self._check()

    def score(self, samples: list[Sample]) -> list[Score]:
        """Send all samples and wait for their scores."""
        return [answer.result() for answer in [self.submit(s) for s in samples]]

    def submit(self, sample: Sample) -> Future[Score]:
        """Send one sample; the future always ends with a Score unless it is cancelled."""
        return loop_thread().submit(self._ask(sample))

    def close(self) -> None:
        """Stop health probes; the process's connection pool stays open for others."""
        self._pool.close()

    async def _ask(self, sample: Sample) -> Score:
        try:
            files = [await self._encodings.get(m) for m in (sample.media, *sample.source)]
            body = request_body(self.name, sample, files)
            return cast(Score, (await self._pool.send("/score", lambda _: body, _read_score)).value)
        except (EncodeError, SendError) as error:
            return Score(None, str(error))

    def _check(self) -> None:
        endpoints = self._pool.endpoints
        problems = [loop_thread().submit(self._problem(e)) for e in endpoints]
        bad = [f"{e.url}: {p.result()}" for e, p in zip(endpoints, problems, strict=True) if p.result()]
        if len(bad) == len(endpoints):
            raise RewardError(f"reward '{self.name}' cannot be used. " + " | ".join(bad))
        if bad:
            warnings.warn(f"reward '{self.name}': servers not used for now: " + " | ".join(bad), stacklevel=4)

    async def _problem(self, endpoint: Endpoint) -> str:
        """Why a server cannot be used; '' if it can."""
        start = f"'prefgrpo reward serve {self.name}'"
        try:
            reply, raw = await endpoint.get("/v1/info", CHECK_S)
            info = json.loads(raw)
        except asyncio.TimeoutError:
            return f"no answer within {CHECK_S:g} s; is the server stuck?"
        except (aiohttp.ClientError, OSError) as error:
            return f"not reachable ({describe_error(error)}); start it with {start}, or correct the url"
        except ValueError:
            info = None  # not JSON
        if not isinstance(info, dict) or "name" not in info:
            return f"responds, but is not a reward server{redirect(reply)}; start one with {start}, or correct the url"
        if info["name"] != self.name:
            return f"serves '{info['name']}', not '{self.name}'; start {start} on another port, or correct the url"
        status = info.get("status")
        return "" if status == "ready" else f"is {status}, not ready; try again when {endpoint.url}/health returns 200"


def _read_score(url: str, payload: bytes) -> Score:
    try:
        return read_score(payload)
    except WireError as error:
        raise WireError(f"{url} sent no readable score: {error}") from error
