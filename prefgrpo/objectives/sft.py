"""Supervised fine-tuning on the best sample of every group (rejection sampling; Flow-GRPO's online SFT).

    loss = mean_p d_best(p)

The best sample is the one with the largest advantage; the other members cost no forward.
"""

from __future__ import annotations

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import PointwiseObjective, Prediction, Targets


@dataclass(frozen=True, config=STRICT)
class SFT(PointwiseObjective):
    """Flow matching on the best of every group."""

    def mask(self, train: TrainConfig, targets: Targets) -> Tensor:
        """Only the best member of a group."""
        best = torch.zeros_like(targets.known).scatter(1, targets.advantage.argmax(1, keepdim=True), True)
        return super().mask(train, targets) & targets.known & best

    def samples_per_group(self, group_size: int) -> int:
        """1, the best member."""
        return 1

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        return p.error
