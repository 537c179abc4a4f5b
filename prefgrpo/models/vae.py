"""A pipeline's VAE: images [B, C, h, w], or clips [B, C, F', h, w] of a causal video VAE.

Encoding takes the mode of the posterior, so that it is a function of the pixels; its standard deviation is far below
the noise of any training step.
"""

from __future__ import annotations

from typing import Any

import torch
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


@torch.no_grad()
def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Unscaled latents of images [B, 3, H, W], or of clips [B, 3, F, H, W], in −1 … 1, in the VAE's dtype and on its
    device."""
    return vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()


def normalise(vae: Any, latents: Tensor) -> Tensor:
    """(z − mean) / std per channel, the inverse of `unnormalise`."""
    mean, std = latent_statistics(vae, latents)
    return (latents - mean) * (1.0 / std)


def unnormalise(vae: Any, latents: Tensor) -> Tensor:
    """z · std + mean per channel, in the VAE's dtype, as the stock pipelines of Qwen-Image and Wan do."""
    latents = latents.to(vae.dtype)
    mean, std = latent_statistics(vae, latents)
    return latents / (1.0 / std) + mean


def latent_statistics(vae: Any, like: Tensor) -> Tensor:
    """Mean and standard deviation per channel, [2, 1, C, 1, 1, 1]."""
    table = torch.tensor([vae.config.latents_mean, vae.config.latents_std])
    return table.view(2, 1, -1, 1, 1, 1).to(like.device, like.dtype, non_blocking=True)
