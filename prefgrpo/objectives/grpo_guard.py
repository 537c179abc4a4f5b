"""GRPO-Guard (arXiv 2510.22319): a log-ratio with mean 0 at every step, and gradients on the same scale at all steps.

    log r = mean_D [ε̂·(μ − μ_old)],  ε̂ = (x' − μ_old) / s    loss: GRPO's with this ratio and weight 1 / |Δσ|

The ratio is per sample, as in the paper; the published code averages over the batch. Because of its different scale,
clip_range has other values than in GRPO: 2e-6 … 4e-6 as published.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from prefgrpo.config.schema import STRICT
from prefgrpo.objectives.base import StepWeight
from prefgrpo.objectives.grpo import GRPO


@dataclass(frozen=True, config=STRICT)
class GRPOGuard(GRPO):
    """GRPO with the regulated ratio, `Replayed.log_ratio`, which needs the rollout's velocities."""

    keeps_velocity = True

    step_weight: StepWeight = "inverse_step"
    """inverse_step is the published weight; none, velocity and noise are as for grpo."""
