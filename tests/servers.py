"""Servers of the tests, over real sockets: a judge that injects faults on request, and servers of rewards.

In a thread: `with JudgeServer(...) as s`; as a process that can be killed: `python servers.py --port N`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import email.policy
import functools
import io
import json
import math
import os
import random
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web
from PIL import Image
from ranks import free_port, until

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.client import Judge, open_judge
from prefgrpo.judge.event_loop import LoopThread, loop_thread
from prefgrpo.judge.template import SHOWN, PairTemplates, Shown, load_pair_templates
from prefgrpo.rewards.base import Question, Reward, Sample
from prefgrpo.rewards.remote import CONTENT_TYPE
from prefgrpo.rewards.serve import RewardServer, read_samples

# ---- a judge ---------------------------------------------------------------------------------------------------------

MODEL = "bright-judge"
STATUSES = {"400": "At most 1 image(s) may be provided in one prompt.", "403": "not for you", "404": "no such path",
            "500": "engine trouble", "501": "not implemented", "503": "overloaded",
            "504": "no answer from behind"}  # fmt: skip


class JudgeServer:
    """`fault` is injected into the next `count` chat requests (-1: all of them); see `_misbehave`."""

    model = MODEL
    listing = ""
    version = "0.32.0+cpu"
    tokenizer: dict[str, Any] | None = None
    """What /tokenizer_info tells; None: there is no such path."""
    trims = False
    """Whether the chat template cuts white space from the end of a message, as Qwen3.5's does."""
    key = ""
    answer: Callable[[list[float], str], str | dict[str, float]] | None = None
    """(brightness of each image, all text of the request) -> text of the answer, or {first token: probability}."""

    tls: ssl.SSLContext | None = None

    def __init__(self, fault: str = "", count: int = -1, port: int = 0, vllm: bool = True, delay_s: float = 0.0):
        self.fault, self.count, self.port, self.vllm, self.delay_s = fault, count, port, vllm, delay_s
        self.requests: list[dict[str, Any]] = []
        self.bytes_in = 0
        self.in_flight = self.peak = self.checks = 0
        self.hang_after = -1
        self.media: dict[str, float] = {}
        self.capacity = 10_000

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> JudgeServer:
        self._thread = LoopThread()
        self._thread.submit(self.start()).result(600)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._runner.cleanup()).result(10)
        self._thread.close()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/tokenizer_info", self._tokenizer_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        self.add_routes(app)
        await self._listen(app)

    async def _listen(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    def add_routes(self, app: web.Application) -> None:
        """Hook for subclasses that serve more routes."""

    async def _models(self, request: web.Request) -> web.Response:
        if self.fault == "mute":
            await asyncio.sleep(3600)
        if self.fault == "loading":
            return _error(503, "loading")
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Unauthorized")
        if self.listing:
            return web.Response(text=self.listing, content_type="text/html")
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version}) if self.vllm else _error(404, "no such path")

    async def _tokenizer_info(self, _: web.Request) -> web.Response:
        return _error(404, "no such path") if self.tokenizer is None else web.json_response(self.tokenizer)

    def prompt(self, body: dict[str, Any]) -> str:
        """A conversation's text up to the answer."""
        turns = [turn["content"] if isinstance(turn["content"], str) else text_of(body) for turn in body["messages"]]
        return "\n".join(turn.strip() if self.trims else turn for turn in turns)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.vllm:
            return _error(404, "no such path")
        return web.json_response({"tokens": [ord(letter) for letter in self.prompt(await request.json())]})

    async def _health(self, _: web.Request) -> web.Response:
        self.checks += 1
        if self.fault == "mute" or (self.fault == "hang" and self.in_flight):
            await asyncio.sleep(3600)
        return web.Response(status=503 if self.fault == "sick" else 200)

    async def parse(self, request: web.Request, raw: bytes) -> Any:
        """A request's content."""
        return json.loads(raw)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Unauthorized")
        self.bytes_in += len(raw)
        body = await self.parse(request, raw)
        self.requests.append(body)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if 0 <= self.hang_after < len(self.requests):
                await asyncio.sleep(3600)
            if fault := self.next_fault():
                return await self._misbehave(fault, request, body)
            await asyncio.sleep(self.delay_s)
            return self._answer(body)
        finally:
            self.in_flight -= 1

    def _answer(self, body: dict[str, Any]) -> web.Response:
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        try:
            bright = [self._brightness(n, p) for n, p in enumerate(images(body))]
        except KeyError as miss:
            return _error(400, f"Cache miss for image at index {miss.args[0]} but data is not provided.")
        if not bright:
            return web.json_response(self._says(0.0) | {"usage": {"prompt_tokens": len(self.prompt(body))}})
        if self.answer is not None:
            return web.json_response(reply(self.answer(bright, text_of(body))) | {"model": self.model})
        bright = bright[len(bright) % 2 :]  # an edit's source comes first
        half = len(bright) // 2  # a clip is several images
        gap = 8.0 * float(np.mean(bright[:half]) - np.mean(bright[half:]))
        gap = -gap if "plain black" in text_of(body) else gap
        if body["messages"][-1]["role"] == "assistant" and not self.prompt(body).endswith(
            body["messages"][-1]["content"]
        ):
            return web.json_response(self._after_space(body, gap))
        return web.json_response(self._says(gap))

    def _after_space(self, body: dict[str, Any], gap: float) -> dict[str, Any]:
        """An answer where the space before the label was cut: nonsense, unless it is the second token."""
        wrong = self._says(-gap)
        longest = body.get("max_completion_tokens", body.get("max_tokens"))
        allowed = "".join(map(chr, body.get("allowed_token_ids", ())))
        if allowed in (" ", "\n"):
            tokens = wrong["choices"][0]["logprobs"]["content"]
            top = [{"token": allowed, "logprob": -18.0}, *tokens[0]["top_logprobs"]]
            tokens[0] |= {"token": allowed, "top_logprobs": top}
            tokens += self._says(gap)["choices"][0]["logprobs"]["content"][: longest - 1]
        return wrong

    def _says(self, gap: float, tokens: tuple[str, str] = ("1", "2")) -> dict[str, Any]:
        return completion(gap, tokens) | {"model": self.model}

    def _brightness(self, index: int, part: dict[str, Any]) -> float:
        uuid, link = part.get("uuid"), part["image_url"]
        if uuid in self.media and self.vllm:
            return self.media[uuid]
        if link is None:
            raise KeyError(index)
        data = base64.b64decode(link["url"].split(",", 1)[1])
        value = float(np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float64).mean() / 255)
        if uuid:
            self.media[uuid] = value
            while len(self.media) > self.capacity:
                self.media.pop(next(iter(self.media)))
        return value

    def next_fault(self) -> str:
        """The fault to inject into this chat request."""
        if not self.fault or self.count == 0:
            return ""
        self.count -= 1
        return self.fault

    async def _misbehave(self, fault: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind, _, detail = fault.partition(" ")
        good = self._says(0.0)
        choice = good["choices"][0]
        match kind:
            case "hang" | "mute":
                await asyncio.sleep(3600)
            case "429":
                header, _, value = detail.rpartition(": ")
                return _error(429, "slow down", {header or "Retry-After": value or "1"})
            case "307":
                return web.Response(status=307, headers={"Location": "/elsewhere"})
            case "sick" | "loading":
                return _error(500, "engine trouble")
            case _ if kind.isdigit():
                return _error(int(kind), STATUSES[kind])
            case "no_choices":
                good["choices"] = []
            case "no_logprobs":
                choice["logprobs"] = None
            case "garbage":
                good = self._says(0.0, ("cat", "dog"))
            case "nan":
                for top in choice["logprobs"]["content"][0]["top_logprobs"]:
                    top["logprob"] = math.nan
            case "not_json":
                return web.Response(body=json.dumps(good)[:40], content_type="application/json")
            case "html":
                return web.Response(text="<html>It works!</html>", content_type="text/html")
            case "bomb":
                small = _zipped(json.dumps(good).encode(), 64)
                return web.Response(body=small, headers={"Content-Encoding": "gzip"})
            case "endless":
                stream = web.StreamResponse()
                await stream.prepare(request)
                with contextlib.suppress(ConnectionError):
                    while True:
                        await stream.write(b" " * (1 << 16))
                return stream
            case "contradict":
                good = self._says(3.0)  # always prefers the first, whatever is shown
            case "drop" | "truncated" | "drip":
                return await self._cut(kind, request, json.dumps(good).encode())
            case other:
                raise AssertionError(other)
        return web.json_response(good)

    async def _cut(self, fault: str, request: web.Request, data: bytes) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(len(data)), "Content-Type": "application/json"})
        if fault != "drop":
            await reply.prepare(request)
        if fault == "truncated":
            await reply.write(data[:40])
        for k in range(len(data)) if fault == "drip" else ():
            await reply.write(data[k : k + 1])
            await asyncio.sleep(0.5)
        assert request.transport is not None
        request.transport.close()
        return reply


class Limited(JudgeServer):
    """Refuses what exceeds a token bucket (429; `rate` per second, at most `burst` at once) or `queue` in flight
    (503); /counts tells how many requests it got and answered."""

    rate = math.inf
    burst = math.inf
    queue = math.inf
    asked = answered = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.refused = Counter[int]()

    def add_routes(self, app: web.Application) -> None:
        self._tokens = self.burst
        self._filled = time.monotonic()
        app.router.add_get("/counts", self._counts)

    async def _counts(self, _: web.Request) -> web.Response:
        counts = {"asked": self.asked, "answered": self.answered, "checks": self.checks, "refused": self.refused}
        return web.json_response(counts)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._filled) * self.rate, self.burst)
        self._filled = now
        if self._tokens < 1 or self.in_flight >= self.queue:
            await request.read()
            full = self._tokens >= 1
            self.refused[503 if full else 429] += 1
            return _error(503, "queue full") if full else _error(429, "slow down", {"Retry-After": "1"})
        self._tokens -= 1
        found = await super()._chat(request)
        self.answered += found.status == 200
        return found


class Balancer(JudgeServer):
    """Passes each request to one of several servers at random: 502 if that one cannot be reached."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self.urls = urls
        self.answers = Counter[int]()
        self.dice = random.Random(0)

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        await self._listen(app)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        url = self.dice.choice(self.urls) + request.path
        try:
            async with self._session.request(request.method, url, data=await request.read()) as reply:
                if request.method == "POST":
                    self.answers[reply.status] += 1
                return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)
        except aiohttp.ClientError:
            return _error(502, "bad gateway")


@functools.cache  # a timeout of the tests must not depend on how long this takes
def _zipped(text: bytes, mib: int) -> bytes:
    """The text after so many MiB of spaces, as gzip."""
    data = zlib.compressobj(wbits=31)
    spaces = b"".join(data.compress(b" " * (1 << 20)) for _ in range(mib))
    return spaces + data.compress(text) + data.flush()


def images(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Image parts of a chat request."""
    content = body["messages"][0]["content"]
    return [] if isinstance(content, str) else [p for p in content if p["type"] == "image_url"]


def text_of(body: dict[str, Any]) -> str:
    """All text of a chat request's user turn."""
    return "".join(p["text"] for p in body["messages"][0]["content"] if p["type"] == "text")


def reply(answer: str | dict[str, float]) -> dict[str, Any]:
    """A chat completion with the given text, or with the given probabilities of its first token."""
    text, logprobs = answer, None
    if not isinstance(answer, str):
        top: list[dict[str, Any]] = [{"token": token, "logprob": math.log(p)} for token, p in answer.items()]
        text, logprobs = top[0]["token"], {"content": [top[0] | {"top_logprobs": top}]}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "model": MODEL, "choices": [choice]}


def completion(gap: float, tokens: tuple[str, str] = ("1", "2")) -> dict[str, Any]:
    """A chat completion whose first token prefers tokens[0] by `gap` nats."""
    odds = zip(tokens, (1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))), strict=True)
    return reply(dict(sorted(odds, key=lambda item: -item[1])))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


# ---- its answers to every shipped template ---------------------------------------------------------------------------


def split_yes_no(p: float) -> dict[str, float]:
    """Token probabilities with P(Yes) = p, split over several spellings, among other words."""
    p = min(max(p, 0.001), 0.999)
    yes = 0.9 * p
    no = 0.9 * (1 - p)
    return {"Yes": 0.6 * yes, " yes": 0.3 * yes, "YES": 0.1 * yes, "No": 0.7 * no, " no": 0.3 * no, "Well": 0.1}


def speak(b: list[float], text: str) -> str | dict[str, float]:
    """The answer to any shipped template; `b`: brightness of each image in [0, 1]."""
    half = len(b) // 2
    kind = "Video" if "Video 1" in text else "Image"
    first = (float(np.mean(b[:half] or [0])) > float(np.mean(b[half:]))) != ("plain black" in text)
    winner = f"{kind} {1 if first else 2}"
    other = f"{kind} {2 if first else 1}"
    if "Alignment Score (1-5)" in text:
        lines = {"Alignment": 1 + 4 * b[0], "Coherence": 1 + 2 * b[0], "**Style": 5 - 4 * b[0]}
        return "\n".join(f"{name} Score (1-5): {value:.2f}" for name, value in lines.items()) + "**"
    if "Final Score:" in text:
        return f"It shows {b[0]:.2f} of it.\nFinal Score: {1 + 4 * b[0]:.2f}"
    if "<Score>" in text:
        return f"<Score>{1 + round(4 * b[0])}</Score>"
    if "[success, restraint]" in text:
        return f'{{"reasoning": "ok", "score": [{25 * b[-1]:.3f}, {25 * b[0]:.3f}]}}'
    if "[naturalness, artefacts]" in text:
        return f'```json\n{{"reasoning": "ok", "score": [{25 * b[0]:.3f}, {25 - 25 * b[0]:.3f}]}}\n```'
    if "cat_winner" in text:
        names = re.findall(r'"(\w+)" \(', text)
        verdicts = [winner, other, "tie"]
        listed = ", ".join(f'{{"name": "{n}", "cat_winner": "{v}"}}' for n, v in zip(names, verdicts, strict=True))
        return f'{{"categories": [{listed}, {{"name": "Mood", "cat_winner": "{winner}"}}], "winner": "{winner}"}}'
    if "</answer>" in text:
        return f"<think>{kind} 1 is {b[0]:.2f}, {other} is better lit.</think>\n<answer>{winner} is better</answer>"
    if "Edited image 1 is better" in text:
        near = abs(b[-2] - b[0]) < abs(b[-1] - b[0])
        return f"Weighing both, {'first' if near else 'second'}.\nEdited image {1 if near else 2} is better."
    if "Yes or No" in text:
        if "Theme:" in text:
            scale = 0.5 if "Criterion: strict" in text else 1.0
            return split_yes_no(scale * (1 - abs(b[0] - b[1])))
        return split_yes_no(1 - abs(b[0] - b[-1]) if "everything else consistent" in text else b[-1])
    if "<score>[1, 0]</score>" in text:
        points = re.findall(r"^\d+\. ", text, re.M)
        return (
            f"<analysis>['a', 'b']</analysis>\n<score>{[int(b[0] > 0.2 * (k + 1)) for k in range(len(points))]}</score>"
        )
    if "single word" in text:
        return {"two": 0.7 * b[0] + 0.1, "Yes": 0.2 - 0.15 * b[0], "no": 0.05}
    raise AssertionError(f"no answer for {text[:200]}")


def judge(server: JudgeServer, **changes: Any) -> dict[str, Any]:
    """The `judge` section of a recipe, as a mapping."""
    return {"endpoints": [server.url], "image_format": "png", "timeout_s": 10.0} | changes


# ---- questions to it -------------------------------------------------------------------------------------------------


class Asker(NamedTuple):
    """A judge and the templates of the question."""

    judge: Judge
    templates: PairTemplates

    def submit(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Future[Answer]:
        """Ask about one pair without waiting."""
        return loop_thread().submit(self.judge.ask(self.templates.query(prompt, first, second, source)))

    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[tuple[int, int]], source: Sequence[Media] = ()
    ) -> list[Answer]:
        """Ask about pairs of `media`, and wait for the answers."""
        return self.judge.ask_all([self.templates.query(prompt, media[i], media[j], source) for i, j in pairs])


def asker(judge: Judge | JudgeConfig, template: str = "compare", shown: Shown = SHOWN) -> Asker:
    """An open judge, or that of a config, with a template."""
    return Asker(open_judge(judge), load_pair_templates(template, shown=shown))


# ---- servers of rewards ----------------------------------------------------------------------------------------------

TESTS = Path(__file__).resolve().parent
MOODY = "servers:Moody"


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
        return [self._one(s, len(asked)) for (s,) in asked]

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


# ---- as a process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve in the foreground until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--answers", type=int, default=-1, help="hang after so many chat requests")
    parser.add_argument("--served-model-name", default=MODEL)
    for limit in ("rate", "burst", "queue"):
        parser.add_argument(f"--{limit}", type=float, default=math.inf)
    args, _ = parser.parse_known_args()
    server = Limited(port=args.port, delay_s=args.delay)
    server.rate = args.rate
    server.burst = args.burst
    server.queue = args.queue
    server.model = args.served_model_name
    server.hang_after = args.answers

    async def serve() -> None:
        await server.start()
        print(f"serving on {server.url}, pid {os.getpid()}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
