"""Noise is addressed, not drawn: ε(seed, sample id, step, element) by Philox4x32-10 (`ops.NoiseAddress`).

The same numbers come out of any backend, batch split, rank layout or slice of a latent, so nothing is stored,
broadcast or restored. Initial latents use step −1; denoising step k uses step k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prefgrpo.ops import philox_normal

INITIAL_STEP = -1


def initial_latents(seed: int, sample: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x_0 ~ N(0, I), fp32 [B, *shape] for int64 sample ids [B]; equal ids give equal latents (`init_same_noise`)."""
    step = torch.full_like(sample, INITIAL_STEP)
    return philox_normal(seed, sample, step, math.prod(shape)).view(-1, *shape)
