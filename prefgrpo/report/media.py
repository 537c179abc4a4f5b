"""Images for a page: small ones as lossless PNG, shown in whole multiples; large ones shrunk to WebP."""

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


def picture(pixels: NDArray[np.uint8], caption: str, most: int) -> Markup:
    """An <img> with its alternative text."""
    height, width = pixels.shape[:2]
    sharp = "sharp" if max(height, width) <= SMALL else "smooth"
    return tag("img", src=data_uri(pixels, most), alt=caption, class_=sharp, width=width, height=height)
