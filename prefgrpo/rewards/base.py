"""What every reward takes and gives.

A reward scores samples, alone (`PointwiseReward`) or a prompt's whole group at once (`GroupwiseReward`). The
value of a sample that could not be scored is None with a reason: missing is never 0, −1 or 0.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefgrpo.judge.verdict import Verdict
from prefgrpo.media import Media


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated medium with the prompt it was made for."""

    prompt: str
    media: Media
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A reward's verdict on one sample."""

    value: float | None
    """The reward, or None if it is missing."""
    reason: str = ""
    """Why it is missing."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named sub-scores, for logs."""


@dataclass(frozen=True)
class Comparison:
    """One ordered pair of a group that was put to a judge."""

    first: int
    """Member shown first."""
    second: int
    """Member shown second."""
    verdict: Verdict
    """What the judge answered, or why nothing came."""


@dataclass
class GroupScores:
    """A groupwise reward's result for one group of G samples."""

    scores: list[Score]
    wins: NDArray[np.float64] | None = None
    """[G, G] summed soft verdicts that row beats column (pairwise rewards)."""
    counts: NDArray[np.float64] | None = None
    """[G, G] how many verdicts exist."""
    comparisons: list[Comparison] = field(default_factory=list)
    """Every judgement behind the scores (pairwise rewards)."""

    def shown(self, first: int, second: int) -> float:
        """Mean P(`first` beats `second`) over the comparisons that showed them in this order; NaN if none."""
        asked = [c.verdict.first for c in self.comparisons if (c.first, c.second) == (first, second)]
        found = [p for p in asked if p is not None]
        return float(np.mean(found)) if found else float("nan")


class PointwiseReward(ABC):
    """Scores samples one by one."""

    clips: bool = False
    """Whether it takes videos; a run that makes videos refuses a reward that does not."""

    @abstractmethod
    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, in order."""


class GroupwiseReward(ABC):
    """Scores the samples of one prompt together, in process, when all exist."""

    clips: bool = False
    """Whether it takes videos; a run that makes videos refuses a reward that does not."""

    @abstractmethod
    def score_group(self, group: list[Sample], seed: int) -> GroupScores:
        """Scores for the group, in order. `seed` fixes any random choice (pair plan, A/B order)."""
