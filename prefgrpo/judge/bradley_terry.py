"""Bradley-Terry strengths from verdicts, instead of win rates.

    P(i beats j) = σ(θ_i − θ_j)   (Hunter 2004)

θ maximises the likelihood under a prior worth ρ drawn games of every member against θ = 0.
Plain torch on any device, batched over prompts. Invariant: a missing comparison (count 0) has no effect, and the
strength of an undefeated member stays finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_NEWTON_STEPS = 200
"""Maximum number of Newton steps; sparse groups of 24 with one-sided results need about 20."""
_TOLERANCE = 1e-10
"""The fit has converged when no log-strength changes by more than this."""


def bradley_terry(wins: Tensor, counts: Tensor, *, prior: float = 1.0) -> Tensor:
    """Log-strengths θ [P, G] from wins and counts [P, G, G]; P(i beats j) = σ(θ_i − θ_j). fp64 for fp64, else fp32.

    For sparse plans, where win rates depend on the opponents met. counts is symmetric. prior: number of drawn games
    with a member of strength 1. A member without comparisons is NaN. Raises ValueError for other shapes or prior <= 0.
    """
    if wins.dim() != 3 or wins.shape != counts.shape or wins.shape[1] != wins.shape[2]:
        raise ValueError(f"wins and counts: expected [P, G, G], got {list(wins.shape)} and {list(counts.shape)}")
    if not prior > 0:
        raise ValueError(f"prior: expected more than 0, got {prior}")
    observed = torch.where(counts > 0, wins.double(), 0.0)  # so that a NaN without a comparison has no effect
    theta = _maximise(observed.sum(-1), counts.double(), prior)
    return theta.to(torch.float64 if wins.dtype == torch.float64 else torch.float32)


def _maximise(wins: Tensor, counts: Tensor, prior: float) -> Tensor:
    """θ [P, G] from each member's wins [P, G] and the number of comparisons [P, G, G], in fp64.

    Newton's method, each step scaled by log(1 + β)/β, where β bounds the change of any logit: for a sum of logistic
    losses this ascends from any start and converges quadratically (Sun and Tran-Dinh 2019, generalised
    self-concordance). It stops when no member moves by more than 1e-10.
    """
    theta = torch.zeros_like(wins)
    for _ in range(_MAX_NEWTON_STEPS):
        p = torch.sigmoid(theta[:, :, None] - theta[:, None, :])
        p_prior = torch.sigmoid(theta)
        w = counts * p * (1 - p)
        gradient = wins - (counts * p).sum(2) + prior * (0.5 - p_prior)
        hessian = torch.diag_embed(w.sum(2) + prior * p_prior * (1 - p_prior)) - w
        step = torch.linalg.solve(hessian, gradient)
        beta = (2 * step.abs().amax(1, keepdim=True)).clamp(min=1e-300)
        step = step * torch.log1p(beta) / beta
        theta = theta + step
        if not (step.abs() > _TOLERANCE).any():  # a NaN in one group does not stop the others
            break
    return torch.where(counts.sum(-1) > 0, theta, torch.nan)
