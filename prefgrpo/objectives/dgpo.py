"""DGPO: direct group preference optimisation (arXiv 2510.08425).

    s_p = (β / G) Σ_i A_i (d_i − d_ref,i)    loss = mean_i σ(sg s_p) · A_i d_i

A group's weight falls once its better half is fitted better than its worse half. With an old policy as reference,
`clip` stops the gradient of samples whose exp(d_old − d) has left 1 ± clip_range in the direction of their advantage.
"""

from __future__ import annotations

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import Targets
from prefgrpo.objectives.dpo import Preference


@dataclass(frozen=True, config=STRICT)
class DGPO(Preference):
    """The better half of a group against the worse half."""

    clip: bool = False
    """Clip the ratio to the old policy with train.clip_range; requires reference: old."""

    def option_errors(self, group_size: int) -> list[str]:
        """clip requires reference: old."""
        fits = not self.clip or self.reference == "old"
        return [] if fits else ["clip: expected reference old, which the ratio is measured against"]

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        advantage = targets.advantage.clamp(-train.adv_clip_max, train.adv_clip_max)
        inside = self.beta * (advantage * (error.detach() - anchor_error)).mean(1, keepdim=True)
        if self.clip:
            high = train.clip_range if train.clip_range_high is None else train.clip_range_high
            ratio = torch.exp(anchor_error - error.detach())
            out = torch.where(advantage > 0, ratio > 1.0 + high, ratio < 1.0 - train.clip_range)
            error = torch.where(out, error.detach(), error)
        return (torch.sigmoid(inside) * advantage * error).mean(1)
