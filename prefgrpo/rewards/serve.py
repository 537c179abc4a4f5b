"""`prefgrpo reward serve NAME`: serves one reward over HTTP, from a separate environment.

POST /score takes a form (docs/served_rewards.md). Samples that arrive while a batch runs form the next batch. The
server listens once a probe sample has a score. Needs only aiohttp, numpy, pillow, pydantic, pyyaml and the reward's own
libraries.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import yaml
from aiohttp import web
from PIL import Image

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media, rgb
from prefgrpo.rewards import RewardSpecError, build, parse_reward_spec
from prefgrpo.rewards.base import Question, Reward, RewardError, Sample, answers_in_process

DRAIN_S = 20.0
"""Seconds after SIGTERM within which earlier requests are still answered."""
LARGEST = 256 << 20
"""Bytes of the largest request."""
FORMATS = ("PNG", "WEBP", "JPEG")
PROBE = 'A 1x2 grid of squares. [LEFT]: a red square. [RIGHT]: a blue square that says "A".'


class RewardServer:
    """Serves one reward."""

    def __init__(self, name: str, options: Mapping[str, Any], max_batch: int = 32) -> None:
        """Construct the reward and score a probe sample. RewardError or RewardSpecError if that gives no value."""
        parse_reward_spec([name])
        self.name = name
        self.max_batch = max_batch
        try:
            self.reward = build([name], {name: options})[name]
        except (RewardError, RewardSpecError):
            raise
        except Exception as error:
            traceback.print_exc()
            raise RewardError(f"reward '{name}' cannot be loaded: {type(error).__name__}: {error}") from error
        self.probe = answers_in_process(self.reward, [probe(self.reward)])[0].finite()
        if self.probe.value is None:
            raise RewardError(f"reward '{name}' gave no score to a probe sample: {self.probe.reason}")
        self.batches = 0
        self.samples = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/health", self._health)
        app.router.add_post("/score", self._score)
        app.cleanup_ctx.append(self._run_batches)
        return app

    async def _run_batches(self, _: web.Application) -> AsyncIterator[None]:
        """Score waiting samples, batch by batch, while the application runs."""
        self._queue = asyncio.Queue[tuple[Question, asyncio.Future[Answer]]]()
        work = asyncio.create_task(self._work())
        yield
        work.cancel()
        self.reward.close()

    async def _work(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            while len(waiting) < self.max_batch and not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            batch = [(samples, answer) for samples, answer in waiting if not answer.done()]  # the client may have gone
            if not batch:
                continue
            self.batches += 1
            asked = [samples for samples, _ in batch]
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, answers_in_process, self.reward, asked)
            self.samples += len(asked)
            for (_, answer), value in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(value)

    async def _score(self, request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        try:
            form = await request.post()
            files = [part.file.read() for part in form.getall("frame", []) if isinstance(part, web.FileField)]
            samples = await loop.run_in_executor(None, read_samples, str(form.get("sample", "")), files, self.name)
            if len(samples) != 1 + self.reward.compares:
                raise ValueError(f"'{self.name}' expects {1 + self.reward.compares} sample(s), got {len(samples)}")
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._queue.put_nowait((samples, answer))
        found = await answer
        return web.json_response(found.row() | ({"raw": found.raw} if found.raw else {}))

    async def _health(self, _: web.Request) -> web.Response:
        counts = {"queued": self._queue.qsize(), "batches": self.batches, "samples": self.samples}
        return web.json_response({"name": self.name, "frames": self.reward.frames} | counts)


def read_samples(fields: str, files: Sequence[bytes], name: str) -> Question:
    """The samples of a form. Raises ValueError for one that is not readable or meant for another reward than `name`."""
    try:
        row = json.loads(fields)
        images = [np.array(rgb(Image.open(io.BytesIO(file), formats=FORMATS))) for file in files]
        media: list[Media] = []
        for count in row.get("frames", [0] * len(files)):
            frames = [images.pop(0) for _ in range(max(count, 1))]
            media.append(Media(np.stack(frames) if count else frames[0]))
        count = row.get("samples", 1)
        generated = [replace(media[k], frame_rate=row.get("frame_rate")) for k in range(count)]
        samples = [Sample(row["prompt"], one, tuple(media[count:]), row.get("meta", {})) for one in generated]
        wanted = row.get("reward", name)
    except (LookupError, TypeError, AttributeError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"expected a form with the field sample and files ({', '.join(FORMATS)}) as in docs/served_rewards.md: "
            f"{type(error).__name__}: {error}"
        ) from error
    if wanted != name:
        raise ValueError(f"this server scores '{name}', not '{wanted}'")
    return tuple(samples)


def probe(reward: Reward) -> Question:
    """What a reward must answer before its server listens, with the prompt and meta in `reward.probe`."""
    rng = np.random.default_rng(0)
    image = Media(rng.integers(0, 256, (64, 64, 3), np.uint8))
    clip = Media(rng.integers(0, 256, (8, 64, 64, 3), np.uint8), frame_rate=8.0)
    medium = image if "image" in reward.takes else clip
    source = (image,) if reward.needs_source else ()
    sample = Sample(reward.probe.get("prompt", PROBE), medium, source, reward.probe)
    other = replace(sample, media=replace(medium, pixels=255 - medium.pixels))
    return (sample, other) if reward.compares else (sample,)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a reward until Ctrl-C or SIGTERM; the exit code."""
    parser = argparse.ArgumentParser("prefgrpo reward serve", description="Serve one reward over HTTP.")
    parser.add_argument("name", help="a reward of `prefgrpo reward list`, package.module:Class or file.py:function")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="options of the reward")
    open_to = "any but loopback lets other machines in, without authentication"
    parser.add_argument("--host", default="127.0.0.1", help=f"address to listen on (%(default)s); {open_to}")
    parser.add_argument("--port", type=int, default=8100, help="port to listen on (%(default)s)")
    parser.add_argument("--max-batch", type=int, default=32, help="maximum number of samples per batch (%(default)s)")
    args = parser.parse_args(argv)
    words = [word.partition("=") for word in args.options]
    try:
        print(f"loading reward '{args.name}', pid {os.getpid()}", flush=True)
        server = RewardServer(args.name, {key: yaml.safe_load(value) for key, _, value in words}, args.max_batch)
        ready = f"ready: reward '{args.name}' at {args.host}:{args.port} (probe {server.probe.value:.6g})"
        web.run_app(
            server.app(),
            host=args.host,
            port=args.port,
            print=lambda _: print(ready, flush=True),
            access_log=None,
            shutdown_timeout=DRAIN_S,
            handler_cancellation=True,
        )
    except (RewardError, RewardSpecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
