"""A generated image or clip, as passed to judges and rewards.

Pixels are uint8 RGB. Invariant: each image or clip is encoded at most once per format, in memory.
"""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, LookupError, TypeError, struct.error,
              Image.DecompressionBombError)  # fmt: skip
"""Exceptions that Pillow and imageio raise for broken files."""


def rgb(image: Image.Image) -> Image.Image:
    """An opened image file as 8-bit RGB: EXIF orientation applied, 16 bits scaled to 8, transparency shown on white.

    Raises ValueError for other bit depths, which Pillow would clip to black or white, or another of UNREADABLE.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or (image.mode == "I" and image.getextrema()[1] > 65535):  # type: ignore[operator]
        raise ValueError(f"expected 8 or 16 bits per channel, got mode {image.mode}")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:  # the colour under transparent pixels is arbitrary
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


@dataclass(frozen=True, eq=False)
class Media:
    """An image [H, W, 3] or a video [F, H, W, 3], uint8 RGB. Encodings are made once and kept."""

    pixels: NDArray[np.uint8]

    @property
    def clip(self) -> bool:
        """Whether this is a video."""
        return self.pixels.ndim == 4

    def frames(self, most: int | None = None) -> list[Media]:
        """The frames of a clip as images (at most `most`, evenly spaced from first to last); for an image, [self]."""
        if not self.clip:
            return [self]
        count = len(self.pixels)
        chosen = range(count) if most is None or count <= most else np.linspace(0, count - 1, most, dtype=int)
        return [Media(self.pixels[k]) for k in chosen]

    @property
    def pil(self) -> Image.Image:
        """The image as PIL (images only). A new object each time, because `save` stores its options in the object, so
        two threads must not encode the same one."""
        return Image.fromarray(self.pixels)

    @cached_property
    def jpeg(self) -> bytes:
        """JPEG, quality 95, 4:4:4 below 256 pixels a side (where 4:2:0 would smear colours)."""
        buffer = io.BytesIO()
        self.pil.save(buffer, "JPEG", quality=95, subsampling=0 if min(self.pixels.shape[:2]) < 256 else 2)
        return buffer.getvalue()

    @cached_property
    def webp(self) -> bytes:
        """WebP, lossless, fastest method."""
        buffer = io.BytesIO()
        self.pil.save(buffer, "WEBP", lossless=True, method=0, quality=0)
        return buffer.getvalue()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shape and pixels, hex."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()
