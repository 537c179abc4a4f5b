"""Bradley-Terry strengths from verdicts, instead of win rates.

    P(i beats j) = σ(θ_i − θ_j); if i is shown first: σ(θ_i − θ_j + b)   (Hunter 2004, where b is the home advantage)

θ and b maximise the likelihood under a prior worth ρ drawn games of every member against θ = 0, and of b against 0.
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
    _check("wins and counts", wins, counts, prior)
    theta = _maximise(_observed_wins(wins, counts).sum(-1), counts.double() / 2, None, prior)[0]
    return theta.to(torch.float64 if wins.dtype == torch.float64 else torch.float32)


def bradley_terry_ordered(first: Tensor, shown: Tensor, *, prior: float = 1.0) -> tuple[Tensor, Tensor]:
    """(θ [P, G], position bias b [P] in logits): P(i beats j, i shown first) = σ(θ_i − θ_j + b).

    first[p, i, j]: sum of P(first is better) over the comparisons that showed i before j; shown: their number. fp64 for
    fp64, else fp32. prior: as in `bradley_terry`, and the same number of drawn games that pull b towards 0. Raises
    ValueError for other shapes or prior <= 0.
    """
    _check("first and shown", first, shown, prior)
    f, n = _observed_wins(first, shown), shown.double()
    theta, bias = _maximise((f + (n - f).mT).sum(-1), n, f.sum((1, 2)), prior)
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    return theta.to(dtype), bias.to(dtype)


def _observed_wins(wins: Tensor, counts: Tensor) -> Tensor:
    """Wins in fp64, and 0 where there was no comparison, so that a NaN there has no effect."""
    return torch.where(counts > 0, wins.double(), 0.0)


def _check(what: str, a: Tensor, b: Tensor, prior: float) -> None:
    if a.dim() != 3 or a.shape != b.shape or a.shape[1] != a.shape[2]:
        raise ValueError(f"{what}: expected [P, G, G], got {list(a.shape)} and {list(b.shape)}")
    if not prior > 0:
        raise ValueError(f"prior: expected more than 0, got {prior}")


def _maximise(wins: Tensor, shown: Tensor, first_wins: Tensor | None, prior: float) -> tuple[Tensor, Tensor]:
    """(θ, b) from wins [P, G], comparisons [P, first, second] and wins of the first [P] (None: no bias is fitted).

    Newton's method, each step scaled by log(1 + β)/β, where β bounds the change of any logit: for a sum of logistic
    losses this ascends from any start and converges quadratically (Sun and Tran-Dinh 2019, generalised
    self-concordance). It stops when no member moves by more than 1e-10.
    """
    theta, bias = torch.zeros_like(wins), torch.zeros_like(wins[:, :1])
    fit_bias = 0.0 if first_wins is None else 1.0
    for _ in range(_MAX_NEWTON_STEPS):
        p = torch.sigmoid(theta[:, :, None] - theta[:, None, :] + bias[:, :, None])
        p_theta, p_bias = torch.sigmoid(theta), torch.sigmoid(bias)
        expected, w = shown * p, shown * p * (1 - p)
        grad_theta = wins - expected.sum(2) - (shown - expected).sum(1) + prior * (0.5 - p_theta)
        grad_bias = prior * (0.5 - p_bias) + (0 if first_wins is None else (first_wins - expected.sum((1, 2)))[:, None])
        h_cross = fit_bias * (w.sum(2) - w.sum(1))
        h_theta = torch.diag_embed(w.sum(2) + w.sum(1) + prior * p_theta * (1 - p_theta)) - w - w.mT
        h_bias = fit_bias * w.sum((1, 2))[:, None] + prior * p_bias * (1 - p_bias)
        hessian = torch.cat([torch.cat([h_theta, h_cross[:, :, None]], 2), torch.cat([h_cross, h_bias], 1)[:, None]], 1)
        step = torch.linalg.solve(hessian, torch.cat([grad_theta, grad_bias], 1))
        beta = (2 * step[:, :-1].abs().amax(1, keepdim=True) + step[:, -1:].abs()).clamp(min=1e-300)
        step = step * torch.log1p(beta) / beta
        theta, bias = theta + step[:, :-1], bias + step[:, -1:]
        if not (step.abs() > _TOLERANCE).any():  # a NaN in one group does not stop the others
            break
    played = shown.sum(-1) + shown.sum(-2) > 0
    return torch.where(played, theta, torch.nan), bias[:, 0]
