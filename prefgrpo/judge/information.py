"""Whether verdicts depend on the images: questions with known answers before a run, constant verdicts during it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.media import Media
from prefgrpo.judge.template import Template
from prefgrpo.judge.verdict import Pair, PairJudge

MIN_VERDICTS = 32
"""Least number of verdicts that count as a step; fewer could be the same by chance."""
TIE = 0.001
"""A verdict this close to ½ is a tie."""
SPREAD = 0.01
"""Verdicts for one side that differ by more than this depend on the images: a biased judge may still rank correctly."""
MIN_RIGHT_SHARE = 0.8
"""Share of known answers that a judge must get right; by guessing, 7 or 8 of 8 are right in 1 of 28 cases."""
COLOURS = {"yellow": (240, 220, 40), "white": (255, 255, 255), "black": (0, 0, 0), "red": (220, 30, 30)}
COLOURS |= {"green": (40, 160, 60), "blue": (30, 60, 220)}
PROBES = {"yellow": ("blue", "red", "noise"), "white": ("black", "green"), "black": ("red", "green", "noise")}
"""Requested colour → alternatives shown beside it. Neither the lighter nor the darker image is always right."""


@dataclass(frozen=True)
class KnownAnswers:
    """A judge's result on pairs with known answers, each shown in both orders."""

    asked: int
    """Number of pairs."""
    right: int
    """Number of pairs whose correct image wins over both orders, so that a position bias cancels."""
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
    p: list[float | None] = []  # alternately with the correct image first and second
    reasons: list[str] = []
    for colour, others in PROBES.items():
        task = f"Make the whole picture plain {colour}" if template.takes_source else f"a plain {colour} picture"
        pairs: list[Pair] = [pair for k in range(len(others)) for pair in ((0, k + 1), (k + 1, 0))]
        verdicts = judge.judge_group(task, [shown[name] for name in (colour, *others)], pairs, source)
        p += [v.first for v in verdicts]
        reasons += [v.reason for v in verdicts if v.first is None]
    first = np.array(p, np.float64)  # None: NaN
    lead = first[::2] - first[1::2]
    right = int((lead > TIE).sum())
    if len(reasons) > (1 - MIN_RIGHT_SHARE) * len(first):
        return KnownAnswers(len(lead), right, f"gave no verdict on {len(reasons)} plain images: {reasons[0]}")
    return KnownAnswers(len(lead), right, _problem(first[~np.isnan(first)], lead, right))


def _problem(first: NDArray[np.float64], lead: NDArray[np.float64], right: int) -> str:
    """What is wrong with a judge's known answers; '' if enough are right."""
    if right >= MIN_RIGHT_SHARE * len(lead):
        return ""
    preferred = int((first > 0.5 + TIE).sum())
    count = f"{right} of {len(lead)} pairs are right; the image shown first won {preferred} of {len(first)} times"
    if same := _same(float(first.min()), float(first.max())):
        return f"always answers the same: its verdicts are {same} ({count})"
    if (lead < -TIE).sum() >= MIN_RIGHT_SHARE * len(lead):
        return f"prefers the wrong image ({count}); are the template's labels, or its images, in the wrong order?"
    return f"does not see the images, or mixes them up ({count})"


def _same(low: float, high: float) -> str:
    """What verdicts between two values have in common if they are all the same, else ''."""
    if abs(low - 0.5) <= TIE and abs(high - 0.5) <= TIE:
        return "ties"
    if high - low <= SPREAD and (low > 0.5 + TIE or high < 0.5 - TIE):
        return "for the image shown first" if low > 0.5 else "for the image shown second"
    return ""


def extent(verdicts: Iterable[float | None], rounded: bool) -> NDArray[np.float64]:
    """[3]: number of verdicts, smallest and largest (rounded: after rounding to {0, ½, 1}), for `Alarm`."""
    p = np.array([v for v in verdicts if v is not None], np.float64)
    if rounded:
        p = (np.sign(p - 0.5) + 1) / 2
    return np.array([len(p), p.min(initial=np.inf), p.max(initial=-np.inf)])


class Alarm:
    """Counts consecutive steps whose verdicts are all the same; steps with few verdicts are pooled and count as one."""

    def __init__(self) -> None:
        self.steps = 0
        self._pooled = extent((), False)

    def add(self, ranks: NDArray[np.float64]) -> str:
        """Add a step's `extent` on each rank [R, 3]; what all verdicts of this step (and pooled ones) are, or ''."""
        counts, lows, highs = np.vstack([ranks, self._pooled]).T
        self._pooled = np.array([counts.sum(), lows.min(), highs.max()])
        count, low, high = self._pooled.tolist()
        if count < MIN_VERDICTS:
            return ""
        self._pooled = extent((), False)
        same = _same(low, high)
        self.steps = self.steps + 1 if same else 0
        return f"all {count:.0f} verdicts are {same}" if same else ""
