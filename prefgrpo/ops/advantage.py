"""Win rates and group-relative advantages.

    W_ij = P(i beats j), win rate_i = Σ_j W_ij / n_i over the comparisons that exist, A = (r − mean) / (std + eps)

Statistics are two-pass fp64. Invariant: a missing value (NaN, or a count of 0) enters no statistic, and a constant
group gives exactly 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, launch, op

Std = Literal["group", "global", "none"]
Combine = Literal["weighted_sum", "weighted_advantage_sum", "geometric_mean"]
_STD = get_args(Std)
_COMBINE = get_args(Combine)


def dense_ids(group_ids: Tensor) -> Tensor:
    """Group numbers 0, 1, … int64 [B] of any integer ids, without reading a value back from the device."""
    order = group_ids.argsort(stable=True)
    ordered = group_ids[order]
    new = torch.ones_like(order)
    new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)


def _deviation(values: Tensor, ok: Tensor, ddof: int) -> Tensor:
    """Standard deviation of the entries where `ok` is True, 0-d."""
    total = ok.sum()
    mean = torch.where(ok, values, 0.0).sum() / total.clamp_min(1)
    squares = torch.where(ok, values - mean, 0.0).square().sum()
    return (squares / (total - ddof).clamp_min(1)).sqrt()


def _ranks(r: Tensor, ids: Tensor) -> Tensor:
    """Rank of each value in its group, scaled to [0, 1]; tied values get their mean rank, and NaN stays NaN."""
    same = (ids[:, None] == ids[None, :]) & ~torch.isnan(r)[None, :]
    below = (same & (r[None, :] < r[:, None])).sum(1).double()
    equal = (same & (r[None, :] == r[:, None])).sum(1).double()
    rank = (below + 0.5 * (equal - 1)) / (same.sum(1) - 1).clamp_min(1)
    return torch.where(torch.isnan(r), r, rank)


def normalise(r: Tensor, ids: Tensor, std: str, eps: float, ddof: int, rank: bool = False) -> Tensor:
    """(r − group mean) / (std + eps) in fp64, for `dense_ids` [B]; missing entries and constant groups give 0."""
    if rank:
        r = _ranks(r, ids)
    ok = ~torch.isnan(r)
    zeros = torch.zeros_like(r)
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


def reference_winrate(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), fp64 [P, G]; rates are rounded to fp32, so that sums in another order are equal."""
    n = counts.double().sum(-1)
    rate = torch.where(n > 0, wins.double().sum(-1) / torch.where(n > 0, n, 1.0), torch.nan).float().double()
    ids = torch.arange(rate.shape[0], device=rate.device).repeat_interleave(rate.shape[1])
    return rate, normalise(rate.flatten(), ids, std, eps, ddof).view(rate.shape)


@op("winrate_advantage", mutates=("rate", "advantage"))
def _winrate(
    wins: Tensor, counts: Tensor, use_std: bool, eps: float, ddof: int, rate: Tensor, advantage: Tensor
) -> None:
    backend = backend_of(wins.device)
    if backend == "torch":
        values = reference_winrate(wins, counts, "group" if use_std else "none", eps, ddof)
        rate.copy_(values[0])
        advantage.copy_(values[1])
    else:
        prompts, group = rate.shape
        options = {"prompts": prompts, "group": group, "use_std": use_std, "ddof": ddof, "eps": eps}
        launch(backend, "winrate", wins, wins=wins, counts=counts, rate=rate, advantage=advantage, **options)


def _check_options(std: str, eps: float, ddof: int) -> None:
    if std not in _STD:
        raise ValueError(f"std: expected one of {', '.join(_STD)}, got '{std}'")
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"ddof: expected 0 or 1, eps: 0 or more; got {ddof} and {eps}")


def winrate_advantage(
    wins: Tensor, counts: Tensor, *, std: Std = "group", eps: float = 1e-4, ddof: int = 0
) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), both fp32 [P, G], from wins and counts [P, G, G]; in one launch unless std is global.

    wins[p, i, j]: sum of the soft verdicts that i beats j; counts: the number of verdicts. A member without any
    comparison has win rate NaN and advantage 0. Advantages are of the rates as returned, so that rates whose sums
    differ only in order are equal. Raises ValueError for other shapes.
    """
    _check_options(std, eps, ddof)
    shape = wins.shape
    device = wins.device
    if len(shape) != 3 or shape[1] != shape[2] or shape != counts.shape or device != counts.device:
        raise ValueError(
            f"wins and counts: expected [P, G, G] on one device, got {list(shape)} on {device} and "
            f"{list(counts.shape)} on {counts.device}"
        )
    if std == "global":
        return tuple(t.float() for t in reference_winrate(wins, counts, std, eps, ddof))  # type: ignore[return-value]
    if wins.dtype != torch.float32 or counts.dtype != torch.float32:
        wins = wins.double()
        counts = counts.double()
    rate = torch.empty(shape[:2], dtype=torch.float32, device=device)
    advantage = torch.empty_like(rate)
    wins = wins.contiguous()
    counts = counts.contiguous()
    _winrate(wins, counts, std == "group", eps, ddof, rate, advantage)
    return rate, advantage


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    combine: Combine = "weighted_sum",
    std: Std = "group",
    eps: float = 1e-4,
    ddof: int = 0,
    rank: bool = False,
) -> Tensor:
    """Advantage fp32 [B] of rewards [R, B] (NaN = missing) in groups given by any integer ids [B]; in plain torch.

    combine: normalise the weighted sum, or the weighted geometric mean (missing if a reward is negative), of the
    rewards; or take the weighted sum of the rewards' separate advantages (GDPO). A sample that lacks any reward of
    non-zero weight is missing and gets 0. rank: first replace values by their rank within the group. Raises ValueError
    for other shapes.
    """
    _check_options(std, eps, ddof)
    if combine not in _COMBINE:
        raise ValueError(f"combine: expected one of {', '.join(_COMBINE)}, got '{combine}'")
    if rewards.dim() != 2 or group_ids.shape != rewards.shape[1:] or group_ids.is_floating_point():
        raise ValueError(
            f"expected rewards [R, B] and integer group_ids [B], got {list(rewards.shape)} and "
            f"{group_ids.dtype} {list(group_ids.shape)}"
        )
    if weights is None:
        weights = torch.ones(rewards.shape[0], dtype=torch.float64, device=rewards.device)
    if weights.shape != rewards.shape[:1]:
        raise ValueError(f"weights: expected [{rewards.shape[0]}], one per reward, got {list(weights.shape)}")
    with torch.no_grad():
        ids = dense_ids(group_ids.to(rewards.device))
        w = weights.to(rewards.device, torch.float64)[:, None]
        r = rewards.double()
        missing = (r.isnan() & (w != 0)).any(0)
        if combine == "weighted_advantage_sum":
            out = torch.zeros_like(missing, dtype=torch.float64)
            for row, weight in zip(r, w, strict=True):
                one = normalise(torch.where(missing, torch.nan, row), ids, std, eps, ddof, rank)
                out = out + torch.where(weight != 0, weight * one, 0.0)
            return out.float()
        if combine == "weighted_sum":
            value = torch.where(w != 0, w * r, 0.0).sum(0)
        else:
            logarithm = torch.where(w != 0, w * torch.log(r), 0.0).sum(0) / w.sum()
            value = torch.exp(logarithm).float().double()  # equal rewards may differ in the last bit of exp and log
            missing = missing | ((r < 0) & (w != 0)).any(0)
        value = torch.where(missing, torch.nan, value)
        return normalise(value, ids, std, eps, ddof, rank).float()
