"""Turns a group's verdicts into one number in [0, 1] per member.

    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with a verdict
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j) = σ(θ_i − θ_j)

Invariant: a missing verdict has no effect, and a member without any verdict is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.judge.bradley_terry import bradley_terry
from prefgrpo.judge.plans import Judged

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


def rate_groups(size: int, groups: Sequence[Sequence[Judged]], rating: Rating) -> Rated:
    """Rate P groups of `size` members in one batch."""
    first, shown = _sums(size, groups, rating.verdict)
    wins, counts = first + (shown - first).mT, shown + shown.mT
    if rating.rate == "win_rate":
        if rating.verdict == "hard":
            wins, counts = wins / counts.clamp(min=1.0), counts.clamp(max=1.0)
        values = (wins.sum(2) / counts.sum(2)).float()  # so that equal rates stay equal
    else:
        values = _mean_win(bradley_terry(wins, counts, prior=PRIOR))
    return Rated(values.double().numpy(), wins.numpy(), counts.numpy())


def _sums(size: int, groups: Sequence[Sequence[Judged]], verdict: VerdictKind) -> tuple[Tensor, Tensor]:
    """Sum of P(first), and number of verdicts, both [P, first, second]."""
    first, shown = np.zeros((2, len(groups), size, size))
    for k, group in enumerate(groups):
        games = [(i, j, p) for i, j, p in group if p is not None]
        if not games:
            continue
        i, j, p = (np.array(column) for column in zip(*games, strict=True))
        np.add.at(first[k], (i, j), p if verdict == "soft" else (np.sign(p - 0.5) + 1) / 2)
        np.add.at(shown[k], (i, j), 1.0)
    return torch.from_numpy(first), torch.from_numpy(shown)


def _mean_win(theta: Tensor) -> Tensor:
    """Mean P(i beats j) [P, G] over the other members with a strength; ½ if there are none."""
    there = ~theta.isnan()
    p = torch.sigmoid(theta[:, :, None] - theta[:, None, :]).nan_to_num(0.0)
    others = there.sum(1, keepdim=True) - 1
    mean = torch.where(others > 0, (p.sum(2) - 0.5) / others.clamp(min=1), 0.5)
    return torch.where(there, mean, torch.nan)
