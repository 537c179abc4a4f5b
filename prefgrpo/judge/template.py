"""Judge templates: YAML files with the user message, the markers for texts and media, and the format of the answer.

    user: text with {prompt}, {media_1} …, {source} and other {name}s      prefill: start of the assistant's turn
    labels: the two answers that may follow the prefill      variants: ignore their case      max_tokens: n
    timeout_s: timeout of one answer (default: 60 if the answer is one token, 600 if it is text)
    answer: soft | plain | think | edit | flex | scores | json | marks      scores: {name: [low, high]}
    pattern: a line with {name} and {value} as the judge writes it (scores)

Markers are replaced literally and only once: braces, quotes or markers inside a prompt are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prefgrpo.judge.verdict import JudgeError, did_you_mean

_MARKER = re.compile(r"(\{[a-z][a-z0-9_]*\})")
_MEDIUM = re.compile(r"\{media_(\d+)\}")
_FOLDER = Path(__file__).parent / "templates"
_TOKENS = {"soft": 1, "plain": 32, "think": 2048, "flex": 2048, "edit": 2048, "json": 1024, "marks": 4096}
"""Default max_tokens by kind of answer; 512 for the others."""
_SOFT_S, _TEXT_S = 60.0, 600.0
PAIR_ANSWERS = ("soft", "plain", "think", "flex", "edit")
"""Kinds of answers that are a verdict on two media."""
_KEYS = ("user", "prefill", "labels", "variants", "answer", "scores", "pattern", "max_tokens", "timeout_s")
PAIR = ("prompt", "media_1", "media_2")
"""Markers of a template that compares two media."""
SOURCE = -1
"""Placeholder in `Template.parts` for the source images of an edit."""


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    name: str
    """Shipped name or path."""
    pieces: tuple[str, ...]
    """The user message split at its markers, markers included."""
    prefill: str
    """Text at the start of the assistant's turn ('' for none)."""
    labels: tuple[str, str] | None
    """The single tokens for 'first' and 'second', or 'yes' and 'no' (soft answers)."""
    answer: str
    """How the answer is parsed."""
    max_tokens: int
    """Longest answer, in tokens (1 for soft)."""
    variants: bool | None = False
    """Tokens counted for a label: equal up to white space (False), up to white space and case (True), or exactly equal
    (None, for a reward that reproduces a published number; not available in template files)."""
    scores: tuple[tuple[str, float, float], ...] = ()
    """(name, lowest, highest) of each score in the answer, in order."""
    pattern: str = ""
    """How the judge writes one score, with {name} and {value} ('scores' answers)."""
    timeout_s: float = _TEXT_S
    """Timeout of one request in seconds, unless the judge's configuration sets one."""

    @property
    def takes_source(self) -> bool:
        """Whether the template shows the source image."""
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

    def messages(self, prompt: str, sources: int = 1) -> list[dict[str, Any]]:
        """Messages for transformers' chat templates, with image placeholders; ends with the prefill if there is one."""
        content: list[dict[str, Any]] = []
        for part in self.parts({"prompt": prompt}):
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content += [{"type": "image"}] * (sources if part == SOURCE else 1)
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.prefill:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": self.prefill}]})
        return turns


def shipped_templates() -> list[str]:
    """Names of the templates shipped with the package."""
    return sorted(p.stem for p in _FOLDER.glob("*.yaml"))


def load_template(
    name: str,
    needs: tuple[str, ...] = PAIR,
    may: tuple[str, ...] = ("source",),
    kinds: tuple[str, ...] = PAIR_ANSWERS,
    prompt: str = "ours",
) -> Template:
    """Load a template by shipped name or by path to a YAML file; JudgeError if it is missing or invalid.

    needs: required markers; may: optional ones; media must appear in order, each once. kinds: answers that the caller
    supports. prompt: JudgeConfig.prompt; published: with its publisher's question, if there is one.
    """
    file = name
    if prompt == "published":
        from prefgrpo.judge.prompts import published_template  # imports tyro, which a reward server need not have

        file = published_template(name)
    return _load(file, name, needs, may, kinds)


def _load(file: str, name: str, needs: tuple[str, ...], may: tuple[str, ...], kinds: tuple[str, ...]) -> Template:
    """The template of a shipped name or file, called `name`."""
    path = _FOLDER / f"{file}.yaml" if file in shipped_templates() else Path(file)
    if not path.is_file():
        names = shipped_templates()
        raise JudgeError(
            f"judge template '{name}' not found{did_you_mean(name, names)}: expected one of {', '.join(names)} or a "
            "path to a YAML file"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JudgeError(f"judge template {path} is not valid YAML: {error}") from error
    try:
        return _parse(name, raw, needs, may, kinds)
    except (ValueError, TypeError) as error:
        raise JudgeError(f"judge template {path}: {error}") from error


def _parse(name: str, raw: Any, needs: tuple[str, ...], may: tuple[str, ...], kinds: tuple[str, ...]) -> Template:
    """Build a template from parsed YAML; ValueError or TypeError if it is invalid."""
    if not isinstance(raw, dict) or not isinstance(raw.get("user"), str):
        raise ValueError(f"expected a mapping with a text 'user', got {type(raw).__name__}")
    if unknown := sorted(set(map(str, raw)) - set(_KEYS)):
        raise ValueError(f"unknown key(s) {unknown}; expected {', '.join(_KEYS)}")
    pieces = tuple(p for p in _MARKER.split(raw["user"]) if p)
    _check_markers(pieces, needs, may)
    labels, variants = raw.get("labels"), bool(raw.get("variants", False))
    answer = raw.get("answer", "soft" if labels else "plain")
    if answer not in kinds:
        raise ValueError(f"expected answer to be one of {', '.join(kinds)}, got {answer!r}")
    two = isinstance(labels, list) and len({spelled(str(label), variants) for label in labels}) == len(labels) == 2
    if answer == "soft" and not two:
        hint = "white space and case" if variants else "white space"
        raise ValueError(f"a soft answer needs two labels that differ by more than {hint}, got {labels!r}")
    scores, pattern = raw.get("scores") if answer in ("scores", "json") else {}, str(raw.get("pattern") or "")
    if not isinstance(scores, dict) or (answer in ("scores", "json") and not scores):
        raise ValueError(f"a '{answer}' answer needs scores: {{name: [low, high]}}, got {scores!r}")
    for score, limits in scores.items():
        if not (isinstance(limits, list) and len(limits) == 2 and float(limits[0]) < float(limits[1])):
            raise ValueError(f"score '{score}' needs [low, high], got {limits!r}")
    if answer == "scores" and ("{value}" not in pattern or (len(scores) > 1 and "{name}" not in pattern)):
        raise ValueError(f"a 'scores' answer needs a pattern with {{name}} and {{value}}, got {pattern!r}")
    timeout_s = float(raw.get("timeout_s", _SOFT_S if answer == "soft" else _TEXT_S))
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"expected timeout_s to be positive seconds, got {raw['timeout_s']!r}")
    return Template(
        name,
        pieces,
        prefill=str(raw.get("prefill") or ""),
        labels=(str(labels[0]), str(labels[1])) if labels else None,
        answer=answer,
        max_tokens=int(raw.get("max_tokens", _TOKENS.get(answer, 512))),
        variants=variants,
        scores=tuple((str(score), float(low), float(high)) for score, (low, high) in scores.items()),
        pattern=pattern,
        timeout_s=timeout_s,
    )


def _check_markers(pieces: tuple[str, ...], needs: tuple[str, ...], may: tuple[str, ...]) -> None:
    """ValueError unless the markers are those that the caller fills in, with media in order, each once."""
    markers = [p[1:-1] for p in pieces if _MARKER.fullmatch(p)]
    if unknown := sorted(set(markers) - set(needs) - set(may)):
        raise ValueError(f"unknown marker {{{unknown[0]}}}; expected {', '.join(f'{{{m}}}' for m in needs + may)}")
    for marker in (*needs, *may):
        n, is_medium = markers.count(marker), marker.startswith("media_") or marker == "source"
        if (n == 0 and marker in needs) or (n > 1 and is_medium):
            raise ValueError(f"expected {{{marker}}} once in 'user', found it {n} times")
    media = [m for m in markers if m.startswith("media_")]
    if media != (ordered := sorted(media, key=lambda m: int(m[6:]))):
        raise ValueError(f"{{{ordered[0]}}} must come before {{{media[0]}}}")


def spelled(text: str, variants: bool | None) -> str:
    """Normalise a label or token, so that all its accepted spellings become equal."""
    if variants is None:
        return text
    bare = text.strip(" \t\r\n▁Ġ")  # ▁ and Ġ: leading spaces, if a server lists raw tokens
    return bare.casefold() if variants else bare


def spellings(label: str, variants: bool | None) -> list[str]:
    """A label and its accepted spellings: with or without a leading space and, with `variants`, in other case."""
    if variants is None:
        return [label]
    bare = label.strip()
    cases = (bare, bare.lower(), bare.upper(), bare.title()) if variants else (bare,)
    return list(dict.fromkeys([label, *(space + text for text in cases for space in ("", " "))]))


def label_ids(tokenizer: Any, template: Template) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of each label right after the prefill: the label's own, then those of other single-token spellings.

    Raises JudgeError unless each label is one token that leaves the prefill's tokens intact.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(template.prefill + text, add_special_tokens=False)["input_ids"])

    before, candidates = ids(""), []
    for label in template.labels or ():
        joined = [ids(text) for text in spellings(label, template.variants)]  # the first is the label itself
        if joined[0][:-1] != before:
            raise JudgeError(
                f"the judge's tokenizer does not read the label {label!r} after the prefill {template.prefill!r} as "
                f"one more token ({before} becomes {joined[0]}); end the prefill without a space and start the labels "
                "with one, or the other way round"
            )
        candidates.append(tuple(dict.fromkeys(i[-1] for i in joined if i[:-1] == before)))
    return candidates[0], candidates[1]
