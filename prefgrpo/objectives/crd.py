"""Centred reward distillation (CRD, arXiv 2603.14128): fits centred implicit rewards to centred rewards.

    ρ_i = β(d_old,i − d_i) − mean_j β(d_old,j − d_j)    loss = mean_i scale / β · (ρ_i − (r_i − mean_j r_j))²

r in 0 … 1 as in NFT; the mean of the implicit rewards is detached. `bce`: cross entropy of σ(ρ) and σ(r − mean).
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from prefgrpo.config.schema import STRICT, Share, TrainConfig
from prefgrpo.objectives.base import GroupObjective, OptimalityObjective, Targets


@dataclass(frozen=True, config=STRICT)
class CRD(OptimalityObjective, GroupObjective):
    """Regression on centred rewards."""

    beta: PositiveFloat = 1.0
    """β of the implicit reward."""
    form: Literal["mse", "bce"] = "mse"
    """Squared difference, or cross entropy."""
    decay: Share = 0.25
    """EMA decay of the old policy per training step."""
    decay_rate: NonNegativeFloat = 0.005
    """Increase of decay per training step."""

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        r = self.probability(train, targets)
        implicit, wanted = anchor_error - error, r - r.mean(1, keepdim=True)
        rho = self.beta * (implicit - implicit.mean(1, keepdim=True).detach())
        if self.form == "bce":
            terms = binary_cross_entropy_with_logits(rho, wanted.sigmoid(), reduction="none")
        else:
            terms = (rho - wanted).square()
        return terms.mean(1) * (train.adv_clip_max / self.beta)
