"""The judge behind an OpenAI-compatible server: vLLM first, others as far as they answer.

`Client.ask` puts any question, a template with texts and media, and reads the answer as the template says; a judge of
pairs is a thin layer on it. Temperature 0, rubric and caption before the images, each medium encoded once.
Invariant: every question ends, in bounded time, with an answer or a reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from prefgrpo.data.media import Media
from prefgrpo.judge import answers
from prefgrpo.judge.body import FORMATS, Encoded, encode, request_kind
from prefgrpo.judge.cache import shared_cache
from prefgrpo.judge.endpoint import Endpoint, describe_error
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.send import SendConfig, Sender, SendError
from prefgrpo.judge.template import Template, label_ids, load_template, shipped
from prefgrpo.judge.traffic import TRAFFIC
from prefgrpo.judge.verdict import Answer, Pair, PairJudge, Verdict, two_label_softmax

_PATH = "/v1/chat/completions"
_SMALL = 3 * 256 * 256
"""Numbers of a medium up to which handing it to another thread takes longer than encoding it."""
_CUT = ("length", "abort", "content_filter", "error")
"""Reasons for which an answer has no end."""
T = TypeVar("T")


@dataclass(frozen=True)
class HttpJudgeConfig(SendConfig):
    """The judge behind HTTP."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """OpenAI-compatible servers of the same model, with or without /v1; the least loaded one is asked."""
    model: str = ""
    """Served model name; empty: the only model that the server has."""
    template: str = ""
    """Name of a shipped template or path to one, '' for that of whatever asks (a pair: compare); clips are shown by
    its sibling NAME_video if that is shipped."""
    tokenizer: str = ""
    """Folder or hub id of the judge's tokenizer: asks for the labels' own ids instead of the 20 likeliest tokens."""
    image_format: str = "jpeg"
    """jpeg (quality 95), webp or png (lossless)."""
    min_label_mass: float = 0.01
    """A soft verdict is missing if the two labels together have less probability than this."""
    seed: int = 0
    """Sampling seed sent with every request."""
    max_pixels: int = 2048 * 2048
    """Larger images are made smaller before they are sent; 0: never."""
    cache: str = ""
    """Folder of answers kept for a resumed run, which are not asked again; empty: none."""

    def mistakes(self) -> list[str]:
        """What is out of range, in words."""
        bad = super().mistakes()
        if self.image_format not in FORMATS:
            bad.append(f"image_format must be one of {', '.join(FORMATS)}, got {self.image_format!r}")
        if self.max_pixels < 0:
            bad.append(f"max_pixels must be 0 or more, got {self.max_pixels}")
        return bad


class Client:
    """Asks one or several servers of one model; questions may come from any thread."""

    def __init__(self, config: HttpJudgeConfig) -> None:
        self.config = config
        self.sender = Sender(config)
        self._cache = shared_cache(config.cache) if config.cache else None
        self.users = 0
        self._thread = loop_thread()
        self._tokenizer: Any = None
        self._answers_as = ""
        self._label_ids: dict[Template, tuple[int, ...] | None] = {}
        self._encodings: WeakKeyDictionary[Media, asyncio.Future[Encoded]] = WeakKeyDictionary()
        self._asked: WeakKeyDictionary[Media, dict[_Key, _Shared]] = WeakKeyDictionary()

    def ask(
        self,
        template: Template,
        values: Mapping[str, str],
        media: Sequence[Media],
        source: Sequence[Media] = (),
        once: bool = False,
    ) -> Future[Answer]:
        """Put one question; the future always ends with an Answer unless it is cancelled.

        values: texts of the template's markers by name; media: for {media_1} …; source: for {source}.
        once: the same question about the same medium is asked once while the medium lives and shares its answer.
        """
        self.prepare(template)
        return self._thread.submit(self.answer(template, dict(values), tuple(media), tuple(source), once))

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of several questions (`answer`) on the loop."""
        return self._thread.submit(work)

    def prepare(self, template: Template) -> None:
        """Find the labels' token ids where the judge's tokenizer is known; JudgeError if they have none."""
        if template not in self._label_ids:
            self._label_ids[template] = self._ids(template)

    def close(self) -> None:
        """One user less; stops probing after the last (the process's connection pool stays for others)."""
        self.users -= 1
        if self.users <= 0:
            self.sender.close()

    def _ids(self, template: Template) -> tuple[int, ...] | None:
        if not self.config.tokenizer or template.labels is None or template.answer != "soft":
            return None
        if self._tokenizer is None:
            from transformers import AutoTokenizer  # only where it is asked for

            self._tokenizer = AutoTokenizer.from_pretrained(self.config.tokenizer)
        first, second = label_ids(self._tokenizer, template)
        return first + second

    async def answer(
        self,
        template: Template,
        values: Mapping[str, str],
        media: Sequence[Media],
        source: Sequence[Media] = (),
        once: bool = False,
    ) -> Answer:
        """`ask` for those who are on the loop (see `run`) and have prepared the template."""
        start = time.monotonic()
        if template.takes_source and not source:
            return Answer(None, f"template '{template.name}' shows the source image, and the sample has none")
        try:
            shown = [await self._encoded(m) for m in media]
            before = [await self._encoded(m) for m in source] if template.takes_source else []
        except (OSError, ValueError, TypeError, SystemError) as error:  # what PIL raises for pixels it cannot write
            reason = f"an image could not be encoded ({describe_error(error)})"
            return Answer(None, reason, time.monotonic() - start)
        if not once or not media:
            return await self._request(template, values, shown, before)
        key = (template, tuple(sorted(values.items())), tuple(e.uuid for e in shown), tuple(e.uuid for e in before))
        asked = self._asked.setdefault(media[0], {})
        if key not in asked or asked[key].failed:
            asked[key] = _Shared(asyncio.ensure_future(self._request(template, values, shown, before)))
        return await asked[key].answer()

    async def _encoded(self, media: Media) -> Encoded:
        """The medium's request parts, encoded once; a large one off the loop."""
        if media not in self._encodings:
            work = partial(encode, media, self.config.image_format, self.config.max_pixels)
            loop = asyncio.get_running_loop()
            if media.pixels.size > _SMALL:
                self._encodings[media] = loop.run_in_executor(None, work)
            else:
                found = loop.create_future()
                found.set_result(work())
                self._encodings[media] = found
        return await asyncio.shield(self._encodings[media])

    async def _request(
        self, template: Template, values: Mapping[str, str], media: list[Encoded], source: list[Encoded]
    ) -> Answer:
        """The kept answer to a question; else send it, read what comes, and keep that."""
        start, texts = time.monotonic(), dict(values)
        TRAFFIC["questions"] += 1
        prompt = texts.pop("prompt", "")

        def body(model: str, vllm: bool, carried: Collection[str] | None) -> bytes:
            kind = request_kind(model, template, self.config.seed, self._label_ids[template], vllm)
            shown, before = ([_part(e, carried) for e in group] for group in (media, source))
            return kind.body(prompt, shown, before, texts)

        def write(endpoint: Endpoint, carried: Collection[str] | None) -> bytes:
            return body(self.sender.model, endpoint.vllm, carried)

        key = ""
        if self._cache is not None and (model := await self.sender.named()):
            t = template
            rule = (t.answer, t.labels, t.variants, t.scores, t.pattern, self.config.min_label_mass)
            key = hashlib.sha256(body(model, True, ()) + repr(rule).encode()).hexdigest()[:32]
            if kept := self._cache.get(key):
                TRAFFIC["cache_hits"] += 1
                return replace(kept, latency_s=time.monotonic() - start)
        try:
            uuids = [e.uuid for e in (*media, *source)]
            reply = await self.sender.send(_PATH, write, self._choice, uuids, template.timeout_s)
        except SendError as error:
            return Answer(None, str(error), time.monotonic() - start, retries=error.retries)
        found = Answer(None, "", time.monotonic() - start, retries=reply.retries)
        try:
            found = read(template, reply.value, found, self.config.min_label_mass)
        except answers.Unreadable as error:
            found = replace(found, reason=str(error))
        if self._cache is not None and key:
            self._cache.put(key, found)
        if found.reason:
            TRAFFIC.update(unread=1, wasted_us=reply.spent_us)
        return found

    def _choice(self, url: str, payload: bytes) -> dict[str, Any]:
        """The first choice; Unreadable if it is neither of the model that was asked nor of the one, under whatever
        name (a proxy may have its own), that answered first."""
        found, told = first_choice(url, payload)
        self._answers_as = self._answers_as or told
        if told not in ("", self._answers_as) and not _same_model(self.sender.model, told):
            raise answers.Unreadable(
                f"{url} was asked for the model '{self.sender.model}', and '{told[:80]}' answered, not "
                f"'{self._answers_as[:80]}' as before: expected one model throughout a run"
            )
        return found


_Key = tuple[Template, tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]
"""(template, texts, media ids, source ids) of a question."""


class _Shared:
    """A question that several may have asked; it is given up when the last of them cancels."""

    def __init__(self, task: asyncio.Future[Answer]) -> None:
        self.task, self.waiting, self.given_up = task, 0, False

    @property
    def failed(self) -> bool:
        """Whether asking again may bring more."""
        return self.given_up or (self.task.done() and (self.task.cancelled() or bool(self.task.result().reason)))

    async def answer(self) -> Answer:
        self.waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if not self.waiting and not self.task.done():
                self.given_up = self.task.cancel()  # who asks a moment later asks anew


class HttpJudge(PairJudge):
    """Asks one or several servers which of two media is better; pairs may be submitted from any thread."""

    streams = True
    clips = True

    def __init__(self, config: HttpJudgeConfig) -> None:
        name = config.template or "compare"
        self.config, self.template, video = config, load_template(name), f"{name}_video"
        self.clip_template = load_template(video) if video in shipped() else self.template
        self.client = shared_client(config)
        self.answer_s = config.timeout_s or max(self.template.timeout_s, self.clip_template.timeout_s)
        self.client.prepare(self.template)
        self.client.prepare(self.clip_template)

    def submit(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Future[Verdict]:
        """Send one pair; the future always ends with a Verdict unless it is cancelled."""
        template = self.clip_template if first.clip or second.clip else self.template
        return loop_thread().submit(self._judge(template, prompt, (first, second), tuple(source)))

    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Verdict]:
        """All pairs at once; waits for the answers."""
        futures = [self.submit(prompt, media[i], media[j], source) for i, j in pairs]
        return [f.result() for f in futures]

    def close(self) -> None:
        """Let the client go."""
        self.client.close()

    async def _judge(
        self, template: Template, prompt: str, pair: tuple[Media, Media], source: tuple[Media, ...]
    ) -> Verdict:
        a = await self.client.answer(template, {"prompt": prompt}, pair, source)
        reason = a.reason or ("" if a.value is not None else f"template '{template.name}' asks for no verdict")
        return Verdict(a.value, reason, a.latency_s, a.raw, a.retries, a.parts, a.cached)


_clients: WeakValueDictionary[tuple[int, HttpJudgeConfig], Client] = WeakValueDictionary()
_lock = threading.Lock()


def shared_client(config: HttpJudgeConfig) -> Client:
    """This process's client for a config's servers and options, whatever its template; `close` it when done."""
    key = replace(config, endpoints=tuple(config.endpoints), template="")
    with _lock:
        client = _clients.get((os.getpid(), key))
        if client is None:
            client = _clients[os.getpid(), key] = Client(key)
        client.users += 1
        return client


def _part(medium: Encoded, carried: Collection[str] | None) -> bytes:
    """A medium's content part: plain where no ids are used, with data or by its id."""
    if carried is None:
        return medium.plain
    return medium.with_data if medium.uuid in carried else medium.id_only


def first_choice(url: str, payload: bytes) -> tuple[dict[str, Any], str]:
    """(the first choice of a chat completion, the name of the model that made it or ''); Unreadable without one."""
    try:
        value = json.loads(payload)
        choices = value["choices"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise answers.Unreadable(
            f"{url} sent no readable chat completion ({describe_error(error)}): {payload[:80]!r}"
        ) from error
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise answers.Unreadable(f"{url} sent a chat completion without choices")
    told = value.get("model")
    return choices[0], told if isinstance(told, str) else ""


def _same_model(asked: str, told: str) -> bool:
    """Whether a name is the one asked for, up to its folder and a date after it (gpt-4o, gpt-4o-2024-08-06)."""
    asked, told = (name.rstrip("/").rpartition("/")[2].casefold() for name in (asked, told))
    rest = told.removeprefix(asked)
    return told == asked or (rest != told and re.fullmatch(r"[-@:](latest|\d[\d.-]*)", rest) is not None)


def read(template: Template, choice: Mapping[str, Any], found: Answer, min_label_mass: float) -> Answer:
    """`found` with what a choice says under the template; Unreadable if there is nothing to read."""
    if template.answer == "soft" and template.labels:
        first, second = answers.label_logprobs(choice, template.labels, template.variants)
        value, reason = two_label_softmax(first, second, min_label_mass)
        return replace(found, value=value, reason=reason, raw=f"logp {first:.4f} {second:.4f}")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str):
        raise answers.Unreadable("the server's answer has no text")
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be written to a log
    try:
        value, parts = answers.read(template, text, choice.get("finish_reason") in _CUT)
    except answers.Unreadable as error:
        return replace(found, reason=str(error), raw=text)
    return replace(
        found, value=value, parts=parts, raw=answers.after_thoughts(text) if template.answer == "text" else text
    )
