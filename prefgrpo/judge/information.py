"""Whether verdicts depend on what the judge was shown: known answers before a run, counts during it.

The position bias of soft verdicts is removed before their side is read, because the two orders of a pair cancel it; a
verdict of exactly 0, ½ or 1 is a statement and is taken as it is (and so is every verdict where the win rates round
them). Fewer than `FEW` verdicts or `FEW_PAIRS` swapped pairs never raise an alarm.
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

FEW = 32
"""Verdicts that must exist, ties aside, before a side counts as constant; and ties before all count as ties."""
FEW_PAIRS = 100
"""Pairs with a winner in both orders that must exist before contradictions count."""
CONTRADICTIONS = 0.45
"""Share of these whose winner changes with the order, above which verdicts say nothing; chance gives a half."""
TIE = 0.001
"""Distance from ½ up to which a verdict is a tie, and spread up to which soft verdicts are one constant."""
SPREAD = 0.01
"""Standard deviation of soft verdicts below which they are one constant, where no pair was shown in both orders."""
RIGHT = 0.8
"""Share of the known answers that a judge must get right; who guesses gets 13 of 16 in one of 94 cases."""
COLOURS = {"yellow": (240, 220, 40), "white": (255, 255, 255), "black": (0, 0, 0), "red": (220, 30, 30)}
COLOURS |= {"green": (40, 160, 60), "blue": (30, 60, 220)}
PROBES = {"yellow": ("blue", "red", "noise"), "white": ("black", "green"), "black": ("red", "green", "noise")}
"""Colour that is asked for → what stands beside it. Neither the lighter nor the darker one is always right."""


@dataclass(frozen=True)
class Known:
    """How a judge answered pairs with known answers, each in both orders."""

    asked: int
    """Questions."""
    right: int
    """Verdicts for the picture that shows what the caption says."""
    problem: str
    """What is wrong with the judge, by name; '' if nothing."""


def compares(template: Template) -> bool:
    """Whether the template asks which of two is better: one answered with yes or no asks something else about them."""
    return [label.strip().casefold() for label in template.labels or ()] != ["yes", "no"]


def known_answers(judge: PairJudge, template: Template, clips: bool = False) -> Known:
    """Ask for a plain colour, shown beside another one or beside noise: 8 pairs in both orders.

    clips: show clips of two frames. Edits are of a plain grey picture.
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
    right = int((_unbiased(p, False) == np.where(first, 1, -1)).sum())
    problem = _problem(_side(p), right)
    if len(answers) < RIGHT * asked:
        problem = f"gave no verdict on {len(reasons)} of {asked} plain pictures: {reasons[0]}"
    return Known(asked, right, problem)


def _problem(sides: NDArray[np.float64], right: int) -> str:
    """What is wrong with answers to pairs with known answers; '' if enough are right."""
    count = f"{right} of {len(sides)} known answers are right"
    enough = RIGHT * len(sides)
    if right >= enough:
        return ""
    if not sides.any():
        return f"always answers a tie ({count})"
    for side, chosen in (("first", int((sides > 0).sum())), ("second", int((sides < 0).sum()))):
        if chosen == len(sides):
            return f"always prefers the picture shown {side} ({count})"
        if chosen >= enough:
            return f"has a position bias: it prefers the picture shown {side} {chosen} of {len(sides)} times ({count})"
    if right <= len(sides) - enough:
        return f"prefers the wrong picture ({count}); are the template's labels, or its pictures, in the wrong order?"
    return f"does not see the pictures, or confuses them ({count})"


def evidence(groups: Iterable[Sequence[Judged]], rounded: bool) -> NDArray[np.float64]:
    """Counts [9] of a step's verdicts, to be summed over ranks and given to `Alarm`.

    rounded: the win rates round verdicts to {0, ½, 1}.
    """
    groups = list(groups)
    p = np.array([p for group in groups for *_, p in group if p is not None], np.float64)
    soft, sides = _soft(p, rounded), _side(p)
    side, pairs, swapped = iter(_unbiased(p, rounded)), 0, 0
    for group in groups:
        shown = {(i, j): next(side) for i, j, q in group if q is not None}
        both = [(s, t) for (i, j), s in shown.items() if i < j and s and (t := shown.get((j, i), 0.0))]
        pairs, swapped = pairs + len(both), swapped + sum(s != -t for s, t in both)
    counts = [len(p), (sides == 0).sum(), (sides > 0).sum(), (sides < 0).sum(), soft.sum(), p.sum(), (p * p).sum()]
    return np.array([*counts, pairs, swapped], np.float64)


def without_information(counts: NDArray[np.float64]) -> str:
    """What is wrong with the verdicts behind summed `evidence`; '' if nothing, or if they are too few to say."""
    count, ties, first, second, soft, total, squares, pairs, swapped = counts.tolist()
    if ties == count >= FEW:
        return f"all {count:.0f} verdicts are ties"
    if pairs >= FEW_PAIRS and swapped > CONTRADICTIONS * pairs:
        return (
            f"the winner changes with the order in {swapped:.0f} of {pairs:.0f} pairs, more than {CONTRADICTIONS:.0%}"
        )
    constant = not soft or squares / count - (total / count) ** 2 < (TIE if pairs else SPREAD) ** 2
    if first + second >= FEW and constant and (not first or not second):
        side = "first" if first else "second"
        return f"all {first + second:.0f} verdicts, ties aside, prefer the one shown {side}"
    return ""


class Alarm:
    """Counts steps in a row without information."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps in a row without information; those with little evidence are pooled and count as one."""
        self._counts = evidence([], False)

    def add(self, counts: NDArray[np.float64]) -> str:
        """Add a step's evidence; what is wrong with it and the steps before it that had too little, '' if nothing."""
        self._counts = self._counts + counts
        count, ties, *_, pairs, _ = self._counts.tolist()
        if count < FEW or (ties < count and (count - ties < FEW or 0 < pairs < FEW_PAIRS)):
            return ""
        wrong = without_information(self._counts)
        self.steps = self.steps + 1 if wrong else 0
        self._counts = np.zeros_like(counts)
        return wrong


def _soft(p: NDArray[np.float64], rounded: bool) -> NDArray[np.bool_]:
    """Which verdicts are probabilities and not statements."""
    return ~np.isin(p, (0.0, 0.5, 1.0)) & (not rounded)


def _side(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 for the first, −1 for the second, 0 for a tie."""
    return np.where(abs(p - 0.5) > TIE, np.sign(p - 0.5), 0.0)


def _unbiased(p: NDArray[np.float64], rounded: bool) -> NDArray[np.float64]:
    """The sides after the mean logit of soft verdicts is taken out of them."""
    soft = _soft(p, rounded)
    logits = np.log(p[soft]) - np.log1p(-p[soft])
    out = p.copy()
    if len(logits) > 1:
        out[soft] = 1 / (1 + np.exp(logits.mean() - logits))
    return _side(out)
