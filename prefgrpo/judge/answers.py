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

from prefgrpo.judge.template import Template, spelled

_WHO = r"(?:edited\s+)?(?:image|video)"
_GROUNDS = (
    r"based on (?:the above|th(?:is|at|ese|ose))"
    r"(?: (?:analysis|assessment|comparison|evaluation|observations?|points|reasoning))?"
)
_LEAD = (
    rf"(?:(?:{_GROUNDS}"
    r"|so|thus|hence|therefore|overall|finally|in (?:conclusion|summary|total|the end)|to (?:sum up|conclude)"
    r"|all in all|on balance|i (?:think|believe|find|conclude|would say)(?: that)?"
    r"|(?:the |my )?(?:final )?(?:answer|verdict|conclusion|decision|choice|winner)(?:\s+is(?:\s+that)?)?)\s*[,:]?\s+)*"
    r"(?:the\s+)?"
)
_IS = r"\s+(?:is|was|looks)\s+(?:(?:clearly|slightly|much|far|definitely|significantly|overall|the|a)\s+){0,2}"
_WHY = r"(?:,?\s+(?:because|since|due to|thanks to|as (?:it|its))\b.*)?"
_ONLY = re.compile(
    rf"{_LEAD}(?:(?:{_WHO}|answer|option|picture)\s*)?([12])(?:{_IS}(?:better|best|winner))?", re.I | re.A
)
_STATED = re.compile(
    rf"{_LEAD}{_WHO}\s*([12]){_IS}better(?:\s+than\s+(?:the\s+)?{_WHO}\s*(?!\1)[12]\b)?(?:\s+overall)?{_WHY}",
    re.I | re.A,
)
_VALUES = {"1": 1.0, "2": 0.0}
_RESOLUTION = 2.0**-23
"""Probability that the listed ones can miss in their sum: servers compute them in fp32."""
_SENTENCE = re.compile(r"[^.!?;]+[.!?;]?")
_TURN = re.compile(
    r"\b(?:wait|actually|instead|rather|but|however|though|although|yet|correction|mistake|mistaken|mixed|wrong|false"
    r"|second thought|sorry|unless|if|not)\b|n['’]t\b",
    re.I | re.A,
)
_CONCLUDED = re.compile(
    rf"{_LEAD}{_WHO}\s*([12]){_IS}better(?:\s+than\s+(?:the\s+)?{_WHO}\s*(?!\1)[12]\b)?(?:\s+overall)?"
    r",?\s+in terms of\s+(?P<of>[^\d\"'“”‘:?]+)",
    re.I | re.A,
)
_IN_PART = re.compile(
    r"\b(?:only|alone|solely|merely|just|least|no|none|nothing|neither|nor|never|hardly|would|could|might|or|while"
    r"|whereas|image|video|better|worse|than|one|some|few)\b",
    re.I | re.A,
)
_PRAISED = re.compile(rf"{_WHO}\s*([12]){_IS}better\b", re.I | re.A)
_TIE = re.compile(
    r"(?:(?:it\s+is\s+|it's\s+)?a\s+)?(?:tie|draw|equal|neither|both|both\s+(?:are\s+)?equal(?:ly\s+good)?)"
    r"|(?:both\s+)?(?:images?|videos?)\s*(?:1\s+and\s+(?:image\s+|video\s+)?2\s+)?(?:are\s+)?(?:equal|tied|equally\s+good)",
    re.I | re.A,
)
_THOUGHTS = re.compile(r".*</think(?:ing)?>", re.I | re.S | re.A)
_THINKS = re.compile(r"<think(?:ing)?>", re.I | re.A)
_TAG = re.compile(r"</?answer>", re.I | re.A)
_MARKUP = re.compile(r"(?<!\d)[*`_]+|[*`_]+(?!\d)", re.A)
_EDGE = " \"'“”"
_COMMA = re.compile(r",(?=\s*[}\]])")
_GIVEN = (
    r"i (?:will |now )?(?:give|assign)(?: (?:it|(?:this|the) (?:image|picture|video)))? (?:an? |the )?"
    r"|here (?:you go|it is|they are|(?:is|are) (?:the|my) (?:scores?|ratings?|answer|evaluation))\s*:\s*"
)
_NUMBER = r"(?P<value>[-+]?(?:0|[1-9]\d*)(?:\.\d+)?)(?!\w|[.,]\d)"
_REST = re.compile(
    r"\s*(?:points?|stars?)?(?:\s+overall)?\s*[.!]?\s*"
    r"(?:(?:[-–—(:;,]|(?<=\.)\s)\s*(?!\W*(?:or|to|and|maybe|perhaps|possibly|out|of|if|but|not|would)\b)[^\d?½¼¾]*)?",
    re.I,
)


class Unreadable(ValueError):
    """An answer that states nothing that was asked for; the message says what was expected."""


def read(template: Template, text: str, cut: bool = False) -> tuple[float | None, dict[str, float]]:
    """(value, parts) of an answer in words under `template`; Unreadable if it states none.

    cut: the judge was stopped before it had ended its answer; only what is closed counts then.
    """
    try:
        said = after_thoughts(text)
        return _read(template, _closed(template, said) if cut else said)
    except Unreadable as error:
        hint = f"; it was cut off (max_tokens is {template.max_tokens}: give the template more)" if cut else ""
        raise Unreadable(f"{error}{hint}") from error


def _read(template: Template, text: str) -> tuple[float | None, dict[str, float]]:
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


def after_thoughts(text: str) -> str:
    """What follows the reasoning, if there is any; Unreadable if it never ends."""
    before = _THOUGHTS.match(text)
    said = text[before.end() :] if before else text
    if _THINKS.search(said):
        raise Unreadable(f"the reasoning has no </think>: {said[-80:]!r}")
    return said


def _closed(template: Template, text: str) -> str:
    """What is certain in an answer without its end: tags and braces that are closed, whole lines of scores."""
    if template.answer in ("think", "flex", "json") or (template.answer == "edit" and _TAG.search(text)):
        return text
    if template.answer == "scores":
        return text.rpartition("\n")[0] if template.pattern.rstrip().endswith("{value}") else text
    raise Unreadable(f"expected a whole answer, got {text[-80:]!r}")


def _bare(line: str) -> str:
    """A line without markup, quotes and double spaces around and in it."""
    return " ".join(_MARKUP.sub("", line).split()).lstrip("#>-•" + _EDGE).rstrip(_EDGE)


def plain(text: str) -> float:
    """'Image 1', 'Video 2 is better', '1', 'tie' … -> 1.0, 0.0 or 0.5.

    A longer answer must end, or begin, with a sentence that says which is better and nothing else. One that
    contradicts it anywhere, or a turn after the beginning, makes it no verdict. "Better in terms of …" is a part of the
    judgement, unless the answer ends with it, "based on the above", and never calls the other one better.
    """
    whole = _bare(text).rstrip(".! ").strip(_EDGE)
    if match := _ONLY.fullmatch(whole):
        return _VALUES[match[1]]
    if _TIE.fullmatch(whole):
        return 0.5
    parts = [part.strip(_EDGE).rstrip(".!; ") for line in text.splitlines() for part in _SENTENCE.findall(_bare(line))]
    sentences = [part for part in parts if part]
    found = [match[1] if (match := _STATED.fullmatch(s)) else "" for s in sentences]
    ends = [*found[:-1], found[-1] or _concluded(sentences)] if found else []
    said, turns = set(ends) - {""}, (s for s in sentences[1:] if _TURN.search(s) or _ONLY.fullmatch(s))
    if len(said) == 1 and (ends[-1] or (found[0] and not any(turns))):
        return _VALUES[said.pop()]
    raise Unreadable(f"expected 'Image 1', 'Image 2' or 'tie', got {text[-80:]!r}")


def _concluded(sentences: list[str]) -> str:
    """'1' or '2' if the last sentence is "based on the above, image k is better in terms of …", else ''.

    The reasons must take nothing back, and nothing may be said to be better about the other one.
    """
    match = _CONCLUDED.fullmatch(sentences[-1])
    if not match or not re.search(_GROUNDS, match[0][: match.start("of")], re.I | re.A) or _IN_PART.search(match["of"]):
        return ""
    alone = set(_PRAISED.findall(" ".join(sentences))) == {match[1]}
    return match[1] if alone and not _TURN.search(match["of"]) else ""


def think(text: str) -> float:
    """The verdict inside the one <answer>…</answer> that follows the reasoning."""
    tags = [tag.lower() for tag in _TAG.findall(text)]
    if tags != ["<answer>", "</answer>"]:
        raise Unreadable(f"expected one <answer>…</answer>, found {len(tags)} tags in {text[-80:]!r}")
    return plain(_TAG.split(text)[1])


def edit(text: str) -> float:
    """'Edited image k is better' inside <answer>…</answer> if there is one, else in what follows the reasoning."""
    return think(text) if _TAG.search(text) else plain(text)


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
    """Named numbers from lines that are like `pattern`; out of range, or stated twice and differently, is missing."""
    item, lead = _item(tuple(name for name, *_ in names), pattern)
    tail = re.compile(rf"\s*(?:/|out of)\s*{max(high for *_, high in names):g}(?!\w|\.\d)", re.I | re.A)
    stated: set[tuple[str, float]] = set()
    seen: set[tuple[str, float]] = set()
    for line in map(_bare, text.splitlines()):
        seen |= {_score(match) for match in item.finditer(line)}
        found, start = [], match.end() if (match := lead.match(line)) else 0
        end = start
        while match := item.match(line, start):
            found.append(_score(match))
            end = of.end() if (of := tail.match(line, match.end())) else match.end()
            start = next((k for k in range(end, len(line)) if line[k] not in " ,;|."), end)
        stated |= set(found) if _REST.fullmatch(line, end) else set()
    values: dict[str, float] = {}
    for name, low, high in names:
        said = {value for told, value in seen if told in ("", name.casefold())}
        if (
            len(said) == 1
            and low <= min(said) <= high
            and said == {v for told, v in stated if told in ("", name.casefold())}
        ):
            values[name] = said.pop()
    if not values:
        raise Unreadable(f"expected a line {pattern!r} with a number in its range, got {text[-80:]!r}")
    return values


def _score(match: re.Match[str]) -> tuple[str, float]:
    """(name, '' if the pattern has none; value)."""
    return match.groupdict().get("name", "").casefold(), float(match["value"])


@lru_cache(maxsize=256)
def _item(names: tuple[str, ...], pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """`pattern` with one of the names and a number in it; and what may stand before it in its line."""
    parts = {"{name}": f"(?P<name>{'|'.join(map(re.escape, names))})", "{value}": _NUMBER}
    pieces = [
        parts.get(p) or r"\s*".join(map(re.escape, p.split()))
        for p in re.split(r"(\{name\}|\{value\})", pattern)
        if p.strip()
    ]
    line = r"(?<!\w)" + r"\s*".join(pieces)
    return re.compile(line, re.I | re.A), re.compile(rf"(?:\d+[.)]\s+)?{_LEAD}(?:{_GIVEN})?", re.I | re.A)


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


def _json_object(text: str) -> dict[str, Any]:
    """The one JSON object of an answer, from its first brace to its last; commas before a closing bracket go."""
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


def label_logprobs(
    choice: Mapping[str, Any], labels: tuple[str, str], variants: bool | None = False
) -> tuple[float, float]:
    """Log-probabilities of the two labels at the first answered token of an OpenAI chat `choice`.

    All listed tokens that are a label but for white space count for it, summed; variants: also those in other case
    (None: the labels alone). A label that the server does not list gets an upper bound of its own,
    min(least listed, log(1 − Σ listed)). Raises
    Unreadable if neither label is listed.
    """
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not content:
        raise Unreadable("the server sent no logprobs; serve with logprobs on, or use a template with answer: plain")
    try:
        listed = {str(t["token"]): float(t["logprob"]) for t in content[0]["top_logprobs"]}
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unreadable(f"the server's logprobs have no readable top_logprobs ({error!r})") from error
    found = [_label_logprob(label, listed, variants) for label in labels]
    if found[0] is None and found[1] is None:
        raise Unreadable(f"neither label {labels} is among the judge's {len(listed)} likeliest tokens")
    first, second = (_unlisted(listed) if value is None else value for value in found)
    return first, second


def _label_logprob(label: str, listed: Mapping[str, float], variants: bool | None) -> float | None:
    """log Σ exp over the listed spellings of a label, None if there is none."""
    values = [v for token, v in listed.items() if spelled(token, variants) == spelled(label, variants)]
    most = max(values, default=-math.inf)
    if len(values) < 2 or not math.isfinite(most):
        return most if values else None
    return most + math.log(sum(math.exp(v - most) for v in values))


def _unlisted(listed: Mapping[str, float]) -> float:
    """Largest log-probability that a token outside the server's list can have."""
    rest = 1.0 - math.fsum(math.exp(min(v, 0.0)) for v in listed.values())
    least = min(listed.values())
    return math.nan if math.isnan(rest) else min(least, math.log(max(rest, _RESOLUTION)))
