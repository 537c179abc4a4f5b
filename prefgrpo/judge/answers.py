"""From a judge's answer to P(first): one token's log-probabilities, or the verdict that a text states.

Invariant: only an unambiguous answer is a verdict; a tie is 0.5; anything else raises Unreadable and stays missing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NAME = r"(?:(?:edited\s+)?image|video|answer|option|picture|the\s+(?:first|second))?"
_ONLY = re.compile(
    rf"(?:the\s+)?{_NAME}\s*([12])(?:\s+(?:is|was)\s+(?:the\s+)?(?:\w+\s+)?(?:better|best|winner))?", re.I
)
_BETTER = re.compile(r"(?:image|video)\s*([12])\s+(?:is|was|looks)\s+(?:clearly\s+|slightly\s+|much\s+)?better", re.I)
_TIE = re.compile(
    r"(?:(?:it\s+is\s+|it's\s+)?a\s+)?(?:tie|draw|equal|neither|both|both\s+(?:are\s+)?equal(?:ly\s+good)?)"
    r"|(?:both\s+)?(?:images?|videos?)\s*(?:1\s+and\s+(?:image\s+|video\s+)?2\s+)?(?:are\s+)?(?:equal|tied|equally\s+good)",
    re.I,
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.I | re.S)


class Unreadable(ValueError):
    """An answer that states no verdict; the message says what was expected."""


def plain(text: str) -> float:
    """'Image 1', 'Video 2 is better', '1', 'tie' … -> 1.0, 0.0 or 0.5; several different verdicts are none."""
    short = " ".join(text.strip().strip("*_`\"'").split()).rstrip(".! ").strip("*_`\"'")
    if match := _ONLY.fullmatch(short):
        return 1.0 if match[1] == "1" else 0.0
    if _TIE.fullmatch(short):
        return 0.5
    said = set(_BETTER.findall(short))
    if len(said) == 1:
        return 1.0 if said == {"1"} else 0.0
    raise Unreadable(f"expected 'Image 1', 'Image 2' or 'tie', got {text[:80]!r}")


def think(text: str) -> float:
    """The verdict inside the one <answer>…</answer> that follows the reasoning."""
    found = _ANSWER.findall(text)
    if len(found) != 1:
        raise Unreadable(f"expected one <answer>…</answer>, found {len(found)} in {text[-80:]!r}")
    return plain(found[0])


def flex(text: str) -> tuple[float, dict[str, float]]:
    """Overall and per-category verdicts of one JSON object with `winner` and `categories[].cat_winner`."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (json.JSONDecodeError, RecursionError) as error:
        raise Unreadable(f"expected one JSON object, got {text[:80]!r} ({error})") from error
    if not isinstance(value, dict) or "winner" not in value:
        raise Unreadable(f"expected a JSON object with 'winner', got {text[:80]!r}")
    parts: dict[str, float] = {}
    categories = value.get("categories")
    for item in categories if isinstance(categories, list) else []:
        if isinstance(item, dict) and "cat_winner" in item:
            parts[str(item.get("name", item.get("category", len(parts))))] = plain(str(item["cat_winner"]))
    return plain(str(value["winner"])), parts


def label_logprobs(choice: Mapping[str, Any], labels: tuple[str, str]) -> tuple[float, float]:
    """Log-probabilities of the two labels at the first answered token of an OpenAI chat `choice`.

    A label outside the server's list gets the list's smallest value, an upper bound of its own; both outside raises.
    """
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not content:
        raise Unreadable("the server sent no logprobs; serve with logprobs on, or use a template with answer: plain")
    try:
        top = [(str(t["token"]), float(t["logprob"])) for t in content[0]["top_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Unreadable(f"the server's logprobs have no readable top_logprobs ({error!r})") from error
    found = [_of(label, top) for label in labels]
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
