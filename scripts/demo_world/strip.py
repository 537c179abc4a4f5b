"""Draws the README's docs/demo.png: some held-out prompts before and after training, side by side, in a small PNG.

`python -m scripts.demo_world.strip runs/demo docs/demo.png` redraws it.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from prefgrpo.report.read import Evaluation, read_run

SIDES = (128, 96, 64)
TEXT_COLOUR = (28, 30, 33)
LABEL_COLOUR = (92, 99, 112)
BACKGROUND = (255, 255, 255)
MARGIN = 12
GAP = 8
LINE_HEIGHT = 18


def write_strip(folder: Path, target: Path, columns: int = 6, limit: int = 150_000) -> Path:
    """Write `target` (PNG below `limit` bytes): `columns` evenly spread prompts of the run's last evaluation.

    Raises FileNotFoundError if the run has no images of an evaluation after step 0.
    """
    run = read_run(Path(folder))
    found = run.stored.get(run.best_set or "")
    if found is None or found.step == 0:
        expected = "let the run evaluate first"
        raise FileNotFoundError(f"{folder}: no images of an evaluation after step 0 in eval/; {expected}")
    for side in SIDES:
        canvas = _draw(found, columns, side)
        dithered = canvas.quantize(palette=canvas.quantize(256), dither=Image.Dither.FLOYDSTEINBERG)
        for image in (canvas, dithered):
            buffer = io.BytesIO()
            image.save(buffer, "PNG", optimize=True)
            if buffer.tell() < limit:
                Path(target).write_bytes(buffer.getvalue())
                return Path(target)
    raise ValueError(f"{columns} columns do not fit into {limit} bytes; ask for fewer")


def _fit(pixels: NDArray[np.uint8], side: int) -> Image.Image:
    """The image scaled up by a whole factor to at most `side` pixels."""
    image = Image.fromarray(pixels)
    factor = side // max(image.size)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _wrap(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: float, max_lines: int) -> list[str]:
    """Text wrapped to lines of at most `width` pixels, cut off with … after `max_lines` lines."""
    lines: list[str] = []
    for word in text.split():
        candidate = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(candidate) <= width:
            lines[-1] = candidate
        else:
            lines.append(word)
    return lines if len(lines) <= max_lines else [*lines[: max_lines - 1], lines[max_lines - 1] + " …"]


def _draw(shown: Evaluation, columns: int, side: int) -> Image.Image:
    font = ImageFont.load_default(14)
    count = len(shown.pairs)
    indices = np.unique(np.linspace(0, count - 1, min(columns, count)).round().astype(int))
    chosen = [shown.pairs[k] for k in indices]
    rows = [[_fit(pair.images[when], side) for pair in chosen] for when in (0, 1)]
    width, height = rows[0][0].size
    labels = ["before", f"after {shown.step} steps"]
    left = MARGIN + int(max(font.getlength(t) for t in labels)) + GAP
    captions = [_wrap(pair.prompt, font, width, 4) for pair in chosen]
    top = MARGIN + 2 * (height + GAP)
    text_height = max(map(len, captions)) * LINE_HEIGHT
    size = (left + len(indices) * (width + GAP) - GAP + MARGIN, top + text_height + MARGIN)
    canvas = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for r, (label, images) in enumerate(zip(labels, rows, strict=True)):
        y = MARGIN + r * (height + GAP)
        draw.text((MARGIN, y + height / 2), label, LABEL_COLOUR, font, anchor="lm")
        for c, image in enumerate(images):
            canvas.paste(image, (left + c * (width + GAP), y))
    for c, lines in enumerate(captions):
        for k, line in enumerate(lines):
            draw.text((left + c * (width + GAP), top + k * LINE_HEIGHT), line, TEXT_COLOUR, font)
    return canvas


if __name__ == "__main__":
    tyro.cli(write_strip, config=(tyro.conf.PositionalRequiredArgs,))
