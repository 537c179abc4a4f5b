"""Turns groups' verdicts p [P, G, G] into one number in [0, 1] per member.

    p[group, i, j]  P(i beats j) of the pair shown in this order; NaN: not compared, or no verdict
    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with a verdict
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j) = σ(θ_i − θ_j)   (Hunter 2004)

θ maximises the likelihood under a prior worth PRIOR drawn games of every member against θ = 0. Invariant: a missing
verdict has no effect, a member without any verdict is NaN, and the strength of an undefeated member stays finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Rate = Literal["win_rate", "bradley_terry"]
VerdictKind = Literal["soft", "hard"]
PRIOR = 0.3
"""Drawn games of every member against an average one."""
_MAX_NEWTON_STEPS = 200
"""Sparse groups of 24 with one-sided results need about 20."""
_TOLERANCE = 1e-10
"""The fit has converged when no log-strength changes by more than this."""


def verdict_table(size: int, games: Iterable[tuple[int, int, float | None]]) -> Floats:
    """p [G, G] of a group from (first, second, P(first) or None); each ordered pair at most once."""
    p = np.full((size, size), np.nan)
    for first, second, value in games:
        if value is not None:
            p[first, second] = value
    return p


def rate_groups(p: Floats, rate: Rate = "win_rate", verdict: VerdictKind = "soft") -> tuple[Floats, Floats, Floats]:
    """Rate P groups of G members, from their verdicts p [P, G, G], in one batch.

    rate: the mean over a member's comparisons, or its mean win probability against the whole group under Bradley-Terry.
    verdict: probabilities, or each verdict rounded to {0, ½, 1} and the two orders of a pair averaged. Returns
    (ratings [P, G] in [0, 1], NaN without a verdict; wins [P, G, G]: the summed verdicts that row beats column; counts
    [P, G, G]: the number of these verdicts).
    """
    shown = torch.from_numpy(~np.isnan(p)).double()
    first = torch.from_numpy(np.nan_to_num(p if verdict == "soft" else (np.sign(p - 0.5) + 1) / 2))
    wins = first + (shown - first).mT
    counts = shown + shown.mT
    if rate == "bradley_terry":
        return _mean_win(bradley_terry(wins, counts)).double().numpy(), wins.numpy(), counts.numpy()
    if verdict == "hard":
        wins = wins / counts.clamp(min=1.0)
        counts = counts.clamp(max=1.0)
    values = (wins.sum(2) / counts.sum(2)).float()  # so that equal rates stay equal
    return values.double().numpy(), wins.numpy(), counts.numpy()


def _mean_win(theta: Tensor) -> Tensor:
    """Mean P(i beats j) [P, G] over the other members with a strength; ½ if there are none."""
    there = ~theta.isnan()
    p = torch.sigmoid(theta[:, :, None] - theta[:, None, :]).nan_to_num(0.0)
    others = there.sum(1, keepdim=True) - 1
    mean = torch.where(others > 0, (p.sum(2) - 0.5) / others.clamp(min=1), 0.5)
    return torch.where(there, mean, torch.nan)


def bradley_terry(wins: Tensor, counts: Tensor, *, prior: float = PRIOR) -> Tensor:
    """Log-strengths θ [P, G] from wins and counts [P, G, G]; counts is symmetric. A member without comparisons is NaN.

    Damped Newton: the step is scaled by log(1 + β) / β, β = 2 max |step|. For logistic losses this ascends from any
    start and converges quadratically (Sun and Tran-Dinh 2019, generalised self-concordance).
    """
    counts = counts.double()
    won = torch.where(counts > 0, wins.double(), 0.0).sum(-1)  # so that a NaN without a comparison has no effect
    theta = torch.zeros_like(won)
    for _ in range(_MAX_NEWTON_STEPS):
        p = torch.sigmoid(theta[:, :, None] - theta[:, None, :])
        p_prior = torch.sigmoid(theta)
        w = counts * p * (1 - p)
        gradient = won - (counts * p).sum(2) + prior * (0.5 - p_prior)
        hessian = torch.diag_embed(w.sum(2) + prior * p_prior * (1 - p_prior)) - w
        step = torch.linalg.solve(hessian, gradient)
        beta = (2 * step.abs().amax(1, keepdim=True)).clamp(min=1e-300)
        step = step * torch.log1p(beta) / beta
        theta = theta + step
        if not (step.abs() > _TOLERANCE).any():  # a NaN in one group does not stop the others
            break
    return torch.where(counts.sum(-1) > 0, theta, torch.nan)
