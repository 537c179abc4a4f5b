"""A reward that runs behind `prefgrpo reward serve`: the same values as in process, over the judges' connection pool.

A sample is sent as a form: lossless WebP of the frames that the reward looks at, as its server says. Invariant: every
sample ends, in bounded time, with the exact value from the server or with a reason.
"""

from __future__ import annotations

import json
import math
import secrets
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp
from pydantic import PositiveFloat, PositiveInt

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.http import Endpoint, Failure, HttpPool, JudgeError, Starting, describe_error
from prefgrpo.judge.uploads import EncodeError, Encodings, png
from prefgrpo.rewards.base import Question, Reward, RewardError, Sample

_LARGEST_WEBP = 16383
_BOUNDARY = secrets.token_hex(16).encode()
CONTENT_TYPE = f"multipart/form-data; boundary={_BOUNDARY.decode()}"


@dataclass(eq=False)
class RemoteReward(Reward):
    """Any reward behind HTTP: the server answers, keys and tally are the client's. RewardError if no server of `url`
    scores `name`; one that does not listen yet is waited for, at most `patience_s`.

    name, cls: registry name or path under which it is served, and its class. url: address of the server, or of several
    equivalent ones. timeout_s: timeout of one request, including the wait for its batch. patience_s: how long samples
    wait while no server is reachable. concurrency: maximum requests in flight per server. api_key_env: environment
    variable with the API key for a proxy.
    """

    name: str
    cls: type[Reward]
    url: str | Sequence[str]
    timeout_s: PositiveFloat = 120.0
    patience_s: PositiveFloat = 180.0
    concurrency: PositiveInt = 64
    api_key_env: str = ""

    streams = True

    def __post_init__(self) -> None:
        self.takes = self.cls.takes
        self.needs_source = self.cls.needs_source
        self.meta_keys = self.cls.meta_keys
        self.answer_s = self.timeout_s
        try:
            self._pool = HttpPool(
                [self.url] if isinstance(self.url, str) else list(self.url),
                self._problem,
                concurrency=self.concurrency,
                patience_s=self.patience_s,
                key_env=self.api_key_env,
                content_type=CONTENT_TYPE,
            )
        except JudgeError as error:
            raise RewardError(f"url of reward '{self.name}': {error}") from error
        self._encodings = Encodings(encode_frames)
        self.frames = None  # until the server reports it
        said = self._pool.until_usable(self.patience_s, lambda line: print(f"reward '{self.name}': {line}", flush=True))
        problems = loop_thread().submit(said).result()
        bad = [f"{e.url}: {problem}" for e, problem in zip(self._pool.endpoints, problems, strict=True) if problem]
        if len(bad) == len(problems):
            raise RewardError(f"reward '{self.name}' cannot be used. " + " | ".join(bad))
        if bad:
            warnings.warn(f"reward '{self.name}': servers not used for now: " + " | ".join(bad), stacklevel=3)
        super().__post_init__()

    async def ask_one(self, *samples: Sample) -> Answer:
        """Send one question."""
        media = [*(sample.media for sample in samples), *samples[0].source]
        try:
            files = [await self._encodings.get(medium, self.frames) for medium in media]
            body = request_body(self.name, samples, files)

            async def attempt(endpoint: Endpoint) -> Answer:
                return read_answer(endpoint.url, await endpoint.post("/score", body, self.timeout_s))

            start = time.monotonic()
            answer, retries = await self._pool.send(attempt)
            return replace(answer, seconds=time.monotonic() - start, retries=retries)
        except (EncodeError, Failure) as error:
            return Answer(None, str(error))

    async def _problem(self, endpoint: Endpoint) -> str:
        """Why a server cannot be used; '' if it can."""
        start = f"start it with 'prefgrpo reward serve {self.name}' and wait until it is ready, or correct the url"
        try:
            status, raw = await endpoint.get("/health")
            if status >= 500:
                raise Starting(f"/health answered {status}; {start}")
            row = json.loads(raw)
            served = row["name"]
            self.frames = row.get("frames")
        except (aiohttp.ClientError, OSError) as error:
            raise Starting(f"not reachable ({describe_error(error)}); {start}") from error
        except (ValueError, KeyError, TypeError):
            return f"responds, but is not a reward server; {start}"
        return "" if served == self.name else f"serves '{served}', not '{self.name}'; {start}"


def encode_frames(media: Media, most: int | None = None) -> list[bytes]:
    """The files of an image, or of a clip's frames: at most `most`, evenly spaced."""
    return [frame.webp if max(frame.pixels.shape) <= _LARGEST_WEBP else png(frame) for frame in media.frames(most)]


def request_body(name: str, samples: Question, files: Sequence[Sequence[bytes]]) -> bytes:
    """Body of POST /score. files: the encoded frames of each sample's medium, and of each source image."""
    first = samples[0]
    media = [*(sample.media for sample in samples), *first.source]
    frames = [len(of_medium) if m.clip else 0 for m, of_medium in zip(media, files, strict=True)]
    fields: dict[str, object] = {"reward": name, "prompt": first.prompt, "meta": first.meta, "frames": frames}
    if len(samples) > 1:
        fields["samples"] = len(samples)
    if first.media.clip and frames[0] == len(first.media.pixels):
        fields["frame_rate"] = first.media.frame_rate
    parts = [(b'name="sample"', json.dumps(fields, default=str).encode())]
    parts += [(b'name="frame"; filename="frame"', file) for of_medium in files for file in of_medium]
    head = b"--%s\r\nContent-Disposition: form-data; " % _BOUNDARY
    return b"".join(b"%s%s\r\n\r\n%s\r\n" % (head, *part) for part in parts) + b"--%s--\r\n" % _BOUNDARY


def read_answer(url: str, payload: bytes) -> Answer:
    """The answer in a server's reply; a non-finite value is missing. Raises ValueError if it is not readable."""
    try:
        row = json.loads(payload)
        parts = {name: math.nan if part is None else float(part) for name, part in row.get("parts", {}).items()}
        value = None if row["value"] is None else float(row["value"])
        return Answer(value, str(row.get("reason", "")), parts, str(row.get("raw", ""))).finite()
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{url} sent no readable score ({type(error).__name__}: {error}): {payload[:60]!r}") from error
