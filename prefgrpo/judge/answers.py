"""From a judge's answer to what it says: one token's log-probabilities, the verdict of a text, or named scores.

Invariant: only an unambiguous answer counts; a tie is 0.5; anything else raises Unreadable and stays missing, and a
named score or category that cannot be read is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from prefgrpo.judge.template import Template

_ADVERB = r"clearly|slightly|much|far|definitely|significantly|overall|the|a"
_ONLY = re.compile(
    r"(?:the\s+)?(?:(?:edited\s+)?image|video|answer|option|picture)?\s*([12])"
    rf"(?:\s+(?:is|was)\s+(?:(?:{_ADVERB})\s+){{0,2}}(?:better|best|winner))?",
    re.I | re.A,
)
_BETTER = re.compile(r"(?:image|video)\s*([12])\s+(?:is|was|looks)\s+(?:(\w+)\s+)?better", re.I | re.A)
_EMPHASIS = re.compile(_ADVERB, re.I)
_SENTENCE = re.compile(r"[^.!?;\n]+[.!?;\n]?")
_DOUBT = re.compile(
    r"(?<![a-z])(?:not|no|never|neither|nor|cannot|hardly|if|whether|unless|or|either|would|could|might|may|should)(?![a-z])|n['’]t(?![a-z])",
    re.I | re.A,
)
_TIE = re.compile(
    r"(?:(?:it\s+is\s+|it's\s+)?a\s+)?(?:tie|draw|equal|neither|both|both\s+(?:are\s+)?equal(?:ly\s+good)?)"
    r"|(?:both\s+)?(?:images?|videos?)\s*(?:1\s+and\s+(?:image\s+|video\s+)?2\s+)?(?:are\s+)?(?:equal|tied|equally\s+good)",
    re.I | re.A,
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.I | re.S | re.A)
_COMMA = re.compile(r",(?=\s*[}\]])")
_NUMBER = r"([-+]?\d+(?:\.\d+)?)"


class Unreadable(ValueError):
    """An answer that states nothing that was asked for; the message says what was expected."""


def read(template: Template, text: str) -> tuple[float | None, dict[str, float]]:
    """(value, parts) of an answer in words under `template`; Unreadable if it states none."""
    match template.answer:
        case "plain":
            return plain(text), {}
        case "think":
            return think(text), {}
        case "edit":
            return edit(text), {}
        case "flex":
            return flex(text)
        case "scores":
            return None, scores(text, template.scores, template.pattern)
        case "json":
            return None, json_scores(text, template.scores)
        case "text":
            return None, {}
    raise Unreadable(f"a '{template.answer}' answer is no text")


def plain(text: str) -> float:
    """'Image 1', 'Video 2 is better', '1', 'tie' … -> 1.0, 0.0 or 0.5; several different verdicts are none."""
    short = " ".join(text.strip().strip("*_`\"'").split()).rstrip(".! ").strip("*_`\"'")
    if match := _ONLY.fullmatch(short):
        return 1.0 if match[1] == "1" else 0.0
    if _TIE.fullmatch(short):
        return 0.5
    said = {winner for sentence in _SENTENCE.findall(text) for winner in _claims(sentence)}
    if len(said) == 1 and said == {match[1] for match in _BETTER.finditer(text)}:  # nor across lines
        return 1.0 if said == {"1"} else 0.0
    raise Unreadable(f"expected 'Image 1', 'Image 2' or 'tie', got {text[:80]!r}")


def _claims(sentence: str) -> list[str]:
    """Winners that a sentence states; '' where it denies, doubts or asks."""
    found = list(_BETTER.finditer(sentence))
    doubt = bool(found) and (
        sentence.endswith("?")
        or _DOUBT.search(sentence, 0, found[-1].start()) is not None
        or any(match[2] and not _EMPHASIS.fullmatch(match[2]) for match in found)
    )
    return [""] if doubt else [match[1] for match in found]


def think(text: str) -> float:
    """The verdict inside the one <answer>…</answer> that follows the reasoning."""
    found = _ANSWER.findall(text)
    if len(found) != 1:
        raise Unreadable(f"expected one <answer>…</answer>, found {len(found)} in {text[-80:]!r}")
    return plain(found[0])


def edit(text: str) -> float:
    """'Edited image k is better' inside <answer>…</answer> if there is one, else in what follows the reasoning."""
    return think(text) if _ANSWER.search(text) else plain(_after_thoughts(text))


def flex(text: str) -> tuple[float, dict[str, float]]:
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
            continue  # the category is missing, the verdict is not
    return _winner(value["winner"]), parts


def _winner(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Unreadable(f"expected 'Image 1', 'Image 2' or 'tie', got {str(value)[:80]}")
    return plain(str(value))


def scores(text: str, names: tuple[tuple[str, float, float], ...], pattern: str) -> dict[str, float]:
    """Named numbers from lines like `pattern`; out of range, or stated twice and differently, is missing."""
    bare = text.replace("*", "").replace("`", "")
    found: dict[str, float] = {}
    for name, low, high in names:
        said = {float(v) for v in _line(name, pattern, f"{high:g}").findall(bare)}
        if len(said) == 1 and low <= (value := said.pop()) <= high:
            found[name] = value
    if not found:
        raise Unreadable(f"expected {pattern!r} with a number in its range, got {text[-80:]!r}")
    return found


@lru_cache(maxsize=256)
def _line(name: str, pattern: str, high: str) -> re.Pattern[str]:
    """`pattern` with the name as it is and a number for {value}: not the start of another number or of a range."""
    parts = {"{name}": re.escape(name), "{value}": _NUMBER}
    pieces = [
        parts.get(p) or r"\s*".join(map(re.escape, p.split()))
        for p in re.split(r"(\{name\}|\{value\})", pattern)
        if p.strip()
    ]
    other = rf"[ \t]*to[ \t]+\d|\s*/\s*(?!{re.escape(high)}(?![\w.]))\d"
    end = rf"(?![\w%]|[-.,–—~]+\d|[-–—~]+\w|(?:[ \t]*[-–—~])+[ \t]*\d|{other})"
    line = r"\s*".join(pieces)
    return re.compile(r"(?<!\w)" + line + (end if pattern.rstrip().endswith("{value}") else ""), re.I | re.A)


def json_scores(text: str, names: tuple[tuple[str, float, float], ...]) -> dict[str, float]:
    """Named numbers of one JSON object {…, "score": [a, b]}; the list must have one number in range for each name."""
    value = _json_object(text).get("score")
    if not isinstance(value, list) or len(value) != len(names):
        raise Unreadable(f"expected a JSON object with 'score': a list of {len(names)} numbers, got {text[:80]!r}")
    found: dict[str, float] = {}
    for item, (name, low, high) in zip(value, names, strict=True):
        if isinstance(item, bool) or not isinstance(item, int | float) or not low <= item <= high:
            raise Unreadable(f"score '{name}' must be a number from {low:g} to {high:g}, got {str(item)[:40]}")
        found[name] = float(item)
    return found


def _after_thoughts(text: str) -> str:
    return text.rpartition("</think>")[2]


def _json_object(text: str) -> dict[str, Any]:
    """The one JSON object of an answer, from its first brace to its last; commas before a closing bracket go."""
    text = _after_thoughts(text)
    start, end = text.find("{"), text.rfind("}")
    body = text[start : end + 1] if 0 <= start < end else "null"
    try:
        try:
            value = json.loads(body, object_pairs_hook=_once, strict=False)  # line breaks in texts
        except json.JSONDecodeError:
            value = json.loads(_COMMA.sub("", body), object_pairs_hook=_once, strict=False)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected one JSON object, got {text[:80]!r} ({error})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"expected one JSON object, got {text[:80]!r}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members; a key that comes twice with different values says nothing certain."""
    value = dict(pairs)
    for key, item in pairs:
        if value[key] != item:
            raise Unreadable(f"the answer's JSON has {key!r} twice, with different values")
    return value


def label_logprobs(choice: Mapping[str, Any], labels: tuple[str, str], variants: bool = False) -> tuple[float, float]:
    """Log-probabilities of the two labels at the first answered token of an OpenAI chat `choice`.

    variants: tokens that differ from a label in case or white space count for it, summed.
    A label outside the server's list gets the list's smallest value, an upper bound of its own; both outside raises.
    """
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not content:
        raise Unreadable("the server sent no logprobs; serve with logprobs on, or use a template with answer: plain")
    try:
        top = [(str(t["token"]), float(t["logprob"])) for t in content[0]["top_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unreadable(f"the server's logprobs have no readable top_logprobs ({error!r})") from error
    found = [(_sum if variants else _of)(label, top) for label in labels]
    if found[0] is None and found[1] is None:
        raise Unreadable(f"neither label {labels} is among the judge's {len(top)} likeliest tokens")
    least = min((value for _, value in top), default=-math.inf)
    first, second = (least if value is None else value for value in found)
    return first, second


def _of(label: str, top: list[tuple[str, float]]) -> float | None:
    """The label's value: its own token, else the likeliest token that differs only in white space."""
    exact = [value for token, value in top if token == label]
    near = [value for token, value in top if token.strip() == label.strip()]
    return max(exact or near, default=None)


def _sum(label: str, top: list[tuple[str, float]]) -> float | None:
    """log Σ exp of the label's spellings."""
    values = [v for token, v in dict(top).items() if token.strip().casefold() == label.strip().casefold()]
    if not values:
        return None
    most = max(values)
    return most + math.log(sum(math.exp(v - most) for v in values)) if math.isfinite(most) else most
