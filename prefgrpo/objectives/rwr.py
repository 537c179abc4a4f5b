"""Reward-weighted regression within each group (Peters & Schaal 2007; Flow-GRPO's RWR).

    loss = mean_p Σ_i softmax_i(A / τ) d_i

τ → 0 gives SFT on the best sample; all weights are positive, so no sample's likelihood is pushed down.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import PointwiseObjective, Prediction, Targets, mask_missing


@dataclass(frozen=True, config=STRICT)
class RWR(PointwiseObjective):
    """Flow matching weighted by exponentiated advantages."""

    temperature: PositiveFloat = 1.0
    """τ, in units of the advantage."""

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """[P, G] weights, summing to 1 within a group."""
        scaled = (targets.advantage / self.temperature).masked_fill(~targets.known, -torch.inf)
        return mask_missing(scaled.softmax(1), targets)

    def samples_per_group(self, group_size: int) -> int:
        """1, because a group's weights sum to 1."""
        return 1

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        return signal * p.error
