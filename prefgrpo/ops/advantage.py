"""Win rates and group-relative advantages.

    W_ij = P(i beats j), win rate_i = Σ_j W_ij / n_i over the comparisons that exist, A = (r − mean) / (std + eps)

Statistics are two-pass fp64. Invariant: a missing value (NaN, or a count of 0) enters no statistic, and a constant
group gives exactly 0.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from prefgrpo.ops import args, library, reference
from prefgrpo.ops.args import Combine, Std

_STD, _COMBINE = get_args(Std), get_args(Combine)


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
    shape, device = wins.shape, wins.device
    if len(shape) != 3 or shape[1] != shape[2] or shape != counts.shape or device != counts.device:
        raise ValueError(
            f"wins and counts: expected [P, G, G] on one device, got {list(shape)} on {device} and "
            f"{list(counts.shape)} on {counts.device}"
        )
    if wins.is_complex() or counts.is_complex():
        raise TypeError(f"wins and counts: expected real numbers, got {wins.dtype} and {counts.dtype}")
    if std == "global":
        rate = reference.win_rate(wins, counts)
        ids = torch.arange(shape[0], device=device).repeat_interleave(shape[1])
        return rate.float(), reference.normalise(rate.flatten(), ids, std, eps, ddof).float().view(rate.shape)
    rate, advantage = library.winrate_advantage(args.Winrate(wins, counts, std == "group", eps, ddof))
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
    if rewards.is_complex():
        raise TypeError(f"rewards: expected real numbers, got {rewards.dtype}")
    if weights is None:
        weights = torch.ones(rewards.shape[0], dtype=torch.float64, device=rewards.device)
    if weights.shape != rewards.shape[:1]:
        raise ValueError(f"weights: expected [{rewards.shape[0]}], one per reward, got {list(weights.shape)}")
    with torch.no_grad():
        ids = reference.dense_ids(group_ids.to(rewards.device))
        w = weights.to(rewards.device, torch.float64)[:, None]
        r = rewards.double()
        missing = (r.isnan() & (w != 0)).any(0)
        if combine == "weighted_advantage_sum":
            out = torch.zeros_like(missing, dtype=torch.float64)
            for row, weight in zip(r, w, strict=True):
                one = reference.normalise(torch.where(missing, torch.nan, row), ids, std, eps, ddof, rank)
                out = out + torch.where(weight != 0, weight * one, 0.0)
            return out.float()
        if combine == "weighted_sum":
            value = torch.where(w != 0, w * r, 0.0).sum(0)
        else:
            value = torch.exp(torch.where(w != 0, w * torch.log(r), 0.0).sum(0) / w.sum())
            missing = missing | ((r < 0) & (w != 0)).any(0)
        value = torch.where(missing, torch.nan, value)
        return reference.normalise(value, ids, std, eps, ddof, rank).float()
