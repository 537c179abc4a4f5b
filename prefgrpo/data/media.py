"""A generated image or clip, as passed to judges and rewards.

Pixels are uint8 RGB. Invariant: each image or clip is encoded at most once per format, in memory.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, LookupError, TypeError, struct.error,
              Image.DecompressionBombError)  # fmt: skip
"""Exceptions that Pillow and imageio raise for broken files."""


def rgb(image: Image.Image) -> Image.Image:
    """An opened image file as 8-bit sRGB: EXIF orientation and ICC profile applied, 16 bits scaled to 8, on white.

    Raises ValueError for other bit depths, which Pillow would clip to black or white, or another of UNREADABLE.
    """
    profile = image.info.get("icc_profile")
    image = ImageOps.exif_transpose(image)
    transparent = image.info.get("transparency")
    if image.mode == "F" or (image.mode == "I" and image.getextrema()[1] > 65535):  # type: ignore[operator]
        raise ValueError(f"expected 8 or 16 bits per channel, got mode {image.mode}")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.uint16)
        image = Image.fromarray((levels >> 8).astype(np.uint8))
        if transparent is not None:
            image.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    if isinstance(transparent, tuple) and max(transparent) > 255:  # Pillow has reduced the pixels to 8 bits, not this
        image.info["transparency"] = tuple(level >> 8 for level in transparent)
    mode = {"1": "L", "L": "L", "LA": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")
    alpha = None
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        alpha = whole.getchannel("A")
        image = whole if mode == "RGB" else image
    image = _in_srgb(image.convert(mode), profile)
    if alpha is not None:
        image.putalpha(alpha)
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image


def _in_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """An image (RGB, L or CMYK) with this ICC profile as RGB in sRGB; a profile that does not fit it has no effect."""
    if profile:
        try:
            if transform := _to_srgb(profile, image.mode):
                return ImageCms.applyTransform(image, transform) or image
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
            warnings.warn(f"an image's ICC profile cannot be used and is ignored: {error}", stacklevel=3)
    return image.convert("RGB")


@lru_cache(maxsize=64)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From a profile to sRGB; None for one that is sRGB up to rounding."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(64, 64, 3)
    probe = Image.fromarray(colours).convert(mode)
    shown = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
    same = mode != "CMYK" and np.abs(shown - np.asarray(probe.convert("RGB"))).max() <= 2
    return None if same else transform


@dataclass(frozen=True, eq=False)
class Media:
    """An image [H, W, 3] or a video [F, H, W, 3], uint8 RGB. Encodings are made once and kept."""

    pixels: NDArray[np.uint8]
    frame_rate: float | None = None
    """Frames per second of a video; None: unknown."""

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
