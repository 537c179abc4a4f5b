"""Rewards computed from pixels alone, and the grids of PaCo-RL's prompts.

    jpeg_incompressibility = kB of the image as JPEG, quality 95, / divisor      (DDPO, Black et al., arXiv 2305.13301)
    jpeg_compressibility   = −jpeg_incompressibility; a clip's value is the mean over its frames
    scenes                 = mean of the three hits (colour, shape, place) in the demo's world; part `all` = all right

    "a 2x3 grid …. [LEFT]: a cat. [RIGHT]: a dog."  ->  (2, 3),  "a 2x3 grid ….",  ["a cat.", "a dog."]

A grid (arXiv 2512.04784) is the layout that a prompt requests, with its cells and their sub-prompts. Invariant: there
are rows · cols cells of equal size, row by row; a remainder at the right and bottom edge is dropped.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field, PositiveFloat, TypeAdapter

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Question, Reward, Sample, read_column

MOST = 16
"""Maximum number of rows or columns; larger pairs such as "1920x1080" are image sizes."""
_PAIR = re.compile(r"(?<!\d[.,])(?<!\w)(\d{1,4})\s*[xX⨉×]\s*(\d{1,4})(?!\w|[.,]?\d)", re.ASCII)
_COUNT = Annotated[int, Field(ge=1, le=MOST)]
_COLUMN: TypeAdapter[tuple[int, int]] = TypeAdapter(
    Annotated[
        tuple[_COUNT, _COUNT], BeforeValidator(lambda v: tuple(re.findall(r"\d+", v)) if isinstance(v, str) else v)
    ]
)
_LABEL = re.compile(r"(?<=[.\"])\s+[A-Z0-9\-\[\]]+:\s*")
PARTS = ("colour", "shape", "place")


def jpeg_kilobytes(sample: Sample) -> float:
    """Size of the sample's image as JPEG (quality 95, the library's default subsampling), in units of 1000 bytes."""
    sizes = []
    for frame in sample.media.frames():
        buffer = io.BytesIO()
        frame.pil.save(buffer, "JPEG", quality=95)
        sizes.append(buffer.tell())
    return sum(sizes) / len(sizes) / 1000.0


class JpegIncompressibility(Reward):
    """More detail is better: kB of a JPEG at quality 95, divided by `divisor`; for a clip, the mean over its frames."""

    takes = ("image", "video")
    sign: ClassVar[float] = 1.0

    def __init__(self, divisor: PositiveFloat = 1.0) -> None:
        """divisor: divides the kilobytes; 500 in Flow-GRPO and PaCo-RL."""
        self.divisor = divisor

    def ask(self, asked: list[Question]) -> list[Answer]:
        """Signed JPEG kB of each image / divisor."""
        return [Answer(self.sign * jpeg_kilobytes(sample) / self.divisor) for (sample,) in asked]


class JpegCompressibility(JpegIncompressibility):
    """Less detail is better: −kB of a JPEG at quality 95, divided by `divisor`; for a clip, the mean over its frames.

    Source: DDPO (arXiv 2305.13301).
    """

    sign = -1.0


class Scenes(Reward):
    """Fraction of the caption's attributes that a scene shows; for evaluation only, never a training reward."""

    probe: ClassVar[dict[str, Any]] = {"prompt": "a red circle on the left"}

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample; missing if the prompt is not one of the demo's captions."""
        return [self._one(sample) for (sample,) in asked]

    def _one(self, sample: Sample) -> Answer:
        import torch  # here, so that a server of the other rewards needs none

        from prefgrpo.tiny.scenes import hits

        image = torch.from_numpy(np.ascontiguousarray(sample.media.pixels)).permute(2, 0, 1)[None].float() / 255.0
        try:
            hit = [float(h) for h in hits(image, [sample.prompt])[0]]
        except ValueError as error:
            return Answer(None, str(error))
        return Answer(sum(hit) / 3.0, parts=dict(zip(PARTS, hit, strict=True)) | {"all": float(all(hit))})


def grid_of(prompt: str, meta: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, cols): `meta["grid"]`, "2x3" or [2, 3], or the first pair in the prompt that can be a grid.

    Raises ValueError if there is none.
    """
    sizes = [(int(pair[1]), int(pair[2])) for pair in _PAIR.finditer(prompt)]
    if meta.get("grid") is not None:
        expected = f"rows and columns up to {MOST}, such as '2x3' or [2, 3]"
        sizes = [read_column(meta, "grid", _COLUMN, expected)]
    for size in sizes:
        if min(size) >= 1 and max(size) <= MOST and size != (1, 1):
            return size
    raise ValueError("no grid found; expected one such as '2x2' in the prompt, or in a column 'grid'")


def split(media: Media, rows: int, cols: int) -> list[Media]:
    """The cells of an image or clip, row by row; raises ValueError if it has fewer pixels than cells."""
    *_, height, width, _ = media.pixels.shape
    high, wide = height // rows, width // cols
    if not (high and wide):
        raise ValueError(f"an image of {width}x{height} pixels cannot be split into {rows} rows and {cols} columns")
    return [
        Media(np.ascontiguousarray(media.pixels[..., r * high : (r + 1) * high, c * wide : (c + 1) * wide, :]))
        for r in range(rows)
        for c in range(cols)
    ]


def sub_prompts(prompt: str) -> tuple[str, list[str]]:
    """The common part of a prompt and the text for each cell, which follows a label in capitals (" [LEFT]:")."""
    theme, *cells = (part.strip() for part in _LABEL.split(prompt))
    return theme, cells
