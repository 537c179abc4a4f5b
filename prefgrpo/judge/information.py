"""Tests whether verdicts depend on the images: questions with known answers before a run, statistics during it.

The position bias of soft verdicts is removed before they are read as first or second, because the two orders of a pair
cancel it. Verdicts of exactly 0, ½ or 1 (with rounded win rates: all verdicts) are hard and used unchanged. Fewer than
`MIN_VERDICTS` verdicts or `MIN_PAIRS` pairs in both orders never raise an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.media import Media
from prefgrpo.judge.plans import Judged
from prefgrpo.judge.template import Template
from prefgrpo.judge.verdict import Pair, PairJudge

MIN_VERDICTS = 32
"""Least number of verdicts without ties for "always the same side"; least number of ties for "always a tie"."""
MIN_PAIRS = 100
"""Least number of pairs with a winner in both orders for contradictions to count."""
MAX_SWAPPED = 0.45
"""If the winner of more than this share of them changes with the order, verdicts carry no information; chance: ½."""
TIE = 0.001
"""A verdict this close to ½ is a tie; soft verdicts with a standard deviation below this are constant."""
SPREAD = 0.01
"""The same limit on the standard deviation if no pair was shown in both orders."""
MIN_RIGHT_SHARE = 0.8
"""Share of known answers that a judge must get right; by guessing, 13 or more of 16 are right in 1 of 94 cases."""
COLOURS = {"yellow": (240, 220, 40), "white": (255, 255, 255), "black": (0, 0, 0), "red": (220, 30, 30)}
COLOURS |= {"green": (40, 160, 60), "blue": (30, 60, 220)}
PROBES = {"yellow": ("blue", "red", "noise"), "white": ("black", "green"), "black": ("red", "green", "noise")}
"""Requested colour → alternatives shown beside it. Neither the lighter nor the darker image is always right."""


@dataclass(frozen=True)
class KnownAnswers:
    """A judge's result on pairs with known answers, each shown in both orders."""

    asked: int
    """Number of questions."""
    right: int
    """Number of verdicts for the correct image."""
    problem: str
    """What is wrong with the judge; '' if nothing."""


def is_pairwise(template: Template) -> bool:
    """Whether the template asks which of two media is better; templates with Yes/No labels do not."""
    return [label.strip().casefold() for label in template.labels or ()] != ["yes", "no"]


def ask_known_answers(judge: PairJudge, template: Template, clips: bool = False) -> KnownAnswers:
    """Ask which image is a plain colour, beside another colour or noise: 8 pairs in both orders.

    clips: show clips of two frames. For edit templates the source is a plain grey image.
    """
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    pixels = {name: np.full((64, 64, 3), colour, np.uint8) for name, colour in COLOURS.items()} | {"noise": noise}
    clips = clips or template.name.endswith("_video")
    shown = {name: Media(np.stack([p, p]) if clips else p) for name, p in pixels.items()}
    source = [Media(np.full((64, 64, 3), 128, np.uint8))]
    answers: list[tuple[bool, float]] = []
    reasons: list[str] = []
    for colour, others in PROBES.items():
        task = f"Make the whole picture plain {colour}" if template.takes_source else f"a plain {colour} picture"
        pairs: list[Pair] = [pair for k in range(len(others)) for pair in ((0, k + 1), (k + 1, 0))]
        verdicts = judge.judge_group(task, [shown[name] for name in (colour, *others)], pairs, source)
        answers += [(i == 0, v.first) for (i, _), v in zip(pairs, verdicts, strict=True) if v.first is not None]
        reasons += [v.reason for v in verdicts if v.first is None]
    asked = len(answers) + len(reasons)
    first, p = np.array(answers, np.float64).reshape(-1, 2).T
    right = int((_debiased_side(p, False) == np.where(first, 1, -1)).sum())
    problem = _problem(_side(p), right)
    if len(answers) < MIN_RIGHT_SHARE * asked:
        problem = f"gave no verdict on {len(reasons)} of {asked} plain images: {reasons[0]}"
    return KnownAnswers(asked, right, problem)


def _problem(sides: NDArray[np.float64], right: int) -> str:
    """What is wrong with a judge's known answers; '' if enough are right."""
    count = f"{right} of {len(sides)} known answers are right"
    enough = MIN_RIGHT_SHARE * len(sides)
    if right >= enough:
        return ""
    if not sides.any():
        return f"always answers a tie ({count})"
    for side, chosen in (("first", int((sides > 0).sum())), ("second", int((sides < 0).sum()))):
        if chosen == len(sides):
            return f"always prefers the image shown {side} ({count})"
        if chosen >= enough:
            return f"has a position bias: it prefers the image shown {side} {chosen} of {len(sides)} times ({count})"
    if right <= len(sides) - enough:
        return f"prefers the wrong image ({count}); are the template's labels, or its images, in the wrong order?"
    return f"does not see the images, or mixes them up ({count})"


def verdict_counts(groups: Iterable[Sequence[Judged]], rounded: bool) -> NDArray[np.float64]:
    """Counts [9] of a step's verdicts, to be summed over ranks and passed to `Alarm`.

    rounded: whether the win rates round verdicts to {0, ½, 1}.
    """
    groups = list(groups)
    p = np.array([p for group in groups for *_, p in group if p is not None], np.float64)
    soft, sides = _is_soft(p, rounded), _side(p)
    side, pairs, swapped = iter(_debiased_side(p, rounded)), 0, 0
    for group in groups:
        shown = {(i, j): next(side) for i, j, q in group if q is not None}
        both = [(s, t) for (i, j), s in shown.items() if i < j and s and (t := shown.get((j, i), 0.0))]
        pairs, swapped = pairs + len(both), swapped + sum(s != -t for s, t in both)
    counts = [len(p), (sides == 0).sum(), (sides > 0).sum(), (sides < 0).sum(), soft.sum(), p.sum(), (p * p).sum()]
    return np.array([*counts, pairs, swapped], np.float64)


def uninformative_reason(counts: NDArray[np.float64]) -> str:
    """Why verdicts with this summed `verdict_counts` carry no information; '' if they do or are too few to tell."""
    count, ties, first, second, soft, total, squares, pairs, swapped = counts.tolist()
    if ties == count >= MIN_VERDICTS:
        return f"all {count:.0f} verdicts are ties"
    if pairs >= MIN_PAIRS and swapped > MAX_SWAPPED * pairs:
        return f"the winner changes with the order in {swapped:.0f} of {pairs:.0f} pairs, more than {MAX_SWAPPED:.0%}"
    constant = not soft or squares / count - (total / count) ** 2 < (TIE if pairs else SPREAD) ** 2
    if first + second >= MIN_VERDICTS and constant and (not first or not second):
        side = "first" if first else "second"
        return f"all {first + second:.0f} verdicts, ties aside, prefer the one shown {side}"
    return ""


class Alarm:
    """Counts consecutive steps whose verdicts carry no information."""

    def __init__(self) -> None:
        self.steps = 0
        """Consecutive steps without information; steps with too few verdicts are pooled and count as one."""
        self._counts = verdict_counts([], False)

    def add(self, counts: NDArray[np.float64]) -> str:
        """Add a step's evidence; what is wrong with it and the pooled steps before it, or ''."""
        self._counts = self._counts + counts
        count, ties, *_, pairs, _ = self._counts.tolist()
        if count < MIN_VERDICTS or (ties < count and (count - ties < MIN_VERDICTS or 0 < pairs < MIN_PAIRS)):
            return ""
        wrong = uninformative_reason(self._counts)
        self.steps = self.steps + 1 if wrong else 0
        self._counts = np.zeros_like(counts)
        return wrong


def _is_soft(p: NDArray[np.float64], rounded: bool) -> NDArray[np.bool_]:
    """Which verdicts are probabilities rather than hard verdicts."""
    return ~np.isin(p, (0.0, 0.5, 1.0)) & (not rounded)


def _side(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """1: the first is preferred, −1: the second, 0: a tie."""
    return np.where(abs(p - 0.5) > TIE, np.sign(p - 0.5), 0.0)


def _debiased_side(p: NDArray[np.float64], rounded: bool) -> NDArray[np.float64]:
    """The preferred sides after subtracting the mean logit of the soft verdicts."""
    soft = _is_soft(p, rounded)
    logits = np.log(p[soft]) - np.log1p(-p[soft])
    out = p.copy()
    if len(logits) > 1:
        out[soft] = 1 / (1 + np.exp(logits.mean() - logits))
    return _side(out)
