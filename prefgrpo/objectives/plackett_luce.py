"""Plackett-Luce likelihood of a group's ranking (Diffusion-LPO, arXiv 2510.01540), for judges that rank.

    loss = mean_p −(1 / (G − 1)) Σ_i [h_i − log Σ_{j: A_j ≤ A_i} exp h_j]    h = ½β(d_ref − d)

The members are ranked by their advantages. Tied ones have the same competitors, each other among them (Breslow).
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import Targets
from prefgrpo.objectives.dpo import Preference


@dataclass(frozen=True, config=STRICT)
class PlackettLuce(Preference):
    """The whole ranking; members without a reward are not in it."""

    beta: PositiveFloat = 20.0
    """β: how strongly the policy is held to its reference; small values let it go far."""

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        h, a = self.strength(error, anchor_error), targets.advantage
        ranked = targets.known
        below = (a[:, None, :] <= a[:, :, None]) & ranked[:, None, :]  # [n, i, j]: j competes with i
        below |= torch.eye(h.shape[1], dtype=torch.bool, device=h.device)
        among = h[:, None, :].expand_as(below).masked_fill(~below, -torch.inf).logsumexp(2)
        return torch.where(ranked, among - h, 0.0).sum(1) / (ranked.sum(1) - 1).clamp(min=1)
