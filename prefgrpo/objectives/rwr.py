"""Reward-weighted regression on a group (Peters & Schaal 2007; Flow-GRPO's RWR).

    loss = mean_p Σ_i softmax_i(A / τ) d_i

τ → 0 is SFT on the best; all weights are positive, so nothing is pushed away.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import PointwiseObjective, Prediction, Targets, where_known


@dataclass(frozen=True, config=STRICT)
class RWR(PointwiseObjective):
    """Flow matching, weighted by exponentiated advantages."""

    temperature: PositiveFloat = 1.0
    """τ, in advantages."""

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """[P, G] weights, of sum 1 in a group."""
        scaled = (targets.advantage / self.temperature).masked_fill(~targets.known, -torch.inf)
        return where_known(scaled.softmax(1), targets)

    def per_group(self, group_size: int) -> int:
        """The weights of a group are one sample's."""
        return 1

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        return signal * p.error
