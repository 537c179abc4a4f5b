"""What families with a 3-D (causal video) VAE share: latents are normalised per channel, [B, C, F, h, w]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unnormalise(vae: Any, latents: Tensor) -> Tensor:
    """z · std + mean per channel, in the VAE's dtype, as the stock pipelines of Qwen-Image and Wan do."""
    latents = latents.to(vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
    return latents / inverse + mean
