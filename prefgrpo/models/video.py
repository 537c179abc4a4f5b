"""Code shared by video families: latents [C, F', h, w] of a clip."""

from __future__ import annotations

from typing import Any

from prefgrpo.models.base import Adapter, Sampling


def latent_frames(frames: int | None, stride: int) -> int:
    """F' of a clip of `frames` frames; ValueError unless that is a multiple of the VAE's temporal stride, plus 1."""
    frames = frames or 1
    if frames % stride != 1:
        raise ValueError(f"frames must be a multiple of {stride}, plus 1, for this model, got {frames}")
    return (frames - 1) // stride + 1


class PatchVideo(Adapter):
    """A family whose latents are a grid of patches, and whose pipeline names the VAE's strides as Wan's does."""

    @property
    def patch(self) -> int:
        """Latents per side of one transformer patch."""
        size: Any = self.pipe.transformer.config.patch_size
        return size if isinstance(size, int) else size[1]

    @property
    def unit(self) -> int:
        """Pixels per side of one transformer patch: 16 where the VAE's scale is 8."""
        return self.pipe.vae_scale_factor_spatial * self.patch

    def tokens(self, sampling: Sampling) -> int:
        """Tokens of all latent frames."""
        return super().tokens(sampling) * self.latent_shape(sampling)[1]

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[C, F', height / 8, width / 8] where the VAE's scale is 8; ValueError for more frames than positions."""
        rows, columns = self.grid(sampling)
        stride = self.pipe.vae_scale_factor_temporal
        frames = latent_frames(self.frames(sampling), stride)
        if self.most_tokens is not None and frames > self.most_tokens:
            most = f"at most {(self.most_tokens - 1) * stride + 1}, for which this model has positions"
            raise ValueError(f"frames must be {most}, got {self.frames(sampling)}")
        return self.pipe.transformer.config.out_channels, frames, rows * self.patch, columns * self.patch
