"""What may be done to verdicts and rewards before the advantage: Bradley-Terry strengths, log-taming.

    strength:  π_i ← (W_i + ρ/2) / (Σ_j N_ij / (π_i + π_j) + ρ / (π_i + 1))   (Hunter 2004, with a prior ρ)

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
    if wins.dim() != 3 or wins.shape != counts.shape or wins.shape[1] != wins.shape[2]:
        raise ValueError(f"wins and counts: expected [P, G, G], got {list(wins.shape)} and {list(counts.shape)}")
    if not prior > 0 or iterations < 1:
        raise ValueError(f"prior: expected more than 0, iterations: 1 or more; got {prior} and {iterations}")
    n, won = counts.double(), wins.double().sum(-1) + prior / 2
    strength = torch.ones_like(won)
    for _ in range(iterations):
        met = (n / (strength[:, :, None] + strength[:, None, :])).sum(-1)
        strength = won / (met + prior / (strength + 1))
    return torch.where(n.sum(-1) > 0, strength.log(), torch.nan).float()


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
