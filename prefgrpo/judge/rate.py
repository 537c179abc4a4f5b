"""Turns a group's verdicts into one number in [0, 1] per member.

    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with a verdict
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j, i shown first) = σ(θ_i − θ_j + b)

A position bias b (in logits) is removed from each verdict, P ← σ(logit P − b), or fitted together with the strengths.
Invariant: a missing verdict has no effect, and a member without any verdict is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.judge.plans import Judged
from prefgrpo.ops import bradley_terry, bradley_terry_ordered

Floats = NDArray[np.float64]
Rate = Literal["win_rate", "bradley_terry"]
VerdictKind = Literal["soft", "hard"]
Bias = float | Literal["fit"]
PRIOR = 0.3
"""Prior: drawn games of every member against an average one, which keep the strength of an undefeated member finite."""


@dataclass(frozen=True)
class Rating:
    """How verdicts are turned into numbers."""

    rate: Rate = "win_rate"
    """Mean over a member's comparisons, or its mean win probability against the whole group under Bradley-Terry."""
    verdict: VerdictKind = "soft"
    """Probabilities, or each verdict rounded to {0, ½, 1} and the two orders of a pair averaged."""
    bias: Bias = 0.0
    """Position bias in logits to remove, or 'fit': estimate it per group."""

    def __post_init__(self) -> None:
        for name, given, known in (("rate", self.rate, Rate), ("verdict", self.verdict, VerdictKind)):
            if given not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {given!r}")
        number = isinstance(self.bias, int | float) and not isinstance(self.bias, bool) and np.isfinite(self.bias)
        if not number and self.bias != "fit":
            raise ValueError(f"bias must be a number of logits or 'fit', got {self.bias!r}")


@dataclass(frozen=True)
class Rated:
    """Ratings of P groups of G members."""

    values: Floats
    """[P, G] in [0, 1]; NaN: no verdict."""
    wins: Floats
    """[P, G, G] summed verdicts that row beats column, as used by the win rate."""
    counts: Floats
    """[P, G, G] number of these verdicts."""
    bias: Floats
    """[P] position bias that was removed, in logits."""


def rate_groups(size: int, groups: Sequence[Sequence[Judged]], rating: Rating) -> Rated:
    """Rate P groups of `size` members in one batch."""
    bias: Any = np.full(len(groups), 0.0 if rating.bias == "fit" else rating.bias)
    if rating.bias == "fit":
        bias = bradley_terry_ordered(*_sums(size, groups, bias, "soft"), prior=PRIOR)[1].double().numpy()
    first, shown = _sums(size, groups, bias, rating.verdict)
    wins, counts = first + (shown - first).mT, shown + shown.mT
    if rating.rate == "win_rate":
        if rating.verdict == "hard":
            wins, counts = wins / counts.clamp(min=1.0), counts.clamp(max=1.0)
        values = (wins.sum(2) / counts.sum(2)).float()  # so that equal rates stay equal
    elif rating.bias == "fit":
        first, shown = _sums(size, groups, np.zeros(len(groups)), rating.verdict)
        values = _mean_win(bradley_terry_ordered(first, shown, prior=PRIOR)[0])
    else:
        values = _mean_win(bradley_terry(wins, counts, prior=PRIOR))
    return Rated(values.double().numpy(), wins.numpy(), counts.numpy(), bias)


def _sums(size: int, groups: Sequence[Sequence[Judged]], bias: Floats, verdict: VerdictKind) -> tuple[Tensor, Tensor]:
    """Sum of P(first), bias removed, and number of verdicts, both [P, first, second]."""
    first, shown = np.zeros((2, len(groups), size, size))
    for k, group in enumerate(groups):
        games = [(i, j, p) for i, j, p in group if p is not None]
        if not games:
            continue
        i, j, p = (np.array(column) for column in zip(*games, strict=True))
        p = unbiased(p.astype(np.float64), float(bias[k]))
        np.add.at(first[k], (i, j), p if verdict == "soft" else (np.sign(p - 0.5) + 1) / 2)
        np.add.at(shown[k], (i, j), 1.0)
    return torch.from_numpy(first), torch.from_numpy(shown)


def unbiased(p: Floats, bias: float) -> Floats:
    """σ(logit p − bias). 0, ½ and 1 are unchanged: they are written verdicts, not probabilities."""
    if bias == 0.0:
        return p
    return np.where(p == 0.5, p, p / (p + (1.0 - p) * np.exp(bias)))


def _mean_win(theta: Tensor) -> Tensor:
    """Mean P(i beats j) [P, G] over the other members with a strength; ½ if there are none."""
    there = ~theta.isnan()
    p = torch.sigmoid(theta[:, :, None] - theta[:, None, :]).nan_to_num(0.0)
    others = there.sum(1, keepdim=True) - 1
    mean = torch.where(others > 0, (p.sum(2) - 0.5) / others.clamp(min=1), 0.5)
    return torch.where(there, mean, torch.nan)


def position_bias(groups: Sequence[Sequence[Judged]]) -> float:
    """Mean of (logit P(i, j) + logit P(j, i)) / 2 over pairs judged in both orders; NaN if there are none."""
    pairs = []
    for group in groups:
        p = {(i, j): min(max(v, 1e-6), 1.0 - 1e-6) for i, j, v in group if v is not None}
        pairs += [(p[i, j], p[j, i]) for i, j in p if i < j and (j, i) in p]
    odds = np.array(pairs)
    return float(np.log(odds / (1.0 - odds)).mean()) if pairs else float("nan")
