"""What families with a 3-D (causal video) VAE share: latents are normalised per channel, [B, C, F, h, w]."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor


def unnormalise(vae: Any, latents: Tensor) -> Tensor:
    """z · std + mean per channel, in the VAE's dtype, as the stock pipelines of Qwen-Image and Wan do."""
    latents = latents.to(vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
    return latents / inverse + mean


def encode_frame(pipe: Any, image: Image.Image, frames: int = 1) -> Tensor:
    """Normalised latents [C, F', h, w] fp32 of a clip that begins with `image` at its own size, the rest black.

    As the stock image-to-video pipeline of Wan makes them.
    """
    vae = pipe.vae
    first = pipe.video_processor.preprocess(image, height=image.height, width=image.width).to(vae.device).unsqueeze(2)
    clip = torch.cat([first, first.new_zeros(*first.shape[:2], frames - 1, *first.shape[3:])], dim=2)
    latents = vae.encode(clip.to(vae.dtype)).latent_dist.mode().float()
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean, std = (torch.tensor(v).view(shape).to(latents) for v in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean) * (1.0 / std))[0]
