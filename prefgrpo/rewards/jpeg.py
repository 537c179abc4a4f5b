"""JPEG file size as a reward: the toy objectives of DDPO (Black et al., arXiv 2305.13301, section 4).

    incompressibility = kB of the image as JPEG, quality 95, / divisor        compressibility = −incompressibility

A clip's value is the mean over its frames.
"""

from __future__ import annotations

import io
from typing import ClassVar

from pydantic import PositiveFloat

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Question, Reward, Sample


def jpeg_kilobytes(sample: Sample) -> float:
    """Size of the sample's image as JPEG (quality 95, the library's default subsampling), in units of 1000 bytes."""
    sizes = []
    for frame in sample.media.frames():
        buffer = io.BytesIO()
        frame.pil.save(buffer, "JPEG", quality=95)
        sizes.append(buffer.tell())
    return sum(sizes) / len(sizes) / 1000.0


class JpegIncompressibility(Reward):
    """More detail is better."""

    takes = ("image", "video")
    sign: ClassVar[float] = 1.0

    def __init__(self, divisor: PositiveFloat = 1.0) -> None:
        """divisor: divides the kilobytes; 500 in Flow-GRPO and PaCo-RL."""
        self.divisor = divisor

    def ask(self, asked: list[Question]) -> list[Answer]:
        """Signed JPEG kB of each image / divisor."""
        return [Answer(self.sign * jpeg_kilobytes(sample) / self.divisor) for (sample,) in asked]


class JpegCompressibility(JpegIncompressibility):
    """Less detail is better."""

    sign = -1.0
