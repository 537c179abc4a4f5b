"""What every reward takes and gives.

A reward scores samples, alone (`PointwiseReward`) or a prompt's whole group at once (`GroupwiseReward`). The
value of a sample that could not be scored is None with a reason: missing is never 0, −1 or 0.5.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.judge.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Media:
    """An image [H, W, 3] or a video [F, H, W, 3], uint8 RGB. Encodings are made once and kept."""

    pixels: NDArray[np.uint8]

    @property
    def clip(self) -> bool:
        """Whether this is a video."""
        return self.pixels.ndim == 4

    def frames(self, most: int | None = None) -> list[Media]:
        """Frames of a clip as images, evenly spread from first to last if there are more than `most`; [self] of an
        image."""
        if not self.clip:
            return [self]
        count = len(self.pixels)
        chosen = range(count) if most is None or count <= most else np.linspace(0, count - 1, most, dtype=int)
        return [Media(self.pixels[k]) for k in chosen]

    @cached_property
    def pil(self) -> Image.Image:
        """The image as PIL (images only)."""
        return Image.fromarray(self.pixels)

    @cached_property
    def jpeg(self) -> bytes:
        """JPEG, quality 95, 4:4:4 below 256 pixels a side (where 4:2:0 would smear colours)."""
        buffer = io.BytesIO()
        self.pil.save(buffer, "JPEG", quality=95, subsampling=0 if min(self.pil.size) < 256 else 2)
        return buffer.getvalue()

    @cached_property
    def webp(self) -> bytes:
        """WebP, lossless, fastest method."""
        buffer = io.BytesIO()
        self.pil.save(buffer, "WEBP", lossless=True, method=0, quality=0)
        return buffer.getvalue()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shape and pixels, hex."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()


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
