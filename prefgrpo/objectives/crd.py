"""Centred reward distillation (CRD, arXiv 2603.14128): the implicit reward is to differ as the reward does.

    ρ_i = β(d_old,i − d_i) − mean_j β(d_old,j − d_j)    loss = mean_i scale / β · (ρ_i − (r_i − mean_j r_j))²

r in 0 … 1 as in NFT; the mean of the implicit rewards takes no gradient. `bce`: cross entropy of σ(ρ) and σ(r − mean).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from prefgrpo.config.schema import STRICT, Share, TrainConfig
from prefgrpo.objectives.base import GroupObjective, OldPolicy, Targets, optimality


@dataclass(frozen=True, config=STRICT)
class CRD(OldPolicy, GroupObjective):
    """Regression of centred rewards."""

    beta: PositiveFloat = 1.0
    """β of the implicit reward."""
    form: Literal["mse", "bce"] = "mse"
    """Squared difference, or cross entropy."""
    optimality: Literal["advantage", "win_rate"] = "advantage"
    """r: clip(A / 2A_max + ½) with A_max = train.adv_clip_max, or the win rate as it is."""
    decay: Share = 0.25
    """Share of the old policy that stays after a training step."""
    decay_rate: Annotated[float, Field(ge=0)] = 0.005
    """What every training step adds to decay."""

    @property
    def anchor(self) -> Literal["", "base", "old"]:
        """The old policy."""
        return "old"

    @property
    def needs_comparisons(self) -> bool:
        """For win rates."""
        return self.optimality == "win_rate"

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        r = optimality(self.optimality, train, targets)
        implicit, wanted = anchor_error - error, r - r.mean(1, keepdim=True)
        rho = self.beta * (implicit - implicit.mean(1, keepdim=True).detach())
        if self.form == "bce":
            terms = binary_cross_entropy_with_logits(rho, wanted.sigmoid(), reduction="none")
        else:
            terms = (rho - wanted).square()
        return terms.mean(1) * (train.adv_clip_max / self.beta)
