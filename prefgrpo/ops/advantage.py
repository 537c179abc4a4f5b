"""Win rates and group-relative advantages.

    W_ij = P(i beats j), win rate_i = Σ_j W_ij / n_i over the comparisons that exist, A = (r − mean) / (std + eps)

Invariant: a missing value (NaN, or a count of 0) enters no statistic, and a constant group gives exactly 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Std = Literal["group", "global", "none"]
Combine = Literal["weighted_sum", "weighted_advantage_sum"]


def winrate_advantage(wins: Tensor, counts: Tensor, *, eps: float = 1e-4, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), both fp32 [P, G], from wins and counts [P, G, G].

    wins[p, i, j]: sum of soft verdicts that i beats j; counts: how many verdicts exist. A member without any
    comparison has win rate NaN and advantage 0.
    """
    n = counts.double().sum(-1)
    rate = torch.where(n > 0, wins.double().sum(-1) / n.clamp_min(1), torch.full_like(n, torch.nan))
    p, g = rate.shape
    ids = torch.arange(p, device=rate.device).repeat_interleave(g)
    adv = group_advantage(rate.reshape(1, -1), ids, eps=eps, ddof=ddof)
    return rate.float(), adv.view(p, g)


def _normalise(r: Tensor, ids: Tensor, groups: int, std: Std, eps: float, ddof: int) -> Tensor:
    """(r − group mean) / (std + eps) in fp64; missing entries and constant groups give 0."""
    ok = ~torch.isnan(r)
    value = torch.where(ok, r, torch.zeros_like(r))
    zeros = torch.zeros(groups, dtype=torch.float64, device=r.device)
    n = zeros.index_add(0, ids, ok.double())
    mean = zeros.index_add(0, ids, value) / n.clamp_min(1)
    inf = torch.full_like(zeros, torch.inf)
    low = inf.scatter_reduce(0, ids, torch.where(ok, r, torch.full_like(r, torch.inf)), "amin")
    high = (-inf).scatter_reduce(0, ids, torch.where(ok, r, torch.full_like(r, -torch.inf)), "amax")
    centred = torch.where(ok & (high > low)[ids], value - mean[ids], torch.zeros_like(r))
    if std == "none":
        return centred
    if std == "group":
        var = zeros.index_add(0, ids, centred.square()) / (n - ddof).clamp_min(1)
        return centred / (var.sqrt()[ids] + eps)
    total = ok.sum()
    overall = torch.where(ok, value - value.sum() / total.clamp_min(1), torch.zeros_like(r))
    return centred / ((overall.square().sum() / (total - ddof).clamp_min(1)).sqrt() + eps)


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    combine: Combine = "weighted_sum",
    std: Std = "group",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Advantage fp32 [B] of rewards [R, B] (NaN = missing) in groups given by integer ids [B].

    combine: sum the weighted rewards, then normalise; or normalise each, then sum (GDPO). A sample that lacks any
    reward of non-zero weight is missing and gets 0. Statistics are two-pass fp64.
    """
    r = rewards.double()
    w = torch.ones(r.shape[0], dtype=torch.float64, device=r.device) if weights is None else weights.double()
    _, ids = torch.unique(group_ids, return_inverse=True)
    groups = int(ids.max()) + 1 if ids.numel() else 0
    used = w != 0
    r, w = r[used], w[used]
    if r.shape[0] == 0:
        return torch.zeros(rewards.shape[1], device=rewards.device)
    if combine == "weighted_sum":
        return _normalise((w[:, None] * r).sum(0), ids, groups, std, eps, ddof).float()
    r = torch.where(torch.isnan(r).any(0), torch.full_like(r, torch.nan), r)
    parts = torch.stack([_normalise(row, ids, groups, std, eps, ddof) for row in r])
    return (w[:, None] * parts).sum(0).float()
