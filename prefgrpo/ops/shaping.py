"""What may be done to verdicts and rewards before the advantage: Bradley-Terry strengths, log-taming.

    strength:  π_i ← (W_i + ρ/2) / (Σ_j N_ij / (π_i + π_j) + ρ / (π_i + 1))   (Hunter 2004, with a prior ρ)
    shown i, then j:  P(i beats j) = σ(θ_i − θ_j + b) = γ π_i / (γ π_i + π_j),  γ = exp b   (ibid., home advantage)

Plain torch on whatever device, batched over prompts, no value read back. Invariant: a missing comparison or reward
(count 0, NaN) moves nothing, and an undefeated member stays finite.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def bradley_terry(wins: Tensor, counts: Tensor, *, prior: float = 1.0, iterations: int = 100) -> Tensor:
    """Log-strengths θ fp32 [P, G] from wins and counts [P, G, G]; P(i beats j) = σ(θ_i − θ_j).

    For sparse plans, where a win rate depends on who was met. counts is symmetric. prior: that many drawn games against
    a member of strength 1. A member without any comparison is NaN. Raises ValueError for other shapes or prior <= 0.
    """
    _check("wins and counts", wins, counts, prior, iterations)
    return _minorise(wins.double().sum(-1), counts.double() / 2, None, prior, iterations)[0]


def bradley_terry_ordered(
    first: Tensor, shown: Tensor, *, prior: float = 1.0, iterations: int = 300
) -> tuple[Tensor, Tensor]:
    """(θ fp32 [P, G], position bias b fp32 [P] in logits): P(i beats j, i shown first) = σ(θ_i − θ_j + b).

    first[p, i, j]: summed P(first) over the comparisons that showed i, then j; shown: how many there were. prior: as
    in `bradley_terry`, and that many drawn games against no bias. Raises ValueError for other shapes or prior <= 0.
    """
    _check("first and shown", first, shown, prior, iterations)
    f, n = first.double(), shown.double()
    return _minorise((f + (n - f).mT).sum(-1), n, f.sum((1, 2)), prior, iterations)


def _check(what: str, a: Tensor, b: Tensor, prior: float, iterations: int) -> None:
    if a.dim() != 3 or a.shape != b.shape or a.shape[1] != a.shape[2]:
        raise ValueError(f"{what}: expected [P, G, G], got {list(a.shape)} and {list(b.shape)}")
    if not prior > 0 or iterations < 1:
        raise ValueError(f"prior: expected more than 0, iterations: 1 or more; got {prior} and {iterations}")


def _minorise(won: Tensor, shown: Tensor, firsts: Tensor | None, prior: float, steps: int) -> tuple[Tensor, Tensor]:
    """(θ, b) from wins [P, G], comparisons [P, first, second] and wins of the first [P] (None: there is no bias)."""
    strength, odds = torch.ones_like(won), torch.ones_like(won[:, 0])
    for _ in range(steps):
        ahead = odds[:, None, None] * strength[:, :, None]
        share = shown / (ahead + strength[:, None, :])
        met = odds[:, None] * share.sum(-1) + share.sum(-2)
        if firsts is not None:
            odds = (firsts + prior / 2) / ((share * strength[:, :, None]).sum((1, 2)) + prior / (odds + 1))
        strength = (won + prior / 2) / (met + prior / (strength + 1))
    played = shown.sum(-1) + shown.sum(-2) > 0
    return torch.where(played, strength.log(), torch.nan).float(), odds.log().float()


def log_tame(rewards: Tensor, threshold: float | Literal["mean", "median"] = "mean") -> Tensor:
    """Rewards [R, B] with log(1 + r) in the rows whose std/mean exceeds `threshold` (PaCo-GRPO, arXiv 2512.04784).

    threshold: a number, or the mean or median of the rows' own ratios. NaN stays NaN and counts for nothing. Rewards
    must be above −1 (others become NaN, hence missing). Raises ValueError for another shape.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards: expected [R, B], got {list(rewards.shape)}")
    r = rewards.double()
    mean = r.nanmean(1, keepdim=True)
    spread = ((r - mean).square().nanmean(1).sqrt() / mean[:, 0]).nan_to_num(0.0)
    if isinstance(threshold, str):
        limit = spread.mean() if threshold == "mean" else spread.median()
    else:
        limit = spread.new_tensor(threshold)
    return torch.where((spread > limit)[:, None], torch.log1p(r), r).to(rewards.dtype)
