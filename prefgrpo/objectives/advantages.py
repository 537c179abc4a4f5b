"""Group-relative advantages of rewards, in plain torch.

    A = (r − group mean) / (std + eps) of the combined rewards, or Σ_r w_r A_r

Invariant: a missing reward (NaN) enters no statistic, and a group with equal rewards gets exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.ops.advantage import normalised


def _ranks(r: Tensor) -> Tensor:
    """Rank of each value in its group, [P, G], scaled to [0, 1]; tied values get their mean rank, and NaN stays NaN."""
    below = (r[:, None, :] < r[:, :, None]).sum(-1).double()
    equal = (r[:, None, :] == r[:, :, None]).sum(-1).double()
    others = (~r.isnan()).sum(-1, keepdim=True) - 1
    return torch.where(r.isnan(), r, (below + 0.5 * (equal - 1)) / others.clamp_min(1))


def group_advantage(
    rewards: Tensor,
    weights: Tensor | None = None,
    *,
    combine: str = "weighted_sum",
    std: str = "group",
    eps: float = 1e-4,
    ddof: int = 0,
    rank: bool = False,
) -> Tensor:
    """Advantage fp32 [P, G] of R rewards of P groups, [R, P, G] (NaN = missing), with weights [R].

    combine: normalise the weighted sum, or the weighted geometric mean (missing if a reward is negative), of the
    rewards; or take the weighted sum of the rewards' separate advantages (GDPO). A sample that lacks any reward of
    non-zero weight is missing and gets 0. rank: first replace values by their rank within the group.
    """
    r = rewards.double()
    w = r.new_ones(len(r)) if weights is None else weights.to(r)
    w = w[:, None, None]
    missing = (r.isnan() & (w != 0)).any(0)

    def advantage(values: Tensor) -> Tensor:
        values = torch.where(missing, torch.nan, values)
        return normalised(_ranks(values) if rank else values, std, eps, ddof)

    if combine == "weighted_advantage_sum":
        each = torch.stack([advantage(row) for row in r])
        return torch.where(w != 0, w * each, 0.0).sum(0).float()
    if combine == "weighted_sum":
        return advantage(torch.where(w != 0, w * r, 0.0).sum(0)).float()
    missing = missing | ((r < 0) & (w != 0)).any(0)
    logarithm = torch.where(w != 0, w * torch.log(r), 0.0).sum(0) / w.sum()
    return advantage(torch.exp(logarithm).float().double()).float()  # equal rewards may differ in exp's last bit
