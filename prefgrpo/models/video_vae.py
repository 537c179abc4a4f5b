"""Code shared by families with a 3-D (causal video) VAE: latents [B, C, F', h, w], normalised per channel."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

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

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[C, F', height / 8, width / 8] where the VAE's scale is 8."""
        rows, columns = self.grid(sampling)
        frames = latent_frames(self.frames(sampling), self.pipe.vae_scale_factor_temporal)
        return self.pipe.transformer.config.out_channels, frames, rows * self.patch, columns * self.patch


@torch.no_grad()
def decode_clip(pipe: Any, latents: Tensor) -> Tensor:
    """Clips [B, F, 3, H, W] fp32 in [0, 1] from unscaled latents."""
    video = pipe.vae.decode(latents, return_dict=False)[0]
    return pipe.video_processor.postprocess_video(video, output_type="pt").float()


def unnormalise(vae: Any, latents: Tensor) -> Tensor:
    """z · std + mean per channel, in the VAE's dtype, as the stock pipelines of Qwen-Image and Wan do."""
    latents = latents.to(vae.dtype)
    mean, std = (_table(tuple(values), latents) for values in (vae.config.latents_mean, vae.config.latents_std))
    return latents / (1.0 / std) + mean


def _table(values: tuple[float, ...], like: Tensor) -> Tensor:
    """One value per channel, for latents [B, C, F', h, w]."""
    return torch.tensor(values).view(1, -1, 1, 1, 1).to(like.device, like.dtype, non_blocking=True)


def encode_frame(pipe: Any, image: Image.Image, frames: int = 1) -> Tensor:
    """Normalised latents [C, F', h, w] fp32 of a clip whose first frame is `image` at its own size, other frames zero.

    As in Wan's stock image-to-video pipeline.
    """
    vae = pipe.vae
    first = pipe.video_processor.preprocess(image, height=image.height, width=image.width).to(vae.device).unsqueeze(2)
    clip = torch.cat([first, first.new_zeros(*first.shape[:2], frames - 1, *first.shape[3:])], dim=2)
    latents = vae.encode(clip.to(vae.dtype)).latent_dist.mode().float()
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean, std = (torch.tensor(v).view(shape).to(latents) for v in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean) * (1.0 / std))[0]
