"""Parses a judge's answer: the log-probabilities of one token, the verdict stated in a text, or named scores.

Invariant: only an unambiguous answer counts; a tie is 0.5. Anything else raises Unreadable and the verdict is missing.
A named score or category that cannot be read is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from prefgrpo.judge.template import Template, spelled

_STATED = re.compile(r"(?:edited )?(?:image|video) ?([12]) is better", re.I | re.A)
"""A sentence that is a verdict, as the published judges write it."""
_ONLY = re.compile(r"(?:(?:edited )?(?:image|video) ?)?([12])", re.I | re.A)
"""A whole answer that names one of two."""
_TIE = re.compile(r"tie|both (?:images|videos|edited images) are equally good", re.I | re.A)
_SENTENCE = re.compile(r"[^.!?;]+[.!?;]?")
_THOUGHTS = re.compile(r".*</(?:think|thinking|thought)>", re.I | re.S | re.A)
_THINKS = re.compile(r"<(?:think|thinking|thought)>", re.I | re.A)
_TAG = re.compile(r"</?answer>", re.I | re.A)
_MARKUP = re.compile(r"(?<!\d)[*`_]+|[*`_]+(?!\d)", re.A)
_BULLET = re.compile(r"^(?:[#>•\s\"'“”]|-(?!\d))+")
_EDGE = " \"'“”"
_SCORE_TAG = re.compile(r"</?score>", re.I | re.A)
_MARKS = re.compile(r"\[\s*[01](?:\s*,\s*[01])*\s*,?\s*\]", re.A)
_COMMA = re.compile(r",(?=\s*[}\]])")
_NUMBER = r"[-+]?(?:0|[1-9]\d*)(?:\.\d+)?"


NO_THINKING = (
    "serve it with --default-chat-template-kwargs '{\"enable_thinking\": false}' (`prefgrpo judge serve` does for the "
    "presets), or set judge.chat_template_kwargs: {enable_thinking: false}"
)
"""What to do about a judge that thinks although it should not."""


class Unreadable(ValueError):
    """The answer does not contain what the template asks for; the message says what was expected."""


def parse_answer(template: Template, text: str, cut: bool = False) -> tuple[float | None, dict[str, float]]:
    """Parse a text answer to `template` into (value, parts); Unreadable if it contains neither.

    cut: the answer was cut off before its end; then only its complete elements count.
    """
    try:
        text = strip_reasoning(text)
        if cut:
            text = _complete_part(template, text)
        match template.answer:
            case "flex":
                return parse_flex(text)
            case "scores":
                return None, parse_scores(text, template.scores, template.pattern)
            case "json":
                return None, parse_json_scores(text, template.scores)
            case "marks":
                return None, parse_marks(text)
            case kind:
                return {"plain": parse_plain, "think": parse_think, "edit": parse_edit}[kind](text), {}
    except Unreadable as error:
        hint = f"; it was cut off (max_tokens is {template.max_tokens}; raise it in the template)" if cut else ""
        raise Unreadable(f"{error}{hint}") from error


def strip_reasoning(text: str) -> str:
    """The text after the reasoning, or the whole text if there is none; Unreadable if the reasoning never ends."""
    before = _THOUGHTS.match(text)
    said = text[before.end() :] if before else text
    if _THINKS.search(said):
        raise Unreadable(f"the reasoning has no </think>: {said[-80:]!r}")
    return said


def _complete_part(template: Template, text: str) -> str:
    """The reliable part of a truncated answer: closed tags and braces, or complete score lines."""
    if template.answer in ("think", "flex", "json", "marks") or (template.answer == "edit" and _TAG.search(text)):
        return text
    if template.answer == "scores":
        return text.rpartition("\n")[0] if template.pattern.rstrip().endswith("{value}") else text
    raise Unreadable(f"expected a complete answer, got {text[-80:]!r}")


def _bare(line: str) -> str:
    """Strip markup, quotes, bullets and repeated spaces from a line; a minus sign before a digit is kept."""
    return _BULLET.sub("", " ".join(_MARKUP.sub("", line).split())).rstrip(_EDGE)


def _short_verdict(text: str) -> float | None:
    """'Image 1', 'Video 2 is better.', '1', 'tie' … -> 1.0, 0.0 or 0.5; None if the text says anything else."""
    whole = _bare(text).rstrip(".! ").strip(_EDGE)
    if match := _ONLY.fullmatch(whole) or _STATED.fullmatch(whole):
        return 2.0 - int(match[1])
    return 0.5 if _TIE.fullmatch(whole) else None


def parse_plain(text: str) -> float:
    """A short verdict, or a longer answer that ends with the sentence 'Image k is better' and nowhere has the other."""
    if (short := _short_verdict(text)) is not None:
        return short
    sentences = [part for line in text.splitlines() for part in _SENTENCE.findall(_bare(line)) if part.strip(_EDGE)]
    verdicts = [_STATED.fullmatch(s.strip(_EDGE).rstrip(".!; ").strip(_EDGE)) for s in sentences]
    stated = {match[1] for match in verdicts if match}
    if len(stated) != 1 or verdicts[-1] is None:
        raise Unreadable(f"expected an answer that ends with 'Image k is better', got {text[-80:]!r}")
    return 2.0 - int(stated.pop())


def parse_think(text: str) -> float:
    """The verdict inside the one <answer>…</answer> that follows the reasoning."""
    tags = [tag.lower() for tag in _TAG.findall(text)]
    if tags != ["<answer>", "</answer>"]:
        raise Unreadable(f"expected one <answer>…</answer>, found {len(tags)} tags in {text[-80:]!r}")
    return _winner(_TAG.split(text)[1])


def parse_edit(text: str) -> float:
    """'Edited image k is better' inside <answer>…</answer> if there is one, else in what follows the reasoning."""
    return parse_think(text) if _TAG.search(text) else parse_plain(text)


def parse_flex(text: str) -> tuple[float, dict[str, float]]:
    """Overall and per-category verdicts of one JSON object with `winner` and `categories[].cat_winner`."""
    value = _json_object(text)
    if "winner" not in value:
        raise Unreadable(f"expected a JSON object with 'winner', got {text[:80]!r}")
    parts: dict[str, float] = {}
    categories = value.get("categories")
    for index, item in enumerate(categories if isinstance(categories, list) else []):
        name = item.get("name", item.get("category", index)) if isinstance(item, dict) else None
        if name is None or str(name) in parts:
            continue
        try:
            parts[str(name)] = _winner(item.get("cat_winner"))
        except Unreadable:
            continue  # only this category is missing; the verdict still counts
    return _winner(value["winner"]), parts


def _winner(value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, str | int):
        verdict = _short_verdict(str(value))
        if verdict is not None:
            return verdict
    raise Unreadable(f"expected 'Image 1', 'Image 2' or 'tie', got {str(value)[:80]!r}")


def parse_scores(text: str, names: tuple[tuple[str, float, float], ...], pattern: str) -> dict[str, float]:
    """Named scores from lines matching `pattern`; a score out of range, or stated with two values, is left out."""
    item, whole_line = _score_patterns(names, pattern)
    seen: set[tuple[str, float]] = set()
    stated: set[tuple[str, float]] = set()
    for line in map(_bare, text.splitlines()):
        in_line = {((m.groupdict().get("name") or "").casefold(), float(m["value"])) for m in item.finditer(line)}
        seen |= in_line
        stated |= in_line if whole_line.fullmatch(line) else set()
    values: dict[str, float] = {}
    for name, low, high in names:
        said, sure = ({v for key, v in pairs if key in ("", name.casefold())} for pairs in (seen, stated))
        if len(said) == 1 and said == sure and low <= min(said) <= high:
            values[name] = said.pop()
    if not values:
        raise Unreadable(f"expected a line {pattern!r} with a number in its range, got {text[-80:]!r}")
    return values


@lru_cache(maxsize=256)
def _score_patterns(
    names: tuple[tuple[str, float, float], ...], pattern: str
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Two regexes: one score (`pattern` with a name and a number), and a line that states only such scores."""
    parts = {
        "{name}": f"(?P<name>{'|'.join(re.escape(name) for name, *_ in names)})",
        "{value}": rf"(?P<value>{_NUMBER})(?!\w|[.,]\d)",
    }
    pieces = [piece for piece in re.split(r"(\{name\}|\{value\})", pattern) if piece.strip()]
    item = r"(?<!\w)" + r"\s*".join(parts.get(p) or r"\s*".join(map(re.escape, p.split())) for p in pieces)
    score = item.replace("?P<name>", "?:").replace("?P<value>", "?:")
    score += rf"(?:\s*(?:/|out of)\s*{max(high for *_, high in names):g}(?!\w|\.\d))?"
    line = rf"(?:\d+[.)]\s+)?{score}(?:[ ,;|.]*{score})*\s*\.?"
    return re.compile(item, re.I | re.A), re.compile(line, re.I | re.A)


def parse_json_scores(text: str, names: tuple[tuple[str, float, float], ...]) -> dict[str, float]:
    """Named scores from one JSON object {…, "score": [a, b]}; the list must hold one in-range number per name."""
    value = _json_object(text).get("score")
    if not isinstance(value, list) or len(value) != len(names):
        raise Unreadable(f"expected a JSON object with 'score': a list of {len(names)} numbers, got {text[:80]!r}")
    scores: dict[str, float] = {}
    for item, (name, low, high) in zip(value, names, strict=True):
        if isinstance(item, bool) or not isinstance(item, int | float) or not low <= item <= high:
            raise Unreadable(f"score '{name}' must be a number from {low:g} to {high:g}, got {str(item)[:40]}")
        scores[name] = float(item)
    return scores


def parse_marks(text: str) -> dict[str, float]:
    """{'1': 1.0, '2': 0.0, …}: the zeros and ones inside the only <score>[…]</score>, keyed by position."""
    tags = [tag.lower() for tag in _SCORE_TAG.findall(text)]
    if tags != ["<score>", "</score>"]:
        raise Unreadable(f"expected one <score>…</score>, found {len(tags)} tags in {text[-80:]!r}")
    listed = _SCORE_TAG.split(text)[1].strip()
    if not _MARKS.fullmatch(listed):
        raise Unreadable(f"expected a list of 0 and 1 inside <score>…</score>, got {listed[:80]!r}")
    return {str(k): float(mark) for k, mark in enumerate(re.findall("[01]", listed), start=1)}


def _json_object(text: str) -> dict[str, Any]:
    """Parse the text from the first brace to the last as one JSON object, tolerating trailing commas."""
    start, end = text.find("{"), text.rfind("}")
    body = text[start : end + 1] if 0 <= start < end else "null"
    try:
        try:
            value = json.loads(body, object_pairs_hook=_unique_keys, strict=False)  # allow line breaks inside strings
        except json.JSONDecodeError:
            value = json.loads(_COMMA.sub("", body), object_pairs_hook=_unique_keys, strict=False)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected one JSON object, got {text[:80]!r} ({error})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"expected one JSON object, got {text[:80]!r}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; Unreadable if a key occurs twice with different values."""
    value = dict(pairs)
    for key, item in pairs:
        if value[key] != item:
            raise Unreadable(f"the answer's JSON has {key!r} twice, with different values")
    return value


def label_logprobs(
    choice: Mapping[str, Any], labels: tuple[str, str], variants: bool | None = False
) -> tuple[float, float]:
    """Log-probabilities of the two labels at the first generated token of an OpenAI chat `choice`.

    The probabilities of all listed tokens that equal a label up to white space are summed; with `variants`, up to case
    too (None: exact matches only). A label that the server does not list gets the upper bound min(lowest listed,
    log(1 − Σ listed)), Σ over probabilities. Raises Unreadable if neither label is listed.
    """
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not content:
        raise Unreadable("the server sent no logprobs; serve with logprobs on, or use a template with answer: plain")
    try:
        listed = {str(t["token"]): float(t["logprob"]) for t in content[0]["top_logprobs"]}
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unreadable(f"the server's logprobs have no readable top_logprobs ({error!r})") from error
    first, second = (
        [v for token, v in listed.items() if spelled(token, variants) == spelled(label, variants)] for label in labels
    )
    if not first and not second and any("think" in token for token in listed):
        raise Unreadable(f"the judge begins to think instead of answering with a label: {NO_THINKING}")
    if not first and not second:
        raise Unreadable(f"neither label {labels} is among the judge's {len(listed)} likeliest tokens")
    first, second = first or [_max_unlisted_logprob(listed)], second or [_max_unlisted_logprob(listed)]
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return float(np.logaddexp.reduce(first)), float(np.logaddexp.reduce(second))


def _max_unlisted_logprob(listed: Mapping[str, float]) -> float:
    """Largest log-probability that a token outside the server's list can have."""
    rest = 1.0 - math.fsum(math.exp(min(v, 0.0)) for v in listed.values())
    least = min(listed.values())
    # servers compute probabilities in fp32
    return math.nan if math.isnan(rest) else min(least, math.log(max(rest, 2.0**-23)))
