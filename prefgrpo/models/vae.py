"""Decoding and encoding with a pipeline's VAE: images [B, C, h, w], or clips [B, C, F', h, w] of a causal video VAE."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor


@torch.no_grad()
def decode_image(pipe: Any, latents: Tensor) -> Tensor:
    """Images [B, 3, H, W] fp32 in [0, 1] from unscaled latents."""
    image = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
    image = image[:, :, 0] if image.dim() == 5 else image  # video VAEs: a clip of one frame
    return pipe.image_processor.postprocess(image, output_type="pt").float()


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
    mean, std = (_table(tuple(values), latents) for values in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean) * (1.0 / std))[0]


def tile(vae: Any) -> None:
    """Let the VAE process tiles of an image. ValueError if this VAE does not support it."""
    if not hasattr(vae, "enable_tiling"):
        raise ValueError(f"{type(vae).__name__} has no enable_tiling")
    vae.enable_tiling()
