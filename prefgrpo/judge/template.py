"""Judge templates: YAML files with the user message, the markers for texts and media, and the format of the answer.

Their keys are the fields of `Template`. Markers ({prompt}, {media_1} …, {source}, other {name}s) are replaced literally
and only once: braces, quotes or markers inside a prompt are left alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError, did_you_mean, read_yaml
from prefgrpo.config.schema import STRICT
from prefgrpo.data.media import Media
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.published import published_template

_MARKER = re.compile(r"(\{[a-z][a-z0-9_]*\})")
_MEDIUM = re.compile(r"\{media_(\d+)\}")
_SHIPPED = Path(__file__).parent / "templates.yaml"
_MAX_TOKENS = {"soft": 1, "word": 1, "plain": 32, "think": 2048, "flex": 2048, "json": 1024, "marks": 4096}
"""Default longest answer by its kind; 512 for the others."""
PAIR_ANSWERS = ("soft", "plain", "think", "flex")
"""Kinds of answers that are a verdict on two media."""
PAIR = ("prompt", "media_1", "media_2")
"""Markers of a template that compares two media."""
OWN_FIELDS = frozenset({"messages", "model", "n", "stream"})
"""Fields of a request that a template cannot set."""
FRAMES = 8
MAX_PIXELS = 2048 * 2048
SOURCE = -1
"""Placeholder in `Template.parts` for the source images of an edit."""


class Shown(NamedTuple):
    """Maximum frames of a clip, and pixels of an image or frame, that a judge sees; None: as its template says."""

    frames: int | None = None
    max_pixels: int | None = None


SHOWN = Shown()


def _rows(scores: Any) -> Any:
    """{name: [low, high]} as rows."""
    pairs = scores.items() if isinstance(scores, dict) else ()
    return tuple((name, *limits) for name, limits in pairs if isinstance(limits, list)) or scores


def _fields(request: Any) -> str:
    """A mapping, or its JSON, as JSON, because templates are hashed."""
    fields = json.loads(request) if isinstance(request, str) else request
    if not isinstance(fields, dict) or OWN_FIELDS & fields.keys():
        raise ValueError(f"expected a mapping of fields other than {', '.join(sorted(OWN_FIELDS))}")
    return json.dumps(fields)


@dataclass(frozen=True, config=STRICT)
class Template:
    """A template: the keys of its file, and its name."""

    user: str
    prefill: str = ""
    """Text at the start of the assistant's turn."""
    labels: tuple[str, str] | None = None
    """The single tokens for 'first' and 'second', or 'yes' and 'no' (soft answers); two spellings of the right answer,
    set for each question (word)."""
    variants: bool | None = False
    """Tokens counted for a label: equal up to white space (False), up to white space and case (True), or exactly equal
    (None, for a reward that reproduces a published number)."""
    answer: Literal["", "soft", "word", "plain", "think", "flex", "scores", "json", "marks"] = ""
    """How the answer is parsed."""
    scores: Annotated[tuple[tuple[str, float, float], ...], BeforeValidator(_rows)] = ()
    """(name, lowest, highest) of each score in the answer, in order; in the file {name: [lowest, highest]}."""
    pattern: str = ""
    """How the judge writes one score, with {name} and {value} ('scores' answers)."""
    max_tokens: PositiveInt = 512
    """Longest answer, in tokens (1 for soft)."""
    timeout_s: PositiveFloat = 600.0
    """Timeout of one request in seconds (60 if the answer is one token), unless the judge's configuration sets one."""
    request: Annotated[str, BeforeValidator(_fields)] = "{}"
    """Fields merged into the request's body, as JSON; null removes one."""
    frames: PositiveInt = FRAMES
    """Maximum frames of a clip that are shown, evenly spaced from first to last."""
    max_pixels: PositiveInt = MAX_PIXELS
    """Maximum pixels of an image or frame that is shown; larger ones are scaled down."""
    name: str = ""

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The user message split at its markers, markers included."""
        return tuple(piece for piece in _MARKER.split(self.user) if piece)

    @property
    def takes_source(self) -> bool:
        """Whether the source image of an edit is shown."""
        return "{source}" in self.pieces

    def parts(self, texts: Mapping[str, str]) -> list[str | int]:
        """The user message, with `texts` for its markers by name, as a list of non-empty texts, k for medium k + 1, and
        SOURCE for the source images."""
        parts: list[str | int] = []
        text = ""
        for piece in self.pieces:
            medium = _MEDIUM.fullmatch(piece)
            if medium or piece == "{source}":
                parts += [text] if text else []
                parts.append(int(medium[1]) - 1 if medium else SOURCE)
                text = ""
            else:
                text += texts[piece[1:-1]] if _MARKER.fullmatch(piece) else piece
        return [*parts, text] if text else parts

    def messages(self, texts: Mapping[str, str], sources: int = 1) -> list[dict[str, Any]]:
        """Messages for transformers' chat templates, with image placeholders; ends with the prefill if there is one."""
        content: list[dict[str, Any]] = []
        for part in self.parts(texts):
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content += [{"type": "image"}] * (sources if part == SOURCE else 1)
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.prefill:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": self.prefill}]})
        return turns


@cache
def shipped_templates() -> dict[str, dict[str, Any]]:
    """Name → content of the templates shipped with the package; without `user` if its publisher has the question."""
    return read_yaml(_SHIPPED)


def load_template(
    name: str,
    needs: tuple[str, ...] = PAIR,
    may: tuple[str, ...] = ("source",),
    kinds: tuple[str, ...] = PAIR_ANSWERS,
    shown: Shown = SHOWN,
) -> Template:
    """Load a template by shipped name or by path to a YAML file; JudgeError if it is missing or invalid.

    needs: required markers; may: optional ones; media must appear in order, each once. kinds: answers that the caller
    supports. shown: instead of what the file says.
    """
    shipped = shipped_templates()
    file = name if "user" in shipped.get(name, {"user": ""}) else published_template(name)
    if file not in shipped and not Path(file).is_file():
        raise JudgeError(
            f"judge template '{name}' not found{did_you_mean(name, shipped)}: expected one of {', '.join(shipped)} or "
            "a path to a YAML file"
        )
    try:
        content = shipped.get(file) or read_yaml(file)
        answer = content.get("answer", "soft" if content.get("labels") else "plain")
        timeout_s = 60.0 if answer in ("soft", "word") else 600.0
        defaults = {"max_tokens": _MAX_TOKENS.get(answer, 512), "timeout_s": timeout_s}
        given = {key: value for key, value in shown._asdict().items() if value is not None}
        template = section(Template, defaults | content | given | {"answer": answer, "name": name}, "template")
    except ConfigError as error:
        raise JudgeError(f"judge template {file}: {'; '.join(error.mistakes)}") from error
    if mistakes := list(_mistakes(template, needs, may, kinds)):
        raise JudgeError(f"judge template {file}: {'; '.join(mistakes)}")
    return template


@dataclasses.dataclass(frozen=True, eq=False)
class Query:
    """A question to a judge: a template with what its markers stand for."""

    template: Template
    texts: Mapping[str, str]
    """By the marker's name."""
    media: Sequence[Media]
    """For {media_1} …"""
    source: Sequence[Media] = ()
    """For {source}: the source images of an edit."""

    @property
    def parts(self) -> list[str | int]:
        """As `Template.parts`."""
        return self.template.parts(self.texts)

    @property
    def lacks_source(self) -> str:
        """Why it cannot be asked, if the template shows a source image and there is none; else ''."""
        lacks = self.template.takes_source and not self.source
        return f"template '{self.template.name}' needs a source image, but the sample has none" * lacks


class PairTemplates(NamedTuple):
    """The question of which of two media is better."""

    images: Template
    clips: Template
    """The same, unless there is a template NAME_video."""

    def query(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Query:
        """The question about two media."""
        template = self.clips if first.clip or second.clip else self.images
        return Query(template, {"prompt": prompt}, (first, second), source)


def load_pair_templates(name: str, shown: Shown = SHOWN) -> PairTemplates:
    """The template of that name for images, and the one for clips. Raises JudgeError."""
    images = load_template(name, shown=shown)
    video = f"{name}_video"
    return PairTemplates(images, load_template(video, shown=shown) if video in shipped_templates() else images)


def chat_body(
    model: str,
    template: Template,
    texts: Mapping[str, str],
    media: Sequence[bytes],
    source: Sequence[bytes] = (),
    space: int | None = None,
) -> bytes:
    """Build the request from a template, its texts by marker name, and the content parts of media and source images.

    The rubric precedes the images, and labels follow a prefill, so that the server's prefix cache gets hits. The joined
    parts are valid JSON for any prompt. space: token that the server must write before the label (tokens.py).
    """
    parts: list[bytes] = []
    for part in template.parts(texts):
        if part == SOURCE:
            parts += source
        else:
            parts.append(media[part] if isinstance(part, int) else _text_part(part))
    head = b'{"model":' + _json(model) + b',"messages":[{"role":"user","content":['
    return head + b",".join(parts) + b"]" + _tail(template, space)


@lru_cache(maxsize=32)
def _tail(template: Template, space: int | None) -> bytes:
    """Everything after the user's content: prefill, sampling, logprobs, and the template's own fields."""
    fields: dict[str, Any] = {"max_tokens": template.max_tokens, "temperature": 0, "seed": 0}
    turn = b"}]"
    if template.prefill:
        turn = b"}," + _json({"role": "assistant", "content": template.prefill}) + b"]"
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if template.answer in ("soft", "word"):
        fields |= {"logprobs": True, "top_logprobs": 20}
    own = json.loads(template.request)
    if "max_completion_tokens" in own:
        del fields["max_tokens"]
    if space is not None:
        longest = "max_completion_tokens" if "max_completion_tokens" in own else "max_tokens"
        own |= {longest: 2, "allowed_token_ids": [space]}
    return turn + b"," + _json({key: value for key, value in (fields | own).items() if value is not None})[1:]


@lru_cache(maxsize=32)
def _text_part(text: str) -> bytes:
    """A text as a content part, cached because all pairs of a group share it. Lone surrogates, which tokenizers reject,
    become U+FFFD."""
    valid = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _json({"type": "text", "text": valid})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _mistakes(t: Template, needs: tuple[str, ...], may: tuple[str, ...], kinds: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with a template for a caller that supplies these markers and reads these kinds of answers."""
    markers = [piece[1:-1] for piece in t.pieces if _MARKER.fullmatch(piece)]
    shown = [marker for marker in markers if marker == "source" or marker.startswith("media_")]
    media = [marker for marker in shown if marker != "source"]
    for unknown in sorted(set(markers) - set(needs) - set(may)):
        yield f"unknown marker {{{unknown}}}; expected {', '.join(f'{{{m}}}' for m in needs + may)}"
    for marker in sorted(set(needs) - set(markers)):
        yield f"expected {{{marker}}} in 'user'"
    if media != sorted(media) or len(shown) > len(set(shown)):
        yield f"expected each image once and in order in 'user', got {', '.join(shown)}"
    if t.answer not in kinds:
        yield f"expected answer to be one of {', '.join(kinds)}, got {t.answer!r}"
    if t.answer == "soft" and len({spelled(label, t.variants) for label in t.labels or ()}) < 2:
        yield f"a soft answer needs two labels that differ by more than white space (and case), got {t.labels}"
    if t.answer in ("scores", "json") and not (t.scores and all(low < high for _, low, high in t.scores)):
        yield f"a '{t.answer}' answer needs scores: {{name: [low, high]}}, got {t.scores!r}"
    if t.answer == "scores" and (t.pattern.count("{value}") != 1 or (len(t.scores) > 1 and "{name}" not in t.pattern)):
        yield f"a 'scores' answer needs a pattern with {{name}} and {{value}}, got {t.pattern!r}"


def spelled(text: str, variants: bool | None) -> str:
    """Normalise a label or token, so that all its accepted spellings become equal."""
    if variants is None:
        return text
    bare = text.strip(" \t\r\n▁Ġ")  # ▁ and Ġ: leading spaces, if a server lists raw tokens
    return bare.casefold() if variants else bare
