"""GRPO-Guard (arXiv 2510.22319): a log-ratio of mean 0 at every step, and the gradient of all steps on one scale.

    log r = mean_D [ε̂·(μ − μ_old)],  ε̂ = (x' − μ_old) / s    loss: GRPO's with this ratio and weight 1 / |Δσ|

Per sample, as the paper has it; the published code averages over the batch. Clip ranges are those of its own scale:
2e-6 … 4e-6 were published.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from prefgrpo.config.schema import STRICT
from prefgrpo.objectives.base import StepWeight
from prefgrpo.objectives.grpo import GRPO


@dataclass(frozen=True, config=STRICT)
class GRPOGuard(GRPO):
    """GRPO with the regulated ratio: `Replayed.log_ratio` is there because the velocities are."""

    keeps_velocity = True

    step_weight: StepWeight = "inverse_step"
    """As published; none, velocity and noise as for grpo."""
