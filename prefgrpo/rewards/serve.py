"""`prefgrpo reward serve NAME`: serves one reward over HTTP, from a separate environment.

Samples that arrive while one batch runs form the next batch. "ready" means that a probe sample got a score. Imports
only aiohttp, numpy, pillow, pyyaml and what the reward imports, so that `python -m prefgrpo.rewards.serve` works with
old libraries. Invariant: a reply has one score or reason per sample, and a bad request does not affect others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from aiohttp import web

from prefgrpo import __version__
from prefgrpo.config.recipe import ConfigError, read_yaml
from prefgrpo.data.media import Media
from prefgrpo.rewards import RewardSpecError, build, load_class, parse_reward_spec
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.wire import read_sample, score_row

DRAIN_S = 20.0
"""Seconds after SIGTERM within which earlier requests are still answered."""
PROBE = 'A 1x2 grid of squares. [LEFT]: a red square. [RIGHT]: a blue square that says "A".'
T = TypeVar("T")


class RewardServer:
    """Serves one pointwise reward."""

    def __init__(self, name: str, options: Mapping[str, Any], max_batch: int = 32, max_mib: int = 256) -> None:
        """Raises RewardSpecError or RewardError if the reward cannot be served."""
        parse_reward_spec([name])
        cls = load_class(name)
        if not issubclass(cls, PointwiseReward):
            raise RewardError(
                f"reward '{name}' compares the samples of a group, so it runs in the trainer; serve its judge instead"
            )
        if "url" in options:
            raise RewardError(f"options of '{name}': expected no url, which belongs in the recipe of the training run")
        if max_batch < 1 or max_mib < 1:
            raise RewardError(f"max-batch and max-mib: expected at least 1, got {max_batch} and {max_mib}")
        self.name, self.cls, self.options, self.max_batch, self.max_mib = name, cls, options, max_batch, max_mib
        self.state, self.running, self.batches, self.samples = "loading", False, 0, 0
        self._queue: deque[tuple[Sample, asyncio.Future[Score]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._runner: web.AppRunner | None = None
        self._reward: PointwiseReward | None = None

    async def listen(self, host: str, port: int) -> str:
        """Start listening (/health returns 503 until `load` has finished); the address."""
        app = web.Application(client_max_size=self.max_mib << 20)
        app.router.add_routes(
            [web.get("/health", self._health), web.get("/v1/info", self._info), web.post("/score", self._score)]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else "expected 0 to 65535"
            raise RewardError(f"cannot listen on {host}:{port} ({why}); choose another --port") from error
        return f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[0][1]}"

    async def load(self) -> Score:
        """Construct the reward and score a probe sample. Raises RewardError if that gives no value."""
        try:
            reward = await self._call(lambda: build([self.name], {self.name: self.options})[self.name])
        except (RewardError, RewardSpecError):
            raise
        except Exception as error:
            traceback.print_exc()
            raise RewardError(f"reward '{self.name}' cannot be loaded: {type(error).__name__}: {error}") from error
        assert isinstance(reward, PointwiseReward)
        self._reward = reward
        score = (await self._run([probe(self.cls)]))[0]
        if score.value is None or not np.isfinite(score.value):
            raise RewardError(f"reward '{self.name}' gave no score to a probe sample: {score.reason or score.value}")
        self.state = "ready"
        return score

    async def work(self) -> None:
        """Score incoming samples, batch by batch, forever."""
        while True:
            await self._arrived.wait()
            batch = [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]
            if not self._queue:
                self._arrived.clear()
            await self._batch([item for item in batch if not item[1].done()])  # skip clients that disconnected

    async def stop(self) -> None:
        """Accept no new requests, and answer the pending ones."""
        self.state = "stopping"
        if self._runner is not None:
            await self._runner.cleanup()
        if self._reward is not None and not self.running:
            self._reward.close()

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the reward's thread."""

        def there() -> T:
            self.running = True
            try:
                return work()
            finally:
                self.running = False

        return await asyncio.get_running_loop().run_in_executor(self._thread, there)

    async def _run(self, samples: list[Sample]) -> list[Score]:
        self.batches += 1
        assert self._reward is not None
        scores = await self._call(partial(self._reward.score, samples))
        if len(scores) != len(samples):
            raise RewardError(f"reward '{self.name}' gave {len(scores)} scores for {len(samples)} samples")
        self.samples += len(samples)
        return scores

    async def _batch(self, items: list[tuple[Sample, asyncio.Future[Score]]]) -> None:
        """Score all samples in one call; if it raises, one call per sample."""
        if not items:
            return
        try:
            for (_, answer), score in zip(items, await self._run([s for s, _ in items]), strict=True):
                if not answer.done():
                    answer.set_result(score)
        except Exception as error:  # noqa: BLE001  (the reward's libraries may raise anything; it goes into the reply)
            if len(items) > 1:
                for item in items:
                    await self._batch([item])
            elif not items[0][1].done():
                items[0][1].set_exception(error)

    async def _score(self, request: web.Request) -> web.Response:
        if self.state != "ready":
            return _error_response(503, f"reward '{self.name}' is {self.state}")
        loop = asyncio.get_running_loop()
        try:
            form = await request.post()
            files = [part.file.read() for part in form.getall("frame", []) if isinstance(part, web.FileField)]
            fields = str(form.get("sample", ""))
            sample = await loop.run_in_executor(None, read_sample, fields, files, self.name, self.cls)
        except web.HTTPRequestEntityTooLarge:
            return _error_response(413, f"the request is larger than {self.max_mib} MiB; raise --max-mib or send less")
        except ValueError as error:  # a WireError, or no form
            return _error_response(400, str(error))
        answer: asyncio.Future[Score] = loop.create_future()
        self._queue.append((sample, answer))
        self._arrived.set()
        try:
            score = await answer
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            return _error_response(500, f"reward '{self.name}' failed: {type(error).__name__}: {error}")
        return web.json_response(score_row(score))

    async def _health(self, _: web.Request) -> web.Response:
        counts = {"queued": len(self._queue), "batches": self.batches, "samples": self.samples}
        return web.json_response({"status": self.state} | counts, status=200 if self.state == "ready" else 503)

    async def _info(self, _: web.Request) -> web.Response:
        info = {"name": self.name, "takes": self.cls.takes, "needs_source": self.cls.needs_source}
        info |= {"meta_keys": self.cls.meta_keys, "status": self.state, "version": __version__}
        return web.json_response(info | {"options": json.loads(json.dumps(dict(self.options), default=str))})


def _error_response(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else None
    return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)


def probe(reward: type[PointwiseReward]) -> Sample:
    """The sample that a reward must score before its server is ready, from the prompt and meta in `reward.probe`."""
    rng = np.random.default_rng(0)
    image = Media(rng.integers(0, 256, (64, 64, 3), np.uint8))
    clip = Media(rng.integers(0, 256, (8, 64, 64, 3), np.uint8))
    source = (image,) if reward.needs_source else ()
    return Sample(reward.probe.get("prompt", PROBE), image if "image" in reward.takes else clip, source, reward.probe)


def read_options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Options from YAML files ({key: value} or {NAME: {key: value}}) and key=value words; the last one wins."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            options[key] = yaml.safe_load(value)
        else:
            content = read_yaml(Path(word))
            options |= content[name] if isinstance(content.get(name), dict) else content
    return options


async def run(server: RewardServer, host: str, port: int) -> None:
    """Listen, load, serve until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    url = await server.listen(host, port)
    print(f"loading reward '{server.name}', pid {os.getpid()}; {url}/health returns 200 when it is ready", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"note: {host} is reachable by others, and the server has no authentication", flush=True)
    load, worker = asyncio.create_task(server.load()), asyncio.create_task(server.work())
    stop = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({load, stop}, return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            print(f"ready: reward '{server.name}' at {url} (probe {load.result().value:.6g})", flush=True)
            await stop
        print("stopping", flush=True)
    finally:
        await server.stop()
        worker.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a reward until Ctrl-C or SIGTERM; the exit code."""
    parser = argparse.ArgumentParser("prefgrpo reward serve", description="Serve one reward over HTTP.")
    parser.add_argument("name", help="a reward of `prefgrpo reward list`, package.module:Class or file.py:function")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="X", help="options of the reward: FILE.yaml or key=value"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (%(default)s); any but loopback lets other machines in",
    )
    parser.add_argument("--port", type=int, default=8100, help="port to listen on (%(default)s); 0: any free port")
    parser.add_argument("--max-batch", type=int, default=32, help="maximum number of samples per batch (%(default)s)")
    parser.add_argument("--max-mib", type=int, default=256, help="maximum size of a request in MiB (%(default)s)")
    args = parser.parse_args(argv)
    try:
        server = RewardServer(args.name, read_options(args.name, args.options), args.max_batch, args.max_mib)
        asyncio.run(run(server, args.host, args.port))
    except (RewardError, RewardSpecError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if server.running:
        print(f"the reward was still running {DRAIN_S:g} s after SIGTERM; exiting anyway", file=sys.stderr, flush=True)
        os._exit(1)  # the reward's thread cannot be stopped otherwise
    return 0


if __name__ == "__main__":
    sys.exit(main())
