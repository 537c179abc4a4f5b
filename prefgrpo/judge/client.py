"""Judges answer questions: a template, the texts and media of its markers, and the source images of an edit.

`HttpJudge` asks OpenAI-compatible servers: primarily vLLM, others as far as they support what is needed. Temperature 0,
each medium encoded once. Invariant: every question ends, in bounded time, with an answer or a reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import did_you_mean
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge import answers
from prefgrpo.judge.answers import MIN_LABEL_MASS, two_label_softmax
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.http import PATIENCE_S, Endpoint, Failure, HttpPool, JudgeError, Kind, Starting, describe_error
from prefgrpo.judge.media_ids import MediaIds, NotHeld, takes_ids
from prefgrpo.judge.prefill import missing_space
from prefgrpo.judge.request import Encoded, EncodeError, Encodings, chat_body, encode
from prefgrpo.judge.special_tokens import KNOWN, refusal, served_tokens
from prefgrpo.judge.template import PAIR_ANSWERS, Template

_CUT = ("length", "abort", "content_filter", "error")
"""Finish reasons of a truncated answer."""
_Key = tuple[Template, tuple[tuple[str, str], ...], int, tuple[str, ...]]
"""(template, texts, number of media, ids of media and sources) of a question."""


class Judge(ABC):
    """Answers questions about media. An answer's value is P(first label); None if the template asks for parts only."""

    model: str
    """What answers."""
    streams: bool
    """True: questions may be asked one by one. False: those of a prompt share work, and `ask_all` should get all."""
    clips: bool
    """Whether it accepts videos."""
    timeout_s: float | None = None
    """Timeout of one answer in seconds, instead of the template's."""

    @abstractmethod
    async def ask(
        self,
        template: Template,
        texts: Mapping[str, str],
        media: Sequence[Media],
        source: Sequence[Media] = (),
        once: bool = False,
    ) -> Answer:
        """The answer to one question. Never raises; runs on the event loop of the process.

        texts: of the template's markers by name; media: for {media_1} …; source: for {source}. once: identical
        questions may share one request and its answer, as long as the first medium is alive.
        """

    @abstractmethod
    def ask_all(
        self,
        template: Template,
        texts: Mapping[str, str],
        asked: Sequence[Sequence[Media]],
        source: Sequence[Media] = (),
    ) -> list[Answer]:
        """Answers to the same question about several tuples of media, in order; waits for them."""

    def check(self, template: Template) -> None:  # noqa: B027  (most can answer all)
        """Raise JudgeError for a template that it cannot answer."""

    def reach(self, wait_s: float | None = None, say: Callable[[str], object] = print) -> dict[str, str]:
        """Why each of its servers cannot be used, or ''. Raises JudgeError if it has servers and none can.

        wait_s: longest wait for servers that are not up yet; None: as long as a run's requests wait for one. say: gets
        lines about the wait.
        """
        del wait_s, say
        return {}

    def apart(self, wait_s: float | None = None) -> dict[str, Judge]:
        """A judge for each of its servers, by address, that waits at most `wait_s` while it is busy (None: as long as
        this one); itself if it has none."""
        del wait_s
        return {"in this process": self}


class HttpJudge(Judge):
    """Asks one or several servers of the same model; can be used from any thread."""

    streams = True
    clips = True

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.model = config.model
        self.timeout_s = config.timeout_s
        urls = [url.rstrip("/") for url in config.endpoints]
        self.pool = HttpPool(
            [url.removesuffix("/v1") for url in urls],
            self._check,
            concurrency=config.concurrency,
            patience_s=config.deadline_s or PATIENCE_S,
            key_env=config.api_key_env,
        )
        self._api = {e.url: _api_path(url) for e, url in zip(self.pool.endpoints, urls, strict=True)}
        self.ids = {endpoint.url: MediaIds() for endpoint in self.pool.endpoints}
        self.special = {endpoint.url: KNOWN for endpoint in self.pool.endpoints}
        """Server → a pattern that finds its model's special tokens."""
        self.spaces: dict[str, dict[Template, asyncio.Future[int | None]]] = {e.url: {} for e in self.pool.endpoints}
        """Server → template → token that it must write between the prefill and the label."""
        self.encodings = Encodings(encode)
        self._asked: WeakKeyDictionary[Media, dict[_Key, asyncio.Future[Answer]]] = WeakKeyDictionary()

    def reach(self, wait_s: float | None = None, say: Callable[[str], object] = print) -> dict[str, str]:
        """As in Judge; afterwards `model` is what the servers serve."""
        wait_s = self.pool.patience_s if wait_s is None else wait_s
        problems = loop_thread().submit(self.pool.until_usable(wait_s, say)).result()
        found = dict(zip(self.config.endpoints, problems, strict=True))
        if all(problems):
            raise JudgeError(
                f"the judge cannot be used. {' | '.join(f'{url}: {problem}' for url, problem in found.items())}\n"
                "Start a server with 'prefgrpo judge serve', or correct the judge's endpoints"
            )
        return found

    def apart(self, wait_s: float | None = None) -> dict[str, Judge]:
        """As in Judge."""
        alone = replace(self.config, model=self.model, deadline_s=wait_s or self.config.deadline_s)
        return {url: HttpJudge(replace(alone, endpoints=(url,))) for url in self.config.endpoints}

    def ask_all(
        self,
        template: Template,
        texts: Mapping[str, str],
        asked: Sequence[Sequence[Media]],
        source: Sequence[Media] = (),
    ) -> list[Answer]:
        """As in Judge: all at once."""
        sent = [loop_thread().submit(self.ask(template, texts, media, source)) for media in asked]
        return [answer.result() for answer in sent]

    async def ask(
        self,
        template: Template,
        texts: Mapping[str, str],
        media: Sequence[Media],
        source: Sequence[Media] = (),
        once: bool = False,
    ) -> Answer:
        """As in Judge."""
        start = time.monotonic()
        if template.takes_source and not source:
            return Answer(None, f"template '{template.name}' needs a source image, but the sample has none")
        how = (self.config.image_format, template.frames, template.max_pixels)
        try:
            encoded = [await self.encodings.get(m, *how) for m in media]
            sources = [await self.encodings.get(m, *how) for m in source] if template.takes_source else []
        except EncodeError as error:
            return Answer(None, str(error), seconds=time.monotonic() - start)
        if not once or not media:
            return await self._request(template, texts, encoded, sources)
        uuids = tuple(e.uuid for e in (*encoded, *sources))
        key = (template, tuple(sorted(texts.items())), len(encoded), uuids)
        asked = self._asked.setdefault(media[0], {})
        if key not in asked or (asked[key].done() and asked[key].result().reason):
            asked[key] = asyncio.ensure_future(self._request(template, texts, encoded, sources))
        return await asyncio.shield(asked[key])

    async def _request(
        self, template: Template, texts: Mapping[str, str], media: list[Encoded], source: list[Encoded]
    ) -> Answer:
        """Send a question and parse the answer."""
        start = time.monotonic()
        timeout_s = self.config.timeout_s or template.timeout_s

        def body(carried: set[Encoded] | None, space: int | None) -> bytes:
            parts, source_parts = ([e.part(carried) for e in some] for some in (media, source))
            return chat_body(self.model, template, texts, parts, source_parts, space)

        async def attempt(endpoint: Endpoint) -> Answer:
            if reason := refusal(self.special[endpoint.url], template.parts(texts)):
                raise Failure(reason, Kind.GIVE_UP)
            space = await self._space(endpoint, template, timeout_s)
            reply = await self._post(endpoint, partial(body, space=space), {*media, *source}, timeout_s)
            return read(template, first_choice(endpoint.url, reply), space is not None)

        try:
            verdict, retries = await self.pool.send(attempt, key=texts.get("prompt", ""))
        except Failure as error:
            return Answer(None, str(error), seconds=time.monotonic() - start)
        return replace(verdict, seconds=time.monotonic() - start, retries=retries)

    async def _space(self, endpoint: Endpoint, template: Template, timeout_s: float) -> int | None:
        """`missing_space`, determined once per server and template."""
        known = self.spaces[endpoint.url]
        if template not in known or (known[template].done() and known[template].exception()):
            path = self._api[endpoint.url] + "/chat/completions"
            known[template] = asyncio.ensure_future(missing_space(endpoint, path, self.model, template, timeout_s))
        return await asyncio.shield(known[template])

    async def _post(
        self, endpoint: Endpoint, body: Callable[[set[Encoded] | None], bytes], media: set[Encoded], timeout_s: float
    ) -> bytes:
        """The reply to a question, which names by id the media that the server holds."""
        path = self._api[endpoint.url] + "/chat/completions"
        try:
            async with self.ids[endpoint.url].sending(media) as carried:
                return await endpoint.post(path, body(carried), timeout_s)
        except NotHeld:
            return await endpoint.post(path, body(None), timeout_s)

    async def _check(self, endpoint: Endpoint) -> str:
        """Why a server must not be asked: it is down, or serves another model, which some servers do not refuse."""
        status, _ = await endpoint.get("/health")
        if status >= 500:  # not every server implements it
            raise Starting(f"/health answered {status}")
        path = self._api[endpoint.url] + "/models"
        status, raw = await endpoint.get(path)
        if status >= 500:
            raise Starting(f"{path} answered {status}")
        served = _models(raw) if status == 200 else []
        refused = status in (401, 403)
        if refused or not (served or self.config.model):
            key = "; is api_key_env the environment variable of its key?" if refused else ""
            return f"lists no model: {path} answered {status}{key}; expected an OpenAI-compatible server or judge.model"
        if not self.model and len(served) > 1:
            return f"serves several models ({', '.join(served)}); set the judge's model to one of them"
        model = self.model or served[0]
        if served and model not in served:
            hint = did_you_mean(model, served)
            return f"serves {', '.join(served)}, not '{model}'{hint}; set the judge's model to a served name"
        self.model = model
        _, version = await endpoint.get("/version")
        if endpoint.problem:  # it may have restarted: it holds nothing
            self.ids[endpoint.url] = MediaIds()
            self.spaces[endpoint.url] = {}
        self.ids[endpoint.url].supported = takes_ids(version)
        status, tokenizer = await endpoint.get("/tokenizer_info")
        self.special[endpoint.url] = (served_tokens(tokenizer) if status == 200 else None) or KNOWN
        return ""


_judges: WeakValueDictionary[str, Judge] = WeakValueDictionary()


def open_judge(
    judge: Judge | JudgeConfig | Mapping[str, Any], kinds: Sequence[str] = PAIR_ANSWERS, device: str = "auto"
) -> Judge:
    """The judge of a config, or of a mapping of its fields: over HTTP, or without endpoints a model that is loaded in
    this process on a torch `device`. Those of equal configs are one; an open judge is returned as it is.

    kinds: of answers that are wanted. Raises JudgeError for what cannot be such a judge; whether its servers answer is
    reported by `reach`.
    """
    if isinstance(judge, Judge):
        return judge
    config = judge if isinstance(judge, JudgeConfig) else section(JudgeConfig, judge, "judge")
    key = repr(replace(config, endpoints=tuple(config.endpoints))) if config.endpoints else f"{config.model} {device}"
    found = _judges.get(key)
    if found is None:
        if config.endpoints:
            found = HttpJudge(config)
        elif "soft" not in kinds:
            raise JudgeError(
                "this reward asks for a text, which a judge in this process does not write: serve one, and set "
                "judge.endpoints, and judge.model (its name, or empty)"
            )
        else:
            from prefgrpo.judge.local import LocalJudge  # imports transformers

            found = LocalJudge(config.model, device)
        _judges[key] = found
    return found


def first_choice(url: str, payload: bytes) -> dict[str, Any]:
    """The first choice of a chat completion; Unreadable if there is none."""
    try:
        choice = json.loads(payload)["choices"][0]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise answers.Unreadable(
            f"{url} sent no readable chat completion ({describe_error(error)}): {payload[:80]!r}"
        ) from error
    if not isinstance(choice, dict):
        raise answers.Unreadable(f"{url} sent a chat completion whose choice is no object: {payload[:80]!r}")
    return choice


def read(template: Template, choice: Mapping[str, Any], after_space: bool = False) -> Answer:
    """What a choice says, as the template specifies; missing, with the reason, if it contains nothing usable.

    after_space: the label is the second token.
    """
    message = choice.get("message")
    keys = ("content", "reasoning", "reasoning_content")
    text, *hidden = (_utf8(message.get(key)) if isinstance(message, dict) else None for key in keys)
    thoughts = hidden[0] or hidden[1]
    raw = _utf8(str(choice)[:200] if text is None else text) or ""
    if thoughts:
        raw = f"<think>{thoughts}</think>{text or ''}"
    try:
        if template.answer == "soft" and template.labels:
            first, second = answers.label_logprobs(choice, template.labels, template.variants, after_space)
            value, reason = two_label_softmax(first, second, MIN_LABEL_MASS)
            return Answer(value, reason, raw=f"logp {first:.4f} {second:.4f}")
        if template.answer == "word" and template.labels:
            return Answer(answers.word_probability(choice, template.labels))
        if text is None:
            only = f"the judge only thought, for max_tokens = {template.max_tokens}: {answers.NO_THINKING}"
            raise answers.Unreadable(only if thoughts else "the server's answer has no text")
        value, parts = answers.parse_answer(template, text, choice.get("finish_reason") in _CUT)
        return Answer(value, raw=raw, parts=parts)
    except answers.Unreadable as error:
        thinks = f"; the judge thinks first: {answers.NO_THINKING}" if thoughts and template.labels else ""
        return Answer(None, f"{error}{thinks}", raw=raw)


def _utf8(text: Any) -> str | None:
    """A text without lone surrogates, which cannot be written to a log; None for anything else."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def _api_path(url: str) -> str:
    """What precedes /chat/completions: /v1, unless the address has a path of its own, which ends otherwise."""
    path = urlsplit(url).path
    return "/v1" if not path or path.endswith("/v1") else ""


def _models(raw: bytes) -> list[str]:
    """The models in a reply of /v1/models, {"data": […]} or only the list; none in another reply."""
    try:
        value = json.loads(raw)
        return [str(row["id"]) for row in (value if isinstance(value, list) else value["data"])]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
