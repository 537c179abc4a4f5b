"""Plackett-Luce likelihood of a group's ranking (Diffusion-LPO, arXiv 2510.01540), for judges that rank.

    loss = mean_p −(1 / (G − 1)) Σ_i [h_i − log Σ_{j: A_j ≤ A_i} exp h_j]    h = ½β(d_ref − d)

Members are ranked by advantage. Tied members have the same set of competitors, including each other (Breslow).
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
    """Likelihood of the whole ranking, without members whose reward is missing."""

    beta: PositiveFloat = 20.0
    """β: strength of the regularisation towards the reference; smaller values let the policy move further."""

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        h, a = self.strength(error, anchor_error), targets.advantage
        ranked = targets.known
        below = (a[:, None, :] <= a[:, :, None]) & ranked[:, None, :]  # [n, i, j]: j competes with i
        below |= torch.eye(h.shape[1], dtype=torch.bool, device=h.device)
        among = h[:, None, :].expand_as(below).masked_fill(~below, -torch.inf).logsumexp(2)
        return torch.where(ranked, among - h, 0.0).sum(1) / (ranked.sum(1) - 1).clamp(min=1)
