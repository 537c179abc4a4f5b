"""How far a clip that `prefgrpo generate` wrote is from the pixels that it wrote, by x264's quality.

    python -m benchmarks.clip_files          # prints the table of docs/scoring.md

The clip is made here: noise with the 1/f spectrum of photographs that moves, under discs with hard edges that move.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefgrpo.commands import generate
from prefgrpo.data.stored import read_media


def clip(height: int, width: int, frames: int = 17, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [F, H, W, 3]: grey 1/f noise with a little colour, two pixels on in every frame, and six discs."""
    rng = np.random.default_rng(seed)
    high = 2 * height
    wide = 2 * width
    frequency = np.hypot(np.fft.fftfreq(high)[:, None], np.fft.rfftfreq(wide)[None])
    amplitude = 1 / np.maximum(frequency, 1 / wide)
    phases = np.exp(2j * np.pi * rng.random((3, *amplitude.shape)))
    fields = np.fft.irfft2(amplitude * phases, s=(high, wide))
    grey, first, second = fields / fields.std((1, 2), keepdims=True)
    scene = 128 + 45 * np.stack([grey + 0.2 * first, grey, grey + 0.2 * second], axis=-1)
    colours = 96 + 48 * rng.random((6, 1)) + 40 * rng.random((6, 3))
    rows, columns = np.mgrid[:height, :width]
    out = []
    for t in range(frames):
        frame = scene[2 * t : 2 * t + height, 3 * t : 3 * t + width].copy()
        for k, colour in enumerate(colours, 1):
            y = (height * k / 7 + 4 * t) % height
            x = (width * k / 7 + 5 * t) % width
            frame[(rows - y) ** 2 + (columns - x) ** 2 < (height / 16) ** 2] = colour
        out.append(frame.clip(0, 255).round().astype(np.uint8))
    return np.stack(out)


def distance(pixels: NDArray[np.uint8], quality: int = generate.QUALITY) -> tuple[float, float, int]:
    """(PSNR in dB, mean absolute difference in levels, bytes) of a clip's file after reading it again."""
    from diffusers.utils import export_to_video
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "clip.mp4")
        if quality == generate.QUALITY:
            generate.write(file, pixels, 16.0)
        else:
            export_to_video(
                [Image.fromarray(f) for f in pixels], str(file), fps=16, quality=quality, macro_block_size=1
            )
        off = read_media(file).pixels.astype(np.float64) - pixels
        size = file.stat().st_size
    return float(10 * np.log10(255**2 / np.square(off).mean())), float(np.abs(off).mean()), size


def main() -> int:
    """Print the table."""
    pixels = clip(480, 832)
    print("| quality | PSNR | mean difference | file |\n|---|---|---|---|")
    for quality in (5, generate.QUALITY, 10):
        psnr, mean, size = distance(pixels, quality)
        print(f"| {quality} | {psnr:.1f} dB | {mean:.1f} of 255 | {size / 1024:.0f} KiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
