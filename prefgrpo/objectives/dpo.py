"""Online Diffusion-DPO (arXiv 2311.12908) on the best and the worst sample of every group.

    loss = mean_p −log σ(h_best − h_worst)    h = ½β(d_ref − d)

ε and t are the same for both, as published. Groups whose rewards are all equal have no best and are left out.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import GroupObjective, OldPolicy, Targets


@dataclass(frozen=True, config=STRICT)
class Preference(OldPolicy, GroupObjective):
    """What the objectives share that compare members by h = ½β(d_ref − d)."""

    beta: PositiveFloat = 100.0
    """β: how strongly the policy is held to its reference; small values let it go far."""
    reference: Literal["base", "old"] = "base"
    """What h is measured against: the starting policy, or an old policy that follows with `decay` (0: the weights that
    made the rollout)."""

    @property
    def anchor(self) -> Literal["", "base", "old"]:
        """The reference."""
        return self.reference

    def strength(self, error: Tensor, anchor_error: Tensor) -> Tensor:
        """h [n, G]."""
        return 0.5 * self.beta * (anchor_error - error)


@dataclass(frozen=True, config=STRICT)
class DPO(Preference):
    """Best against worst."""

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        h, advantage = self.strength(error, anchor_error), targets.advantage
        best, worst = advantage.argmax(1, keepdim=True), advantage.argmin(1, keepdim=True)
        return -logsigmoid(h.gather(1, best) - h.gather(1, worst))[:, 0]
