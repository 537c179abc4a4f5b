"""Small images, and clips (`frames` > 0) of 16 frames per second, without files."""

import numpy as np

from prefgrpo.data.media import Media


def grey(level: float, size: int = 32, frames: int = 0) -> Media:
    """A uniformly grey square."""
    return Media(
        np.full((frames, size, size, 3) if frames else (size, size, 3), level, np.uint8), 16.0 if frames else None
    )


def noise(seed: int, high: int = 40, wide: int = 56, frames: int = 0) -> Media:
    """Independent uniform values."""
    shape = (frames, high, wide, 3) if frames else (high, wide, 3)
    return Media(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), 16.0 if frames else None)
