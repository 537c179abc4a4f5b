"""Counter-based noise: ε is a function of (seed, sample id, step, element), by Philox4x32-10 (`ops.PhiloxNoise`).

Every backend, batch split, rank layout and slice of a latent gives the same numbers, so no noise or generator state is
stored, broadcast or restored. Initial latents use step −1; denoising step k uses step k; draw k of an endpoint
objective uses steps −2 − 2k (for ε) and −3 − 2k (for t), with the group number as sample id.
"""

from __future__ import annotations

import math

from torch import Tensor

from prefgrpo.ops import philox_normal

INITIAL_STEP = -1
HELD_OUT_GROUPS = 2**52
"""First group number of held-out pairs, whose draws are then far from those of training."""
GENERATED_IDS = 2**61
"""First sample id of `prefgrpo generate`: training counts from 0, and no run gets this far."""
EVALUATION_IDS = 2**62
"""First sample id of evaluation."""


def initial_latents(seed: int, sample: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x_0 ~ N(0, I), fp32 [B, *shape] for int64 sample ids [B]; equal ids give equal latents (`init_same_noise`)."""
    return philox_normal(seed, sample, INITIAL_STEP, math.prod(shape)).view(-1, *shape)


def endpoint_noise(seed: int, group: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    """ε ~ N(0, I) of one draw, fp32 [B, *shape]; group: int64 [B] group numbers, so group members share ε."""
    return philox_normal(seed, group, -2 - 2 * draw, math.prod(shape)).view(-1, *shape)


def endpoint_normal(seed: int, group: Tensor, draw: int) -> Tensor:
    """The N(0, 1) sample that a draw's t is derived from, fp64 [B], on the CPU whatever the device of `group`."""
    return philox_normal(seed, group.cpu(), -3 - 2 * draw, 1).view(-1).double()
