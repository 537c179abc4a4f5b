"""Images for a page: small ones as lossless PNG, enlarged by integer factors; large ones downscaled to WebP; clips as
looping WebP."""

from __future__ import annotations

import base64
import io

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

SMALL = 128
"""Images up to this many pixels per side are embedded unchanged and enlarged without smoothing."""
CLIP_PX = 224
"""Longest side of a clip on the page."""


def look(pixels: NDArray[np.uint8]) -> str:
    """Style of an image [H, W, 3] or a clip [F, H, W, 3]: sharp if it is embedded unchanged, else smooth."""
    return "sharp" if max(pixels.shape[-3:-1]) <= SMALL else "smooth"


def still(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image itself, or the middle frame of a clip [F, H, W, 3]."""
    return media[len(media) // 2] if media.ndim == 4 else media


def data_uri(media: NDArray[np.uint8], most: int, seconds: float = 2.0) -> str:
    """`data:` URI of an image of at most `most` pixels per side, or of a clip that plays for so many seconds."""
    clip = media.ndim == 4
    images = [Image.fromarray(frame) for frame in (media if clip else [media])]
    if max(images[0].size) > max(most := CLIP_PX if clip else most, SMALL):
        for image in images:
            image.thumbnail((most, most), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    kind = "webp"
    if clip:
        options = {"duration": round(1000 * seconds / len(images)), "loop": 0, "quality": 60, "method": 4}
        images[0].save(buffer, "WEBP", save_all=True, append_images=images[1:], **options)
    elif look(media) == "sharp":
        kind = "png"
        images[0].save(buffer, "PNG", optimize=True)
    else:
        images[0].save(buffer, "WEBP", quality=82, method=4)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(media: NDArray[np.uint8], caption: str, most: int, seconds: float) -> Markup:
    """An <img> element for an image or animated clip, with alternative text."""
    height, width = media.shape[-3:-1]
    element = Markup('<img src="{}" alt="{}" class="{}" width="{}" height="{}">')
    return element.format(data_uri(media, most, seconds), caption, look(media), width, height)
