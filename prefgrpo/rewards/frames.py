"""Rewards of an image's vector, and of a clip frame by frame: value = mean over its frames, evenly spread.

Invariant: a sample without pixels, or with a value that is not finite, is missing; the others are scored.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
from torch import Tensor

from prefgrpo.media import Media
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.encoder import Encoder


class FrameReward(PointwiseReward):
    """Scores the vectors of images, frame by frame."""

    takes = ("image", "video")

    def __init__(self, encoder: Encoder, frames: int) -> None:
        """frames: how many frames of a clip are scored, evenly spread; 1 is the first alone."""
        if frames < 1:
            raise RewardError(f"frames must be at least 1, got {frames}")
        self.encoder, self.frames = encoder, frames

    @abstractmethod
    def values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        """[n] values of n images: their vectors [n, D] and their prompts."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, the mean over its frames."""
        reasons = [unusable(s.media) for s in samples]
        shown = [
            (k, f) for k, (s, bad) in enumerate(zip(samples, reasons)) if not bad for f in s.media.frames(self.frames)
        ]
        values: list[list[float]] = [[] for _ in samples]
        if shown:
            vectors = self.encoder.images([f for _, f in shown])
            found = self.values(vectors, [samples[k].prompt for k, _ in shown])
            for (k, _), value in zip(shown, found.tolist(), strict=True):
                values[k].append(value)
        return [Score(None, bad) if bad else score_of(v) for bad, v in zip(reasons, values, strict=True)]


def unusable(media: Media) -> str:
    """Why a medium cannot be encoded; empty if it can."""
    shape = media.pixels.shape
    if len(shape) not in (3, 4) or shape[-1] != 3 or media.pixels.dtype != np.uint8:
        return f"expected 8-bit RGB pixels, got {media.pixels.dtype} {list(shape)}"
    return "" if all(shape) else f"the medium has no pixels: {list(shape)}"


def no_image(media: Media) -> str:
    """Why a medium cannot be scored as one image; empty if it can."""
    return unusable(media) or ("expected an image, got a clip" if media.clip else "")


def score_of(values: list[float]) -> Score:
    """Mean of the values; missing if it is not finite."""
    mean = math.fsum(values) / len(values)
    return Score(mean) if math.isfinite(mean) else Score(None, f"the model's score is {mean}")
