"""Grids of images: the grid that a prompt asks for, its cells and its sub-prompts.

The published rule takes the first "AxB" of a prompt, even a size such as "1920x1080"; the table fixes what counts here.
The property tests use any text and any size: a wrong grid gives a wrong reward, and a crash would end a run.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import GRID

from prefgrpo.data.media import Media
from prefgrpo.rewards.simple import MOST, grid_of, split, sub_prompts


def found_in(prompt, meta=None):
    """The grid, None where there is none."""
    try:
        return grid_of(prompt, meta or {})
    except ValueError as error:
        assert "no grid found" in str(error)
        return None


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("four cats, a 2x3 grid layout", (2, 3)), ("A 1 × 4 panel strip", (1, 4)), ("2⨉2", (2, 2)),
        ("a 1920x1080 photo", None), ("a 1920x1080 photo of a 2x2 grid", (2, 2)), ("12x18 cm", None), ("1x1", None),
        ("a 2x2x2 cube", None), ("0x4", None), ("生成2x2网格", (2, 2)), ("1,920x16", None), ("", None),
        ("9" * 9999 + "x2", None), ("a 2x2 grid, 4x6 inches", (2, 2)),
    ],
)  # fmt: skip
def test_grid_of_a_prompt(prompt, expected):
    assert found_in(prompt) == expected


def test_a_column_wins_over_the_prompt():
    assert grid_of("a 2x2 grid", {"grid": "1x3"}) == grid_of("", {"grid": [1, 3]}) == (1, 3)
    assert found_in("a 2x2 grid", {"grid": (1, 1)}) is None
    assert grid_of("a 2x2 grid", {"grid": None}) == (2, 2)
    for bad in ("2", [2], [2, 0], [17, 1], "wide", 4, [True, "x"]):
        with pytest.raises(ValueError, match="rows and columns"):
            grid_of("a 2x2 grid", {"grid": bad})


@settings(max_examples=50)
@given(st.text() | st.from_regex(r"[\w ,.]*\d+ ?[x×] ?\d+[\w ,.]*"))
def test_any_text_has_a_sensible_grid_or_none(prompt):
    found = found_in(prompt)
    assert found is None or (min(found) >= 1 and max(found) <= MOST and found != (1, 1))
    theme, cells = sub_prompts(prompt)
    assert all(part in prompt for part in (theme, *cells))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_cells_are_the_image(rows, cols, high, wide, clip):
    shape = (2, high, wide, 3) if clip else (high, wide, 3)
    pixels = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
    if high < rows or wide < cols:
        with pytest.raises(ValueError, match=f"{wide}x{high}"):
            split(Media(pixels), rows, cols)
        return
    cells = [cell.pixels for cell in split(Media(pixels), rows, cols)]
    lines = [np.concatenate(cells[r * cols : (r + 1) * cols], axis=-2) for r in range(rows)]
    used = pixels[..., : high // rows * rows, : wide // cols * cols, :]
    np.testing.assert_array_equal(np.concatenate(lines, axis=-3), used)


def test_sub_prompts_keep_their_words():
    theme, cells = sub_prompts(GRID)
    assert theme == "Two cats, a 1x2 grid. Warm light."
    assert cells == ['a cat that says "hi."', "another cat sleeps."]
    assert sub_prompts("NOTE: no labels here. Really: none") == ("NOTE: no labels here. Really: none", [])
