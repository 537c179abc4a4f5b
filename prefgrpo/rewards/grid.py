"""Image grids: the layout that a prompt requests, the cells, and the sub-prompt of each cell.

    "a 2x3 grid …. [LEFT]: a cat. [RIGHT]: a dog."  ->  (2, 3),  "a 2x3 grid ….",  ["a cat.", "a dog."]

rows × cols, row-major. Invariant: there are rows · cols cells of equal size; if the division is uneven, the remainder
(right and bottom edge) is dropped. Layout, cells and labels follow PaCo-RL (arXiv 2512.04784).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from prefgrpo.data.media import Media

MOST = 16
"""Most rows or columns; larger pairs such as "1920x1080" are image sizes."""
_UNIT = r"(?!\s*(?:px|pixels?|mm|cm|m|km|inch|inches|ft|feet)\b)"
_PAIR = re.compile(r"(?<!\d[.,])(?<!\w)(\d{1,4})\s*[xX⨉×]\s*(\d{1,4})(?!\w|[.,]?\d)" + _UNIT, re.ASCII)
_WORD = re.compile(r"\W+(?:\w+\W+)?(?:grid|layout|panel|collage|storyboard|matrix|array|tile|image)s?\b", re.I)
_LABEL = re.compile(r"(?<=[.\"])\s+[A-Z0-9\-\[\]]+:\s*")


def grid_of(prompt: str, meta: Mapping[str, Any] | None = None) -> tuple[int, int] | None:
    """(rows, cols) requested by the prompt, None if it requests no grid.

    `meta["grid"]`, "2x3" or [2, 3], takes precedence over the prompt; ValueError if it is neither. If the prompt has
    several pairs, the first one followed by a word such as "grid" is used, else the first.
    """
    if meta and meta.get("grid") is not None:
        return _parse_grid(meta["grid"])
    sizes = [m for m in _PAIR.finditer(prompt) if _is_valid_grid(int(m[1]), int(m[2]))]
    named = [m for m in sizes if _WORD.match(prompt, m.end())]
    chosen = (named or sizes)[:1]
    return (int(chosen[0][1]), int(chosen[0][2])) if chosen else None


def require_grid(prompt: str, meta: Mapping[str, Any]) -> tuple[int, int]:
    """As `grid_of`, but ValueError if there is no grid."""
    if (grid := grid_of(prompt, meta)) is None:
        raise ValueError("no grid found; expected one such as '2x2' in the prompt, or in a column 'grid'")
    return grid


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


def _is_valid_grid(rows: int, cols: int) -> bool:
    return 1 <= rows <= MOST and 1 <= cols <= MOST and rows * cols > 1


def _parse_grid(value: Any) -> tuple[int, int] | None:
    pair = re.findall(r"\d+", value) if isinstance(value, str) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(str(n).isdigit() for n in pair):
        rows, cols = int(pair[0]), int(pair[1])
        if (rows, cols) == (1, 1) or _is_valid_grid(rows, cols):
            return None if rows * cols == 1 else (rows, cols)
    raise ValueError(f"column 'grid': expected rows and columns up to {MOST}, such as '2x3' or [2, 3], got {value!r}")
