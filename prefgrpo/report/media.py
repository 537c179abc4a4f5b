"""Images for a page: small ones as lossless PNG, shown in whole multiples; large ones shrunk to WebP; clips as WebP
that plays in a loop."""

from __future__ import annotations

import base64
import io

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.report.charts import tag

SMALL = 128
"""Up to this many pixels a side an image is kept as it is and enlarged without smoothing."""


def shrink(pixels: NDArray[np.uint8], most: int) -> Image.Image:
    """uint8 [H, W, 3] as an image whose longer side is at most `most` (averaged down, never enlarged)."""
    image = Image.fromarray(pixels)
    if max(image.size) > max(most, SMALL):
        image.thumbnail((most, most), Image.Resampling.LANCZOS)
    return image


def data_uri(pixels: NDArray[np.uint8], most: int) -> str:
    """`data:` address of an image of at most `most` pixels a side."""
    image = shrink(pixels, most)
    buffer = io.BytesIO()
    if max(image.size) <= SMALL and max(pixels.shape[:2]) <= SMALL:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "WEBP", quality=82, method=4)
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


CLIP_PX, FRAME_MS = 224, 125
"""Longest side of a clip on the page, and how long each of its frames is shown."""


def still(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image as it is, of a clip [F, H, W, 3] its middle frame."""
    return media[len(media) // 2] if media.ndim == 4 else media


def clip_uri(frames: NDArray[np.uint8]) -> str:
    """`data:` address of an animation of frames uint8 [F, H, W, 3]."""
    first, *others = [shrink(frame, CLIP_PX) for frame in frames]
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", save_all=True, append_images=others, duration=FRAME_MS, loop=0, quality=60, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(pixels: NDArray[np.uint8], caption: str, most: int) -> Markup:
    """An <img> of an image or a playing clip, with its alternative text."""
    height, width = pixels.shape[-3:-1]
    sharp = "sharp" if max(height, width) <= SMALL else "smooth"
    source = clip_uri(pixels) if pixels.ndim == 4 else data_uri(pixels, most)
    return tag("img", src=source, alt=caption, class_=sharp, width=width, height=height)
