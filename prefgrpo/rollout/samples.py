"""Images and clips from files at an output size: resized and centre-cropped like the sources of edits; of a clip, the
frames at the family's rate, from its beginning.

Frame k of the F frames of a sample is the one that the file shows at k / rate seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.data.stored import Shape, StoredMedia
from prefgrpo.rollout.source_images import fit, readers

KEPT = 8
"""Number of samples that are read ahead or kept: a clip has a hundred megabytes."""


@dataclass(frozen=True)
class Fitted:
    """An image or a clip as a sample of a rollout would be."""

    place: StoredMedia
    height: int
    width: int
    frames: int | None = None
    """Frames of a clip; None or 1: an image."""
    rate: float | None = None
    """Frames per second of the sample."""

    def identity(self) -> str:
        """Cache key of its latents."""
        return repr((*self.place.identity(), self.height, self.width, self.frames, self.rate))

    def pixels(self) -> NDArray[np.uint8]:
        """uint8 [H, W, 3], or [F, H, W, 3] of a clip. Raises DataError if the file cannot be read."""
        return _reading(self).result()


def chosen_frames(shape: Shape, frames: int, rate: float | None) -> list[int] | None:
    """The frames of a clip that make a sample of `frames` at `rate` per second; None if it is too short. The last one
    may be shown until the clip's end. If the clip's rate is unknown, its first frames are used."""
    count = shape.frames or 1
    ratio = shape.rate / rate if shape.rate and rate else 1.0
    positions = [int(k * ratio + 1e-6) for k in range(frames)]
    if (frames - 1) * ratio > count - (ratio == 1) + 1e-6:
        return None
    return [min(position, count - 1) for position in positions]


def prefetch(samples: Iterable[Fitted]) -> None:
    """Start to read samples that will be needed next, at most KEPT; does not wait."""
    for sample in samples:
        _reading(sample)


@lru_cache(maxsize=KEPT)
def _reading(sample: Fitted) -> Future[NDArray[np.uint8]]:
    return readers().submit(_read, sample)


def _read(sample: Fitted) -> NDArray[np.uint8]:
    media = sample.place.read()
    size = (sample.width, sample.height)
    images = media.frames()
    if (sample.frames or 1) == 1:
        return np.array(fit(images[0].pil, size))
    count, height, width, _ = media.pixels.shape
    chosen = chosen_frames(Shape(height, width, count, media.frame_rate), sample.frames or 1, sample.rate)
    assert chosen is not None, f"{sample.place} is too short, which `check_samples` refuses"
    return np.stack([np.asarray(fit(Image.fromarray(media.pixels[k]), size)) for k in chosen])
