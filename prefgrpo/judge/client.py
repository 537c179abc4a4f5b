"""Judges answer questions: a template, the texts and media of its markers, and the source images of an edit.

`HttpJudge` asks OpenAI-compatible servers: primarily vLLM, others as far as they support what is needed. Temperature 0,
each medium encoded once. Invariant: every question ends, in bounded time, with an answer or a reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import did_you_mean
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.answers import first_choice, read
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.http import PATIENCE_S, Endpoint, Failure, HttpPool, JudgeError, Kind, Starting
from prefgrpo.judge.template import PAIR_ANSWERS, Query, Template, chat_body
from prefgrpo.judge.tokens import KNOWN, missing_space, refusal, served_tokens
from prefgrpo.judge.uploads import Encoded, EncodeError, Encodings, MediaIds, NotHeld, encode, takes_ids


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
    async def ask(self, query: Query, once: bool = False) -> Answer:
        """The answer to one question. Never raises; runs on the event loop of the process.

        once: identical questions may share one request and its answer, as long as the first medium is alive.
        """

    @abstractmethod
    def ask_all(self, queries: Sequence[Query]) -> list[Answer]:
        """The answers to questions, in order; waits for them."""

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


@dataclass(frozen=True, eq=False)
class EncodedQuery:
    """A question whose media are encoded. It holds no Media: the traceback of a failure would keep them alive."""

    template: Template
    texts: Mapping[str, str]
    media: list[Encoded]
    source: list[Encoded]

    @property
    def key(self) -> Hashable:
        """Equal for identical questions."""
        uuids = tuple(one.uuid for one in (*self.media, *self.source))
        return self.template, tuple(sorted(self.texts.items())), len(self.media), uuids

    def body(self, model: str, carried: set[Encoded] | None, space: int | None) -> bytes:
        """The request with the data of `carried`, and the ids of all; None: with data only."""
        media = [one.part(carried) for one in self.media]
        source = [one.part(carried) for one in self.source]
        return chat_body(model, self.template, self.texts, media, source, space)


class Server:
    """One server of an HttpJudge: how it reads texts, and which media it holds."""

    def __init__(self, endpoint: Endpoint, path: str) -> None:
        """path: what precedes /models."""
        self.endpoint = endpoint
        self.models = path + "/models"
        self.chat = path + "/chat/completions"
        self.special = KNOWN
        """Finds the special tokens of its model."""
        self.ids = MediaIds()
        self.spaces: dict[Template, asyncio.Future[int | None]] = {}
        """Template → token that it must write between the prefill and the label."""

    async def ask(self, model: str, question: EncodedQuery, timeout_s: float) -> Answer:
        """The answer to one request. Raises Failure, or Unreadable for a reply that is no chat completion."""
        template = question.template
        if reason := refusal(self.special, template.parts(question.texts)):
            raise Failure(reason, Kind.GIVE_UP)
        space = await self._space(model, template, timeout_s)
        try:
            async with self.ids.sending({*question.media, *question.source}) as carried:
                reply = await self.endpoint.post(self.chat, question.body(model, carried, space), timeout_s)
        except NotHeld:
            reply = await self.endpoint.post(self.chat, question.body(model, None, space), timeout_s)
        return read(template, first_choice(self.endpoint.url, reply), space is not None)

    async def _space(self, model: str, template: Template, timeout_s: float) -> int | None:
        """`missing_space`, determined once per template."""
        known = self.spaces.get(template)
        if known is None or (known.done() and known.exception()):
            known = asyncio.ensure_future(missing_space(self.endpoint, self.chat, model, template, timeout_s))
            self.spaces[template] = known
        return await asyncio.shield(known)

    async def learn(self) -> None:
        """Find out what it can do, once it is known to serve the model."""
        _, version = await self.endpoint.get("/version")
        if self.endpoint.problem:  # it may have restarted: it holds nothing
            self.ids = MediaIds()
            self.spaces = {}
        self.ids.supported = takes_ids(version)
        status, tokenizer = await self.endpoint.get("/tokenizer_info")
        self.special = (served_tokens(tokenizer) if status == 200 else None) or KNOWN


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
        self.servers = {e.url: Server(e, _api_path(url)) for e, url in zip(self.pool.endpoints, urls, strict=True)}
        self.encodings = Encodings(encode)
        self._asked: WeakKeyDictionary[Media, dict[Hashable, asyncio.Future[Answer]]] = WeakKeyDictionary()

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

    def ask_all(self, queries: Sequence[Query]) -> list[Answer]:
        """As in Judge: all at once."""
        return [answer.result() for answer in [loop_thread().submit(self.ask(query)) for query in queries]]

    async def ask(self, query: Query, once: bool = False) -> Answer:
        """As in Judge."""
        start = time.monotonic()
        if query.lacks_source:
            return Answer(None, query.lacks_source)
        try:
            question = await self._encoded(query)
        except EncodeError as error:
            return Answer(None, str(error), seconds=time.monotonic() - start)
        if not once or not query.media:
            return await self._request(question)
        asked = self._asked.setdefault(query.media[0], {})
        key = question.key
        if key not in asked or (asked[key].done() and asked[key].result().reason):
            asked[key] = asyncio.ensure_future(self._request(question))
        return await asyncio.shield(asked[key])

    async def _encoded(self, query: Query) -> EncodedQuery:
        """The question as the servers get it. Raises EncodeError."""
        template = query.template
        how = (self.config.image_format, template.frames, template.max_pixels)
        media = [await self.encodings.get(medium, *how) for medium in query.media]
        source = [await self.encodings.get(medium, *how) for medium in query.source] if template.takes_source else []
        return EncodedQuery(template, query.texts, media, source)

    async def _request(self, question: EncodedQuery) -> Answer:
        """Send a question to the best server, until it is answered or given up."""
        start = time.monotonic()
        timeout_s = self.config.timeout_s or question.template.timeout_s

        async def attempt(endpoint: Endpoint) -> Answer:
            return await self.servers[endpoint.url].ask(self.model, question, timeout_s)

        try:
            answer, retries = await self.pool.send(attempt, key=question.texts.get("prompt", ""))
        except Failure as error:
            return Answer(None, str(error), seconds=time.monotonic() - start)
        return replace(answer, seconds=time.monotonic() - start, retries=retries)

    async def _check(self, endpoint: Endpoint) -> str:
        """Why a server must not be asked: it is down, or serves another model, which some servers do not refuse."""
        server = self.servers[endpoint.url]
        status, _ = await endpoint.get("/health")
        if status >= 500:  # not every server implements it
            raise Starting(f"/health answered {status}")
        status, raw = await endpoint.get(server.models)
        if status >= 500:
            raise Starting(f"{server.models} answered {status}")
        served = _models(raw) if status == 200 else []
        refused = status in (401, 403)
        if refused or not (served or self.config.model):
            key = "; is api_key_env the environment variable of its key?" if refused else ""
            found = f"{server.models} answered {status}{key}"
            return f"lists no model: {found}; expected an OpenAI-compatible server or judge.model"
        if not self.model and len(served) > 1:
            return f"serves several models ({', '.join(served)}); set the judge's model to one of them"
        model = self.model or served[0]
        if served and model not in served:
            hint = did_you_mean(model, served)
            return f"serves {', '.join(served)}, not '{model}'{hint}; set the judge's model to a served name"
        self.model = model
        await server.learn()
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


def _api_path(url: str) -> str:
    """What precedes /models: /v1, unless the address has a path of its own, which ends otherwise."""
    path = urlsplit(url).path
    return "/v1" if not path or path.endswith("/v1") else ""


def _models(raw: bytes) -> list[str]:
    """The models in a reply of /v1/models, {"data": […]} or only the list; none in another reply."""
    try:
        value = json.loads(raw)
        return [str(row["id"]) for row in (value if isinstance(value, list) else value["data"])]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
