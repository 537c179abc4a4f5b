"""Rewards of an image's vector, and of a clip frame by frame: value = mean over its frames, evenly spread.

Invariant: a sample without pixels, or with a value that is not finite, is missing; the others are scored.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from torch import Tensor

from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.encoder import Encoder, Fit


class FrameReward(PointwiseReward):
    """Scores the vectors of images, frame by frame."""

    takes = ("image", "video")

    def __init__(self, encoder: Encoder, frames: int, fit: Fit | None = None) -> None:
        """frames: how many frames of a clip are scored, evenly spread; 1 is the first alone. fit: as Encoder.images."""
        if frames < 1:
            raise RewardError(f"frames must be at least 1, got {frames}")
        self.encoder, self.frames, self.fit = encoder, frames, fit

    @abstractmethod
    def values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        """[n] values of n images: their vectors [n, D] and their prompts."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, the mean over its frames."""
        return self.in_batches(samples, max(1, len(samples)), self._scores)

    def _scores(self, samples: list[Sample]) -> list[Score]:
        shown = [s.media.frames(self.frames) for s in samples]
        vectors = self.encoder.images([frame for frames in shown for frame in frames], self.fit)
        values = self.values(vectors, [s.prompt for s, frames in zip(samples, shown, strict=True) for _ in frames])
        each = values.split([len(frames) for frames in shown])
        return [score_of(found.tolist()) for found in each]


def score_of(values: list[float]) -> Score:
    """Mean of the values; missing if it is not finite."""
    mean = math.fsum(values) / len(values)
    return Score(mean) if math.isfinite(mean) else Score(None, f"the model's score is {mean}")
