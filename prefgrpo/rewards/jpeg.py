"""JPEG file size as a reward: the toy objectives of DDPO (Black et al., arXiv 2305.13301, section 4).

    incompressibility = kB of the image as JPEG, quality 95, / divisor        compressibility = −incompressibility

A clip's value is the mean over its frames.
"""

from __future__ import annotations

import io
from typing import ClassVar

from pydantic import PositiveFloat

from prefgrpo.rewards.base import PointwiseReward, Sample, Score


def jpeg_kilobytes(sample: Sample) -> float:
    """Size of the sample's image as JPEG (quality 95, the library's default subsampling), in units of 1000 bytes."""
    sizes = []
    for frame in sample.media.frames():
        buffer = io.BytesIO()
        frame.pil.save(buffer, "JPEG", quality=95)
        sizes.append(buffer.tell())
    return sum(sizes) / len(sizes) / 1000.0


class JpegIncompressibility(PointwiseReward):
    """More detail is better: kB of a JPEG at quality 95, divided by `divisor`; for a clip, the mean over its frames."""

    takes = ("image", "video")
    sign: ClassVar[float] = 1.0

    def __init__(self, divisor: PositiveFloat = 1.0) -> None:
        """divisor: divides the kilobytes; 500 in Flow-GRPO and PaCo-RL."""
        self.divisor = divisor

    def score_batch(self, samples: list[Sample]) -> list[Score]:
        """Signed JPEG kB of each image / divisor."""
        return [Score(self.sign * jpeg_kilobytes(sample) / self.divisor) for sample in samples]


class JpegCompressibility(JpegIncompressibility):
    """Less detail is better: −kB of a JPEG at quality 95, divided by `divisor`; for a clip, the mean over its frames.

    Source: DDPO (arXiv 2305.13301).
    """

    sign = -1.0
