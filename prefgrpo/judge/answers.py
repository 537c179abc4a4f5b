"""Parses a judge's answer: the log-probabilities of one token, the verdict stated in a text, or named scores.

Texts are read in the forms that templates ask for and judges were trained on. Invariant: only an unambiguous answer
counts: a text that states one winner, in sentences that are verdicts; a tie is 0.5. Anything else raises Unreadable and
the verdict is missing. A named score or category that cannot be read is left out. tests/judge/test_answers.py lists
where published parsers read the same answers differently, and why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prefgrpo.data.answer import Answer
from prefgrpo.data.tables import INVISIBLE
from prefgrpo.judge.http import describe_error
from prefgrpo.judge.template import Template, spelled

CATEGORIES = 3
_ONLY = re.compile(
    r"(?P<asked>(?:(?:my |the )?(?:final )?(?:answer|verdict|winner|choice|decision) ?(?:is|:)? ?)?)"
    r"(?:(?:(?:edited )?(?:image|video) )?([12])|(?:edited )?(?:image|video) ([12]) (?:is better|wins))",
    re.I | re.A,
)
"""A whole answer that names one of two."""
_TIE = re.compile(
    r"tie|both (?:images|videos|edited images) are equally good|(?:两[张个幅]图像?)?(?:都|质量)?一样好", re.I
)
_STATED = re.compile(
    r"\b(?:edited )?(?:image|video) ([12]) (?:is better|wins)"
    r"(?=[\"'”)]* *(?:$|,|because\b|since\b|due to\b|overall\b|as (?:it|the)\b|than (?:edited )?(?:image|video) [12]))",
    re.I | re.A,
)
"""What makes a sentence a verdict."""
_LEAD = re.compile(
    r"(?:(?:(?:therefore|thus|hence|so|overall|ultimately|finally|consequently|accordingly|all in all|as a result|"
    r"for these reasons|in (?:conclusion|summary|short)|to (?:conclude|sum up))[,:]?|"
    r"(?:based on|considering|given|taking|although|while|though|after|since|because)\b.*,) ?)?"
    r"(?:(?:my |the )?(?:final |overall )?(?:conclusion|output|answer|verdict|result|decision|judge?ment)(?: is)?[,:]?"
    r"(?: that)?|(?:i (?:conclude|believe|think|find)|it is clear)(?: that)?)?",
    re.I | re.A,
)
"""What may come before it in the sentence; anything else may negate, quote or narrow it."""
_THOUGHTS = re.compile(r".*</(?:think|thinking|thought)>", re.I | re.S)
_THINKS = re.compile(r"<(?:think|thinking|thought)>", re.I)
_SAME = {
    re.compile(r"\\boxed ?\{(?:\\text ?\{)?([^{}]*)\}+"): r"\nanswer: \1\n",
    re.compile(r"\b(?:the )?first (edited )?(image|video)\b", re.I): r"\1\2 1",
    re.compile(r"\b(?:the )?second (edited )?(image|video)\b", re.I): r"\1\2 2",
    re.compile(r"(?:图像|图片|图|视频|image|video) ?([12]) ?(?:更好|胜出|获胜)", re.I): r"image \1 is better",
    re.compile(r"第一[张个幅](?:图像|图片|图|视频)更好"): "image 1 is better",
    re.compile(r"第二[张个幅](?:图像|图片|图|视频)更好"): "image 2 is better",
    re.compile(r"\A\W*((?:edited )?(?:image|video) [12])[.,:;\s–—-]+(?=(?:reason|explanation|because|since)\b)", re.I):
        r"\1 is better.\n",
}  # fmt: skip
"""Other forms of a verdict → the form that is read."""
_PUNCTUATION = str.maketrans("。！？；，：", ".!?;,:", INVISIBLE)
_SPECIAL = re.compile(r"<\|[^<>|]{1,40}\|>|</s>|<eos>")
"""Special tokens of a model."""
_MARKUP = re.compile(r"[*`_$]+")
_EDGE = " \"'“”#>•.!\n"
_ANSWER = re.compile(r"</?answer>", re.I)
_SCORE = re.compile(r"</?score>", re.I)
_MARKS = re.compile(r"\[\s*[01](?:\s*,\s*[01])*\s*,?\s*\]")
_NUMBERED = re.compile(r"^\d+[.)] +", re.A)
_ROUNDING = 0.01
"""Tolerance: a larger log-probability than this is invalid."""
MIN_LABEL_MASS = 0.01
"""A soft verdict is missing if its two labels together have less probability than this."""
_CUT = ("length", "abort", "content_filter", "error")
"""Finish reasons of a truncated answer."""
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"


NO_THINKING = (
    "serve it with --default-chat-template-kwargs '{\"enable_thinking\": false}' (`prefgrpo judge serve` does for the "
    "presets)"
)


class Unreadable(ValueError):
    """The answer does not contain what the template asks for; the message says what was expected."""


def first_choice(url: str, payload: bytes) -> dict[str, Any]:
    """The first choice of a chat completion; Unreadable if there is none."""
    try:
        choice = json.loads(payload)["choices"][0]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unreadable(
            f"{url} sent no readable chat completion ({describe_error(error)}): {payload[:80]!r}"
        ) from error
    if not isinstance(choice, dict):
        raise Unreadable(f"{url} sent a chat completion whose choice is no object: {payload[:80]!r}")
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
            first, second = label_logprobs(choice, template.labels, template.variants, after_space)
            value, reason = two_label_softmax(first, second, MIN_LABEL_MASS)
            return Answer(value, reason, raw=f"logp {first:.4f} {second:.4f}")
        if template.answer == "word" and template.labels:
            return Answer(word_probability(choice, template.labels))
        if text is None:
            only = f"the judge only thought, for max_tokens = {template.max_tokens}: {NO_THINKING}"
            raise Unreadable(only if thoughts else "the server's answer has no text")
        value, parts = parse_answer(template, text, choice.get("finish_reason") in _CUT)
        return Answer(value, raw=raw, parts=parts)
    except Unreadable as error:
        thinks = f"; the judge thinks first: {NO_THINKING}" if thoughts and template.labels else ""
        return Answer(None, f"{error}{thinks}", raw=raw)


def _utf8(text: Any) -> str | None:
    """A text without lone surrogates, which cannot be written to a log; None for anything else."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def parse_answer(template: Template, text: str, cut: bool = False) -> tuple[float | None, dict[str, float]]:
    """Parse a text answer to `template` into (value, parts); Unreadable if it contains neither, or was cut off."""
    if cut:
        raise Unreadable(
            f"the answer was cut off (max_tokens is {template.max_tokens}; raise it in the template): {text[-80:]!r}"
        )
    text = strip_reasoning(_SPECIAL.sub("\n", text))
    match template.answer:
        case "think":
            return _winner(_between(text, _ANSWER)), {}
        case "plain":  # tags are optional
            return _winner(_between(text, _ANSWER) if _ANSWER.search(text) else text), {}
        case "flex":
            return parse_flex(text)
        case "scores":
            return None, parse_scores(text, template.scores, template.pattern)
        case "json":
            return None, parse_json_scores(text, template.scores)
    return None, parse_marks(text)


def strip_reasoning(text: str) -> str:
    """The text after the reasoning, or the whole text if there is none; Unreadable if the reasoning never ends."""
    before = _THOUGHTS.match(text)
    said = text[before.end() :] if before else text
    if _THINKS.search(said):
        raise Unreadable(f"the reasoning has no </think>: {said[-80:]!r}")
    return said


def _bare(text: str) -> str:
    """The text without markup and repeated spaces, line by line."""
    return "\n".join(" ".join(line.split()) for line in _MARKUP.sub("", text).translate(_PUNCTUATION).splitlines())


def _between(text: str, tag: re.Pattern[str]) -> str:
    """The text inside the one opening and closing tag; Unreadable if there are others, or none."""
    tags = tag.findall(text)
    if [found[1] == "/" for found in tags] != [False, True]:
        raise Unreadable(f"expected one {tag.pattern.replace('/?', '')}, found {len(tags)} tags in {text[-80:]!r}")
    return tag.split(text)[1]


def _winner(value: Any) -> float:
    """1.0, 0.0 or 0.5 from a short verdict ('Image 1', 'tie'), or the one winner that the sentences of a longer text
    state."""
    text = "" if isinstance(value, bool) else _bare(str(value))
    for form, read in _SAME.items():
        text = form.sub(read, text)
    whole = text.strip(_EDGE)
    if short := _ONLY.fullmatch(whole):
        return 2.0 - int(short[2] or short[3])
    if _TIE.fullmatch(whole):
        return 0.5
    pieces = re.split(r"([.!?;\n])", text)
    stated = set()
    for sentence, end in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        named = _ONLY.fullmatch(sentence.strip(_EDGE))
        if named and named["asked"] and end != "?":
            stated.add(named[2] or named[3])
        found = list(_STATED.finditer(sentence))
        before = sentence[: found[0].start()].strip(_EDGE) if found else ""
        if end != "?" and _LEAD.fullmatch(before):
            stated |= {match[1] for match in found}
    if len(stated) != 1:
        raise Unreadable(f"expected 'Image 1', 'Image 2', 'tie' or 'Image k is better', got {text[-80:]!r}")
    return 2.0 - int(stated.pop())


def parse_flex(text: str) -> tuple[float, dict[str, float]]:
    """Overall and per-category verdicts of one JSON object with `winner` and `categories[].cat_winner`.

    Only the first CATEGORIES are used, as written, because the judge may add one of its own after them.
    """
    value = _json_object(text)
    if "winner" not in value:
        raise Unreadable(f"expected a JSON object with 'winner', got {text[:80]!r}")
    parts: dict[str, float] = {}
    categories = value.get("categories")
    for index, item in enumerate(categories[:CATEGORIES] if isinstance(categories, list) else []):
        try:
            parts.setdefault(str(item.get("name", index)), _winner(item.get("cat_winner")))
        except (Unreadable, AttributeError):
            continue  # only this category is missing; the verdict still counts
    return _winner(value["winner"]), parts


def parse_scores(text: str, names: tuple[tuple[str, float, float], ...], pattern: str) -> dict[str, float]:
    """Named scores from lines that are `pattern`, numbered or not; a score out of range, or stated with two values, is
    left out. After the number there may be its maximum: 4.5/5."""
    lines = [_NUMBERED.sub("", line.lstrip(" #>•-")) for line in _bare(text).splitlines()]
    values = {}
    for name, low, high in names:
        before, after = (re.escape(part.strip()) for part in pattern.replace("{name}", name).split("{value}"))
        score_line = re.compile(rf"{before}{_NUMBER}(?:/ ?{high:g} ?)?{after}\.?", re.I | re.A)
        said = {float(match[1]) for match in map(score_line.fullmatch, lines) if match}
        if len(said) == 1 and low <= min(said) <= high:
            values[name] = said.pop()
    if not values:
        raise Unreadable(f"expected a line {pattern!r} with a number in its range, got {text[-80:]!r}")
    return values


def parse_json_scores(text: str, names: tuple[tuple[str, float, float], ...]) -> dict[str, float]:
    """Named scores from one JSON object {…, "score": [a, b]}; the list must hold one in-range number per name."""
    value = _json_object(text).get("score")
    if not isinstance(value, list) or len(value) != len(names):
        raise Unreadable(f"expected a JSON object with 'score': a list of {len(names)} numbers, got {text[:80]!r}")
    for item, (name, low, high) in zip(value, names, strict=True):
        if type(item) not in (int, float) or not low <= item <= high:
            raise Unreadable(f"score '{name}' must be a number from {low:g} to {high:g}, got {str(item)[:40]}")
    return {name: float(item) for item, (name, *_) in zip(value, names, strict=True)}


def parse_marks(text: str) -> dict[str, float]:
    """{'1': 1.0, '2': 0.0, …}: the zeros and ones inside the only <score>[…]</score>, keyed by position."""
    listed = _between(text, _SCORE).strip()
    if not _MARKS.fullmatch(listed):
        raise Unreadable(f"expected a list of 0 and 1 inside <score>…</score>, got {listed[:80]!r}")
    return {str(k): float(mark) for k, mark in enumerate(re.findall("[01]", listed), start=1)}


def _json_object(text: str) -> dict[str, Any]:
    """Parse the text from the first brace to the last as one JSON object; line breaks inside strings are allowed."""
    try:
        value = json.loads(text[text.find("{") : text.rfind("}") + 1], strict=False)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"expected one JSON object, got {text[:80]!r} ({error})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"expected one JSON object, got {text[:80]!r}")
    return value


def label_logprobs(
    choice: Mapping[str, Any], labels: tuple[str, str], variants: bool | None = False, after_space: bool = False
) -> tuple[float, float]:
    """Log-probabilities of the two labels at the first generated token of an OpenAI chat `choice`, or at the second,
    after a space.

    The probabilities of all listed tokens that equal a label up to white space are summed; with `variants`, up to case
    too (None: exact matches only). A label that the server does not list gets the upper bound of
    `_max_unlisted_logprob`. Raises Unreadable if neither label is listed, or if the unlisted one may be the likelier.
    """
    if after_space and spelled(_token(choice, 0)[1], False):
        raise Unreadable("the server did not write the space before the label (allowed_token_ids)")
    listed, sampled = _token(choice, int(after_space))
    first, second = (
        [v for token, v in listed if spelled(token, variants) == spelled(label, variants)] for label in labels
    )
    if not first and not second:
        _refuse_thinking(listed)
        raise Unreadable(f"neither label {labels} is among the judge's {len(listed)} likeliest tokens")
    most = _max_unlisted_logprob(listed, sampled)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        one = float(np.logaddexp.reduce(first or [most]))
        two = float(np.logaddexp.reduce(second or [most]))
    if not (first and second) and most > (one if first else two):
        raise Unreadable(
            f"the server lists one label of {labels}, and {len(listed)} tokens in all: the other may be the likelier; "
            "ask with temperature 0 and without logit_bias or allowed_token_ids (the template's `request`)"
        )
    return one, two


def two_label_softmax(first: float, second: float, min_mass: float) -> tuple[float | None, str]:
    """(sigmoid(first − second), '') from the labels' log-probabilities, or (None, why not).

    Missing if the two labels' probabilities sum to less than `min_mass`, or are not finite.
    """
    if math.isnan(first) or math.isnan(second) or max(first, second) > _ROUNDING:
        return None, f"the labels' log-probs {first:.3g} and {second:.3g} are not logarithms of a probability"
    mass = math.exp(min(first, 0.0)) + math.exp(min(second, 0.0))
    if not mass >= min_mass or math.isnan(first - second):
        return None, f"the labels have only {mass:.2g} of the answer's probability (at least {min_mass:g} expected)"
    gap = max(-700.0, min(700.0, first - second))
    return 1.0 / (1.0 + math.exp(-gap)), ""


def word_probability(choice: Mapping[str, Any], words: tuple[str, str]) -> float:
    """Probability that the first generated token of a `choice` is one of `words`, up to white space and case; if none
    is listed, the largest that it can have. A probability, not a share of two labels: any other word is a wrong answer.
    """
    listed, sampled = _token(choice, 0)
    spelt = {spelled(word, True) for word in words}
    found = [v for token, v in listed if spelled(token, True) in spelt]
    if not found:
        _refuse_thinking(listed)
        found = [_max_unlisted_logprob(listed, sampled)]
    if math.isnan(sum(found)):
        raise Unreadable("the server's logprobs are not numbers")
    return min(1.0, math.fsum(math.exp(v) for v in found))


def _token(choice: Mapping[str, Any], place: int) -> tuple[list[tuple[str, float]], str]:
    """(text, log-probability) of the likeliest tokens at a position of the answer (several may have the same text), and
    the text of the sampled one. Unreadable if the server sent none."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not content:
        raise Unreadable("the server sent no logprobs; serve with logprobs on, or use a template with answer: plain")
    try:
        listed = [(str(t["token"]), float(t["logprob"])) for t in content[place]["top_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Unreadable(f"the server's logprobs have no readable top_logprobs ({error!r})") from error
    if not listed:
        raise Unreadable("the server's top_logprobs are empty")
    return listed, str(content[place].get("token"))


def _refuse_thinking(listed: Sequence[tuple[str, float]]) -> None:
    if any("think" in token for token, _ in listed):
        raise Unreadable(f"the judge begins to think instead of answering with a label: {NO_THINKING}")


def _max_unlisted_logprob(listed: Sequence[tuple[str, float]], sampled: str) -> float:
    """Largest log-probability that a token outside the server's list can have: min(lowest listed, log(1 − Σ listed)).

    vLLM lists the sampled token first, whatever its rank: at a temperature, or where tokens are biased or forbidden,
    more likely ones may be missing. So it does not count as the lowest.
    """
    rest = 1.0 - math.fsum(math.exp(min(v, 0.0)) for _, v in listed)
    if math.isnan(rest):
        return math.nan
    (lowest, least), *others = sorted(listed, key=lambda item: item[1])
    if lowest == sampled:
        least = others[0][1] if others else 0.0
    return min(least, math.log(max(rest, 2.0**-23)))  # servers compute probabilities in fp32
