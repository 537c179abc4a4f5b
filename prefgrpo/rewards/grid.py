"""Image grids, as in PaCo-RL (arXiv 2512.04784): the layout that a prompt requests, its cells and their sub-prompts.

    "a 2x3 grid …. [LEFT]: a cat. [RIGHT]: a dog."  ->  (2, 3),  "a 2x3 grid ….",  ["a cat.", "a dog."]

Invariant: there are rows · cols cells of equal size, row by row; a remainder at the right and bottom edge is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import read_column

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
