"""Policy loss, win rates and advantages in plain torch: the specification of the small ops.

    loss = Σ max(−A r, −A clip(r)) / N        A = (reward − mean of its group) / (std + eps)

Invariants: a masked sample or a missing value (NaN) enters no loss, gradient or statistic, and a constant group
gives exactly 0. Statistics are two-pass fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.ops.args import Group, Policy, Results, Winrate


def policy_loss(a: Policy) -> tuple[Tensor, Tensor]:
    """(loss, metrics [8] in the order of `ops.METRICS`); loss is differentiable in logp, log_ratio and kl."""
    zero, (keep, delta, ratio, plain, clipped) = torch.zeros_like(a.logp), _terms(a)
    per_sample = torch.maximum(plain, clipped)
    if a.weight is not None:
        per_sample = per_sample * a.weight
    kl_term = zero if a.kl is None else torch.where(keep, a.kl, zero)
    count = keep.sum().clamp_min(1).to(ratio.dtype)
    total = torch.where(keep, per_sample + a.kl_coef * kl_term, zero).sum()
    loss = total / (count if a.denominator is None else a.denominator)
    with torch.no_grad():
        above, below = (ratio > 1.0 + a.clip_high) & keep, (ratio < 1.0 - a.clip_low) & keep
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


def _terms(a: Policy) -> tuple[Tensor, ...]:
    """Which samples count, log-ratio, ratio r, −A r and −A clip(r), [B] each."""
    keep = torch.ones_like(a.logp, dtype=torch.bool) if a.mask is None else a.mask
    zero = torch.zeros_like(a.logp)
    delta = torch.where(keep, a.logp - a.logp_old if a.log_ratio is None else a.log_ratio, zero)
    ratio = torch.exp(delta)
    adv = torch.where(keep, a.advantage, zero).clamp(-a.adv_clip, a.adv_clip)
    return keep, delta, ratio, -adv * ratio, -adv * ratio.clamp(1.0 - a.clip_low, 1.0 + a.clip_high)


def policy_grad(a: Policy) -> tuple[Tensor, Tensor | None]:
    """(∂ loss / ∂ log-ratio, ∂ loss / ∂ kl) of `policy_loss`, [B]: −A r where it is not clipped."""
    keep, _, _, plain, clipped = _terms(a)
    kept = keep.to(plain.dtype)
    scale = kept / (kept.sum().clamp_min(1) if a.denominator is None else a.denominator)
    d_delta = torch.where(keep & ~(plain < clipped), plain, 0.0) * scale
    if a.weight is not None:
        d_delta = torch.where(keep, d_delta * a.weight, 0.0)
    return d_delta, None if a.kl is None else a.kl_coef * scale


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


@torch.no_grad()
def group_advantage(a: Group) -> Results:
    """`Group.results`."""
    r, w = a.rewards.double(), a.weights.double()
    _, ids = torch.unique(a.group_ids, return_inverse=True)
    groups = int(ids.max()) + 1 if ids.numel() else 0
    r, w = r[w != 0], w[w != 0]
    if r.numel() == 0:
        return [torch.zeros(a.rewards.shape[1], dtype=torch.float32, device=a.rewards.device)]
    r = torch.where(torch.isnan(r).any(0), torch.nan, r)
    if a.combine == "weighted_advantage_sum":
        parts = torch.stack([normalise(row, ids, groups, a.std, a.eps, a.ddof, a.rank) for row in r])
        missing, adv = torch.isnan(r[0]), (w[:, None] * parts).sum(0)
    else:
        value = combined(r, w, a.combine)
        missing, adv = torch.isnan(value), normalise(value, ids, groups, a.std, a.eps, a.ddof, a.rank)
    if a.batch_norm:
        one = torch.zeros_like(ids)
        adv = normalise(torch.where(missing, torch.nan, adv), one, 1, "group", a.eps, a.ddof)
    return [adv.float()]


def win_rate(wins: Tensor, counts: Tensor) -> Tensor:
    """fp64 [P, G]; NaN for a member without any comparison."""
    n = counts.double().sum(-1)
    return torch.where(n > 0, wins.double().sum(-1) / torch.where(n > 0, n, 1.0), torch.nan)


@torch.no_grad()
def winrate_advantage(a: Winrate) -> Results:
    """`Winrate.results`."""
    rate = win_rate(a.wins, a.counts)
    p, g = rate.shape
    ids = torch.arange(p, device=rate.device).repeat_interleave(g)
    adv = normalise(rate.reshape(-1), ids, p, a.std, a.eps, a.ddof)
    return [rate.float(), adv.float().view(p, g)]
