"""Win rates of the members of each group, and their group-relative advantages.

    W_ij = P(i beats j), win rate_i = Σ_j W_ij / n_i over the comparisons that exist, A = (r − mean) / (std + eps)

Statistics are two-pass fp64. Invariant: a missing value (NaN, or a count of 0) enters no statistic, and a constant
group gives exactly 0.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, launch, op

Std = Literal["group", "global", "none"]


def normalised(r: Tensor, std: str, eps: float, ddof: int) -> Tensor:
    """(r − group mean) / (std + eps) of fp64 [P, G]; missing entries (NaN) and constant groups give 0."""
    if not r.numel():
        return r
    ok = ~r.isnan()
    n = ok.sum(-1, keepdim=True)
    known = torch.where(ok, r, 0.0)
    varies = torch.where(ok, r, -torch.inf).amax(-1, True) > torch.where(ok, r, torch.inf).amin(-1, True)
    centred = torch.where(ok & varies, r - known.sum(-1, keepdim=True) / n.clamp_min(1), 0.0)
    if std == "none":
        return centred
    squares = centred.square().sum(-1, keepdim=True)
    if std == "global":
        n = ok.sum()
        squares = torch.where(ok, r - known.sum() / n.clamp_min(1), 0.0).square().sum()
    scale = (squares / (n - ddof).clamp_min(1)).sqrt() + eps
    return torch.where(centred != 0, centred / scale, 0.0)


def reference_winrate(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), fp64 [P, G]; rates are rounded to fp32, so that sums in another order are equal."""
    n = counts.double().sum(-1)
    rate = torch.where(n > 0, wins.double().sum(-1) / torch.where(n > 0, n, 1.0), torch.nan).float().double()
    return rate, normalised(rate, std, eps, ddof)


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
        fields: dict[str, Any] = {"prompts": prompts, "group": group, "use_std": use_std, "ddof": ddof, "eps": eps}
        fields |= {"wins": wins, "counts": counts, "rate": rate, "advantage": advantage}
        launch(backend, "winrate", wins, fields=fields)


def winrate_advantage(
    wins: Tensor, counts: Tensor, *, std: Std = "group", eps: float = 1e-4, ddof: int = 0
) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), both fp32 [P, G], from wins and counts [P, G, G]; in one launch unless std is global.

    wins[p, i, j]: sum of the soft verdicts that i beats j; counts: the number of verdicts. A member without any
    comparison has win rate NaN and advantage 0. Advantages are of the rates as returned, so that rates whose sums
    differ only in order are equal. Raises ValueError for other shapes and options.
    """
    if std not in get_args(Std):
        raise ValueError(f"std: expected one of {', '.join(get_args(Std))}, got '{std}'")
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"ddof: expected 0 or 1, eps: 0 or more; got {ddof} and {eps}")
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
