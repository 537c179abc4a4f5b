"""Policy loss, win rates and advantages in plain torch: the specification of the small ops.

    loss = Σ max(−A r, −A clip(r)) / N        A = (reward − mean of its group) / (std + eps)

Invariants: a masked sample or a missing value (NaN) enters no loss, gradient or statistic, and a constant group
gives exactly 0. Statistics are two-pass fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    weight: Tensor | None,
    mask: Tensor | None,
    kl: Tensor | None,
    kl_coef: float,
    log_ratio: Tensor | None,
    denominator: float | None,
) -> tuple[Tensor, Tensor]:
    """(loss, metrics [8] in the order of `ops.METRICS`); loss is differentiable in logp, log_ratio and kl."""
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    zero = torch.zeros_like(logp)
    delta = torch.where(keep, logp - logp_old if log_ratio is None else log_ratio, zero)
    ratio = torch.exp(delta)
    adv = torch.where(keep, advantage, zero).clamp(-adv_clip, adv_clip)
    per_sample = torch.maximum(-adv * ratio, -adv * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if weight is not None:
        per_sample = per_sample * weight
    kl_term = zero if kl is None else torch.where(keep, kl, zero)
    count = keep.sum().clamp_min(1)
    total = torch.where(keep, per_sample + kl_coef * kl_term, zero).sum()
    loss = total / (count if denominator is None else denominator)
    with torch.no_grad():
        above, below = (ratio > 1.0 + clip_high) & keep, (ratio < 1.0 - clip_low) & keep
        edge = torch.full_like(ratio[:1] if ratio.numel() else ratio.new_zeros(1), torch.inf)
        metrics = torch.stack(
            [
                0.5 * delta.square().sum() / count,
                (above | below).sum() / count,
                above.sum() / count,
                below.sum() / count,
                torch.cat([torch.where(keep, ratio, torch.inf), edge]).min(),
                torch.where(keep, ratio, zero).sum() / count,
                torch.cat([torch.where(keep, ratio, -torch.inf), -edge]).max(),
                kl_term.sum() / count,
            ]
        )
    return loss, metrics


def _deviation(values: Tensor, ok: Tensor, ddof: int) -> Tensor:
    """Standard deviation of the entries where `ok`, 0-d."""
    total = ok.sum()
    mean = torch.where(ok, values, 0.0).sum() / total.clamp_min(1)
    squares = torch.where(ok, values - mean, 0.0).square().sum()
    return (squares / (total - ddof).clamp_min(1)).sqrt()


def _ranks(r: Tensor, ids: Tensor) -> Tensor:
    """Rank of each value in its group, scaled to [0, 1], ties at the middle of their places; NaN stays NaN."""
    same = (ids[:, None] == ids[None, :]) & ~torch.isnan(r)[None, :]
    below = (same & (r[None, :] < r[:, None])).sum(1).double()
    equal = (same & (r[None, :] == r[:, None])).sum(1).double()
    rank = (below + 0.5 * (equal - 1)) / (same.sum(1) - 1).clamp_min(1)
    return torch.where(torch.isnan(r), r, rank)


def normalise(r: Tensor, ids: Tensor, groups: int, std: str, eps: float, ddof: int, rank: bool = False) -> Tensor:
    """(r − group mean) / (std + eps) in fp64; missing entries and constant groups give 0."""
    if rank:
        r = _ranks(r, ids)
    ok = ~torch.isnan(r)
    zeros = torch.zeros(groups, dtype=torch.float64, device=r.device)
    n = zeros.index_add(0, ids, ok.double())
    mean = zeros.index_add(0, ids, torch.where(ok, r, 0.0)) / n.clamp_min(1)
    low = (zeros + torch.inf).scatter_reduce(0, ids, torch.where(ok, r, torch.inf), "amin")
    high = (zeros - torch.inf).scatter_reduce(0, ids, torch.where(ok, r, -torch.inf), "amax")
    centred = torch.where(ok & (high > low)[ids], r - mean[ids], 0.0)
    if std == "none":
        return centred
    if std == "group":
        var = zeros.index_add(0, ids, centred.square()) / (n - ddof).clamp_min(1)
        scale = var.sqrt()[ids] + eps
    else:
        scale = _deviation(r, ok, ddof) + eps
    return torch.where(centred != 0, centred / scale, 0.0)


def combined(r: Tensor, w: Tensor, combine: str) -> Tensor:
    """One value per sample, [B], from rewards [R, B]; a reward of weight 0 counts for nothing."""
    used = (w != 0)[:, None]
    if combine == "weighted_sum":
        return torch.where(used, w[:, None] * r, 0.0).sum(0)
    negative = ((r < 0) & used).any(0)
    if combine == "geometric_mean":
        value = torch.exp(torch.where(used, w[:, None] * torch.log(r), 0.0).sum(0) / w.sum())
    else:
        value = w.sum() / torch.where(used, w[:, None] / r, 0.0).sum(0)
    return torch.where(negative, torch.nan, value)


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    combine: str,
    std: str,
    eps: float,
    ddof: int,
    rank: bool,
    batch_norm: bool,
) -> Tensor:
    """Advantage fp32 [B] of rewards [R, B]; see `ops.group_advantage`."""
    r, w = rewards.double(), weights.double()
    _, ids = torch.unique(group_ids, return_inverse=True)
    groups = int(ids.max()) + 1 if ids.numel() else 0
    r, w = r[w != 0], w[w != 0]
    if r.numel() == 0:
        return torch.zeros(rewards.shape[1], device=rewards.device)
    r = torch.where(torch.isnan(r).any(0), torch.nan, r)
    if combine == "weighted_advantage_sum":
        parts = torch.stack([normalise(row, ids, groups, std, eps, ddof, rank) for row in r])
        missing, adv = torch.isnan(r[0]), (w[:, None] * parts).sum(0)
    else:
        value = combined(r, w, combine)
        missing, adv = torch.isnan(value), normalise(value, ids, groups, std, eps, ddof, rank)
    if batch_norm:
        one = torch.zeros_like(ids)
        adv = normalise(torch.where(missing, torch.nan, adv), one, 1, "group", eps, ddof)
    return adv.float()


def win_rate(wins: Tensor, counts: Tensor) -> Tensor:
    """fp64 [P, G]; NaN for a member without any comparison."""
    n = counts.double().sum(-1)
    return torch.where(n > 0, wins.double().sum(-1) / torch.where(n > 0, n, 1.0), torch.nan)


def winrate_advantage(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), fp32 [P, G]; see `ops.winrate_advantage`."""
    rate = win_rate(wins, counts)
    p, g = rate.shape
    ids = torch.arange(p, device=rate.device).repeat_interleave(g)
    adv = normalise(rate.reshape(-1), ids, p, std, eps, ddof)
    return rate.float(), adv.float().view(p, g)
