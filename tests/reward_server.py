"""Reward servers for tests: the real one as a process that can be killed, and one that injects faults on request."""

from __future__ import annotations

import contextlib
import email.policy
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from judge_server import JudgeServer, free_port, until

from prefgrpo.data.answer import Answer
from prefgrpo.judge.event_loop import LoopThread
from prefgrpo.rewards.base import Question, Reward, Sample
from prefgrpo.rewards.remote import CONTENT_TYPE
from prefgrpo.rewards.serve import RewardServer, read_samples

TESTS = Path(__file__).resolve().parent
MOODY = "reward_server:Moody"


class Moody(Reward):
    """Mean brightness, or the failure that the prompt names; `parts.batch` is the number of samples in the call.

    A prompt "until FILE" is scored only once that file exists; the option `load_until` delays loading likewise.
    """

    takes = ("image", "video")

    def __init__(self, load_until: str = "", load_error: str = "", value: float = 1.0) -> None:
        wait_for(load_until)
        if load_error:
            raise ImportError(load_error)
        self.value = value

    def ask(self, asked: list[Question]) -> list[Answer]:
        samples = [sample for (sample,) in asked]
        return [self._one(s, len(samples)) for s in samples]

    def _one(self, sample: Sample, batch: int) -> Answer:
        if "raise" in sample.prompt:
            raise RuntimeError("out of memory")
        if sample.prompt.startswith("until "):
            wait_for(sample.prompt.split()[1])
        if "hang" in sample.prompt:
            time.sleep(60)
        if "nan" in sample.prompt:
            return Answer(float("nan"), parts={"half": float("inf")})
        if "missing" in sample.prompt:
            return Answer(None, "nothing to see")
        return Answer(self.value * brightness(sample), parts={"batch": float(batch)})


def wait_for(file: str) -> None:
    while file and not Path(file).exists():
        time.sleep(0.01)


def brightness(sample: Sample) -> float:
    return float(sample.media.pixels.astype(np.float64).mean() / 255)


def parts_of(raw: bytes) -> tuple[str, list[bytes]]:
    """(field `sample`, files) of a form, read by the standard library."""
    form = email.message_from_bytes(f"Content-Type: {CONTENT_TYPE}\r\n\r\n".encode() + raw, policy=email.policy.HTTP)
    first, *files = [part.get_payload(decode=True) for part in form.iter_parts()]
    return first.decode(), files


class Process:
    """`prefgrpo reward serve` in a separate process; `options` are its command-line arguments."""

    def __init__(self, name: str, *options: str, port: int = 0, ready: bool = True, log: Path | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "prefgrpo.rewards.serve", name, "--port", str(self.port), *options]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
        out: Any = log.open("w") if log else subprocess.DEVNULL
        self.child = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        if ready:
            self.wait_ready()

    def wait_ready(self) -> None:
        until(lambda: self.child.poll() is not None or self.health() == 200, 600)
        assert self.child.poll() is None, "the reward server did not start"

    def health(self) -> int:
        """HTTP status of /health, 0 if there is no answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=600) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def counts(self) -> dict[str, Any]:
        """The counters in /health: queued, batches, samples."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=600) as reply:
            return dict(json.loads(reply.read()))

    def wait_for(self, key: str, value: int) -> None:
        """Wait until the counter `key` is at least `value`."""
        until(lambda: self.counts()[key] >= value, 60)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(600)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def serving(name: str, options: dict[str, Any]) -> Iterator[str]:
    """Runs the real server in a thread and yields its address once ready; faster than a process per reward."""
    thread = LoopThread()
    runner = web.AppRunner(RewardServer(name, options).app(), shutdown_timeout=1.0)

    async def listen() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        yield f"http://127.0.0.1:{thread.submit(listen()).result(60)}"
    finally:
        thread.submit(runner.cleanup()).result(60)
        thread.close()


class Stub(JudgeServer):
    """A reward server with the faults of `JudgeServer`."""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/score", self._chat)

    async def _health(self, request: web.Request) -> web.Response:
        reply = await super()._health(request)
        return web.json_response({"name": MOODY}, status=reply.status)

    async def parse(self, request: web.Request, raw: bytes) -> Any:
        return parts_of(raw)

    def _answer(self, body: Any) -> web.Response:
        return web.json_response(Answer(brightness(*read_samples(*body, MOODY))).row())
