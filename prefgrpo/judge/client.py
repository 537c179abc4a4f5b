"""A judge behind an OpenAI-compatible server: primarily vLLM, others as far as they support what is needed.

`JudgeClient.answer` asks any question (a template with texts and media) and parses the answer as the template
specifies; `HttpJudge` is a thin pairwise layer on top. Temperature 0, each medium encoded once. Invariant: every
question ends, in bounded time, with an answer or a reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge import answers, traffic
from prefgrpo.judge.body import Encoded, EncodeError, Encodings, chat_body, encode
from prefgrpo.judge.endpoint import describe_error
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.pool import HttpPool, SendError
from prefgrpo.judge.template import Template, load_template, shipped_templates
from prefgrpo.judge.verdict import MIN_LABEL_MASS, Answer, Pair, PairJudge, Verdict, two_label_softmax

_PATH = "/v1/chat/completions"
MAX_PIXELS = 2048 * 2048
"""Larger images are sent smaller."""
_CUT = ("length", "abort", "content_filter", "error")
"""Finish reasons of a truncated answer."""
T = TypeVar("T")
_Key = tuple[Template, tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]
"""(template, texts, media ids, source ids) of a question."""


class JudgeClient:
    """Sends questions to one or several servers of the same model; can be used from any thread."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.pool = HttpPool(config)
        self.users = 0
        self._first_model = ""
        options = config.chat_template_kwargs
        self._options: dict[str, Any] = {"chat_template_kwargs": options} if options else {}
        self.encodings = Encodings(lambda media: encode(media, config.image_format, MAX_PIXELS))
        self._asked: WeakKeyDictionary[Media, dict[_Key, _Shared]] = WeakKeyDictionary()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine that calls `answer` on the event loop."""
        return loop_thread().submit(work)

    def close(self) -> None:
        """Drop one user; the last one stops health probes (the process's connection pool stays open for others)."""
        self.users -= 1
        if self.users <= 0:
            self.pool.close()

    async def answer(
        self,
        template: Template,
        values: Mapping[str, str],
        media: Sequence[Media],
        source: Sequence[Media] = (),
        once: bool = False,
    ) -> Answer:
        """The answer to one question. Never raises; runs on the event loop (`run`).

        values: texts of the template's markers by name; media: for {media_1} …; source: for {source}.
        once: identical questions share one request and its answer, as long as the first medium is alive.
        """
        start = time.monotonic()
        if template.takes_source and not source:
            return Answer(None, f"template '{template.name}' needs a source image, but the sample has none")
        try:
            shown = [await self.encodings.get(m) for m in media]
            before = [await self.encodings.get(m) for m in source] if template.takes_source else []
        except EncodeError as error:
            return Answer(None, str(error), time.monotonic() - start)
        if not once or not media:
            return await self._request(template, values, shown, before)
        key = (template, tuple(sorted(values.items())), tuple(e.uuid for e in shown), tuple(e.uuid for e in before))
        asked = self._asked.setdefault(media[0], {})
        if key not in asked or asked[key].failed:
            asked[key] = _Shared(asyncio.ensure_future(self._request(template, values, shown, before)))
        return await asked[key].answer()

    async def _request(
        self, template: Template, values: Mapping[str, str], media: list[Encoded], source: list[Encoded]
    ) -> Answer:
        """Send a question and parse the answer."""
        start = time.monotonic()
        traffic.count(questions=1)

        def write(carried: Collection[str] | None) -> bytes:
            shown = [e.part(carried) for e in media]
            before = [e.part(carried) for e in source]
            return chat_body(self.pool.model, template, values, shown, before, self._options)

        try:
            uuids = [e.uuid for e in (*media, *source)]
            reply = await self.pool.send(_PATH, write, self._choice, uuids, template.timeout_s)
        except SendError as error:
            return Answer(None, str(error), time.monotonic() - start, retries=error.retries)
        answer = Answer(None, "", time.monotonic() - start, retries=reply.retries)
        try:
            answer = read(template, reply.value, answer)
        except answers.Unreadable as error:
            answer = replace(answer, reason=str(error))
        if answer.reason:
            traffic.count(unread=1, wasted_us=reply.spent_us)
        return answer

    def _choice(self, url: str, payload: bytes) -> dict[str, Any]:
        """The first choice; Unreadable unless the reply names the requested model or the one in the first reply (a
        proxy may use a different name)."""
        choice, model = first_choice(url, payload)
        self._first_model = self._first_model or model
        if model not in ("", self._first_model, self.pool.model):
            raise answers.Unreadable(
                f"{url}: the model '{self.pool.model}' was requested and '{model[:80]}' answered, before that "
                f"'{self._first_model[:80]}'; expected one model throughout a run"
            )
        return choice


class _Shared:
    """A request shared by several callers; it is cancelled when the last of them cancels."""

    def __init__(self, task: asyncio.Future[Answer]) -> None:
        self.task = task
        self.waiting = 0
        self.given_up = False

    @property
    def failed(self) -> bool:
        """Whether the question has to be asked again."""
        return self.given_up or (self.task.done() and (self.task.cancelled() or bool(self.task.result().reason)))

    async def answer(self) -> Answer:
        self.waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if not self.waiting and not self.task.done():
                self.given_up = self.task.cancel()


class HttpJudge(PairJudge):
    """Asks one or several servers which of two media is better; pairs may be submitted from any thread.

    For clips, the template NAME_video is used if it is shipped.
    """

    streams = True
    clips = True

    def __init__(self, config: JudgeConfig, template: str = "compare") -> None:
        video = f"{template}_video"
        self.config = config
        self.template = load_template(template, prompt=config.prompt)
        self.clip_template = self.template
        if video in shipped_templates():
            self.clip_template = load_template(video, prompt=config.prompt)
        self.client = shared_client(config)
        self.answer_s = config.timeout_s or max(self.template.timeout_s, self.clip_template.timeout_s)

    def submit(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Future[Verdict]:
        """Send one pair; the future always ends with a Verdict unless it is cancelled."""
        template = self.clip_template if first.clip or second.clip else self.template
        return self.client.run(self._judge(template, prompt, (first, second), tuple(source)))

    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Verdict]:
        """Submit all pairs at once and wait for the verdicts."""
        futures = [self.submit(prompt, media[i], media[j], source) for i, j in pairs]
        return [f.result() for f in futures]

    def close(self) -> None:
        """Release the client."""
        self.client.close()

    async def _judge(
        self, template: Template, prompt: str, pair: tuple[Media, Media], source: tuple[Media, ...]
    ) -> Verdict:
        return Verdict(**vars(await self.client.answer(template, {"prompt": prompt}, pair, source)))


_clients: WeakValueDictionary[tuple[int, str], JudgeClient] = WeakValueDictionary()
_lock = threading.Lock()


def shared_client(config: JudgeConfig) -> JudgeClient:
    """This process's client for a config's servers and options. Call `close` when done."""
    config = replace(config, endpoints=tuple(config.endpoints))
    key = (os.getpid(), repr(config))
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = JudgeClient(config)
        client.users += 1
        return client


def first_choice(url: str, payload: bytes) -> tuple[dict[str, Any], str]:
    """(first choice of a chat completion, name of the model or ''); Unreadable if there is no choice."""
    try:
        value = json.loads(payload)
        choices = value["choices"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise answers.Unreadable(
            f"{url} sent no readable chat completion ({describe_error(error)}): {payload[:80]!r}"
        ) from error
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise answers.Unreadable(f"{url} sent a chat completion without choices")
    model = value.get("model")
    return choices[0], model if isinstance(model, str) else ""


def read(template: Template, choice: Mapping[str, Any], answer: Answer) -> Answer:
    """`answer`, filled in from a choice as the template specifies; Unreadable if the choice contains nothing usable."""
    if template.answer == "soft" and template.labels:
        first, second = answers.label_logprobs(choice, template.labels, template.variants)
        value, reason = two_label_softmax(first, second, MIN_LABEL_MASS)
        return replace(answer, value=value, reason=reason, raw=f"logp {first:.4f} {second:.4f}")
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    text = message.get("content")
    if not isinstance(text, str) and (message.get("reasoning") or message.get("reasoning_content")):
        raise answers.Unreadable(
            f"the judge only thought, for max_tokens = {template.max_tokens}: {answers.NO_THINKING}"
        )
    if not isinstance(text, str):
        raise answers.Unreadable("the server's answer has no text")
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written to a log
    try:
        value, parts = answers.parse_answer(template, text, choice.get("finish_reason") in _CUT)
    except answers.Unreadable as error:
        return replace(answer, reason=str(error), raw=text)
    return replace(answer, value=value, parts=parts, raw=text)
