"""Sizes of a family's samples: pixels and frames, and the tokens that they become."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from prefgrpo.config.schema import SamplingConfig as Sampling


class Sizes:
    """The part of an `Adapter` that counts."""

    pipe: Any
    """The stock diffusers pipeline."""
    default_frames: ClassVar[int | None] = None
    """Frames per clip of the published model; None: it makes images."""

    def frames(self, sampling: Sampling) -> int | None:
        """Frames per clip; None for images."""
        return self.default_frames if sampling.frames is None else sampling.frames

    @property
    def unit(self) -> int:
        """Side of one token in pixels; image sides are multiples of it."""
        return 2 * self.pipe.vae_scale_factor

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for sides that are not multiples of `unit`."""
        height = sampling.height
        width = sampling.width
        if height < self.unit or width < self.unit or height % self.unit or width % self.unit:
            raise ValueError(
                f"height and width must be multiples of {self.unit} for this model, got {height} × {width}"
            )
        return height // self.unit, width // self.unit

    def tokens(self, sampling: Sampling) -> int:
        """Number of tokens of a sample's latents (for some video families: of one latent frame)."""
        return math.prod(self.grid(sampling))

    def sequence(self, sampling: Sampling) -> int:
        """Number of tokens that context parallelism splits: those of all latent frames of a sample."""
        return self.tokens(sampling)
