"""Turns groups' verdicts p [P, G, G] into one number in [0, 1] per member.

    p[group, i, j]  P(i beats j) of the pair shown in this order; NaN: not compared, or no verdict
    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with a verdict
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j) = σ(θ_i − θ_j)

Invariant: a missing verdict has no effect, and a member without any verdict is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.judge.bradley_terry import bradley_terry

Floats = NDArray[np.float64]
Rate = Literal["win_rate", "bradley_terry"]
VerdictKind = Literal["soft", "hard"]
PRIOR = 0.3
"""Prior: drawn games of every member against an average one, which keep the strength of an undefeated member finite."""


@dataclass(frozen=True)
class Rating:
    """How verdicts are turned into numbers."""

    rate: Rate = "win_rate"
    """Mean over a member's comparisons, or its mean win probability against the whole group under Bradley-Terry."""
    verdict: VerdictKind = "soft"
    """Probabilities, or each verdict rounded to {0, ½, 1} and the two orders of a pair averaged."""

    def __post_init__(self) -> None:
        for name, given, known in (("rate", self.rate, Rate), ("verdict", self.verdict, VerdictKind)):
            if given not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {given!r}")


@dataclass(frozen=True)
class Rated:
    """Ratings of P groups of G members."""

    values: Floats
    """[P, G] in [0, 1]; NaN: no verdict."""
    wins: Floats
    """[P, G, G] summed verdicts that row beats column, as used by the win rate."""
    counts: Floats
    """[P, G, G] number of these verdicts."""


def verdict_table(size: int, games: Iterable[tuple[int, int, float | None]]) -> Floats:
    """p [G, G] of a group from (first, second, P(first) or None); each ordered pair at most once."""
    p = np.full((size, size), np.nan)
    for first, second, value in games:
        if value is not None:
            p[first, second] = value
    return p


def rate_groups(p: Floats, rating: Rating) -> Rated:
    """Rate P groups of G members, from their verdicts p [P, G, G], in one batch."""
    shown = torch.from_numpy(~np.isnan(p)).double()
    first = torch.from_numpy(np.nan_to_num(p if rating.verdict == "soft" else (np.sign(p - 0.5) + 1) / 2))
    wins = first + (shown - first).mT
    counts = shown + shown.mT
    if rating.rate == "win_rate":
        if rating.verdict == "hard":
            wins, counts = wins / counts.clamp(min=1.0), counts.clamp(max=1.0)
        values = (wins.sum(2) / counts.sum(2)).float()  # so that equal rates stay equal
    else:
        values = _mean_win(bradley_terry(wins, counts, prior=PRIOR))
    return Rated(values.double().numpy(), wins.numpy(), counts.numpy())


def _mean_win(theta: Tensor) -> Tensor:
    """Mean P(i beats j) [P, G] over the other members with a strength; ½ if there are none."""
    there = ~theta.isnan()
    p = torch.sigmoid(theta[:, :, None] - theta[:, None, :]).nan_to_num(0.0)
    others = there.sum(1, keepdim=True) - 1
    mean = torch.where(others > 0, (p.sum(2) - 0.5) / others.clamp(min=1), 0.5)
    return torch.where(there, mean, torch.nan)
