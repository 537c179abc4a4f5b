"""Which ordered pairs of a group are judged, and one number in [0, 1] per member from their verdicts p [P, G, G].

    p[group, i, j]  P(i beats j) of the pair shown in this order; NaN: not compared, or no verdict
    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with a verdict
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j) = σ(θ_i − θ_j)   (Hunter 2004)

A plan is a function (group size, seed) -> [(first shown, second shown), …], and depends on nothing else. The order
within pairs is balanced, so that a judge's position bias favours no member: each is as often first as second, ±1.
θ maximises the likelihood under a prior worth PRIOR drawn games of every member against θ = 0. Invariant: a missing
verdict has no effect, a member without any verdict is NaN, and the strength of an undefeated member stays finite.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.recipe import did_you_mean
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media

Pair = tuple[int, int]
"""(first shown, second shown): indices into a group."""
Plan = Callable[[int, int], list[Pair]]
Floats = NDArray[np.float64]
Rate = Literal["win_rate", "bradley_terry"]
VerdictKind = Literal["soft", "hard"]
PRIOR = 0.3
"""Drawn games of every member against an average one."""
_MAX_NEWTON_STEPS = 200
"""Sparse groups of 24 with one-sided results need about 20."""
_TOLERANCE = 1e-10


class PairJudge(ABC):
    """A backend that compares pairs of media for a prompt."""

    streams: bool
    """True: pairs may be sent one by one with `submit`, which does not block; False: whole groups, synchronously."""
    clips: bool = False
    """Whether it accepts videos."""
    answer_s: float = 0.0
    """Timeout of one answer in seconds; 0: none."""

    @abstractmethod
    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Answer]:
        """Verdicts for ordered pairs of one prompt's media, in order; never raises for a single failed pair.

        source: the source images if the media are edits.
        """


def _in_arrival_order(pairs: list[Pair]) -> list[Pair]:
    """Sort pairs by their later member, because members usually arrive in order."""
    return sorted(pairs, key=lambda p: (max(p), min(p), p[0]))


def rings(size: int, seed: int, shuffled: bool = True) -> list[list[Pair]]:
    """Every pair once, as rings: ring d pairs each seat of a circle with the d-th seat after it; each is first once.

    shuffled: False seats members in order, so that neighbours meet and can be judged while others are generated.
    For even sizes the last ring pairs opposite seats, and a random bit per pair decides which is first.
    """
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist() if shuffled else list(range(size))
    coins = rng.integers(0, 2, size // 2)
    found = [[(seats[a], seats[(a + d) % size]) for a in range(size)] for d in range(1, (size - 1) // 2 + 1)]
    if size % 2 == 0:
        half = size // 2
        found.append([(seats[a + half * int(c)], seats[a + half * (1 - int(c))]) for a, c in enumerate(coins)])
    return found


def round_robin(size: int, seed: int) -> list[Pair]:
    """Every pair once, G(G − 1)/2 verdicts; the order is random, balanced per member."""
    return _in_arrival_order([p for ring in rings(size, seed) for p in ring])


def both_orders(size: int, seed: int) -> list[Pair]:
    """Every pair twice, once in each order, G(G − 1) verdicts: the position bias cancels in the mean."""
    del seed  # unused; all plans share one signature
    return _in_arrival_order([(i, j) for i in range(size) for j in range(size) if i != j])


def k_regular(size: int, seed: int, n: int = 4) -> list[Pair]:
    """Every member in n pairs, n·G/2 verdicts, connected for n >= 2. ValueError unless 1 <= n < G and n·G is even."""
    if not 1 <= n < size or n * size % 2:
        raise ValueError(f"k_regular({n}) needs 1 <= k < G and k·G even, got G = {size}")
    circle = rings(size, seed, shuffled=False)
    chosen = circle[: n // 2]
    if n % 2:
        chosen.append(circle[-1])
    return _in_arrival_order([p for ring in chosen for p in ring])


PLANS: dict[str, Callable[..., list[Pair]]] = {plan.__name__: plan for plan in (round_robin, both_orders, k_regular)}


def get_plan(name: str) -> Plan:
    """Plan by name: 'round_robin', 'both_orders' or 'k_regular(n)' (k_regular: n = 4); ValueError if unknown."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*", name)
    base, number = (match[1], match[2]) if match else (name, None)
    if base not in PLANS or (number and base != "k_regular"):
        known = "expected one of round_robin, both_orders, k_regular(n)"
        raise ValueError(f"unknown pair plan '{name}'{did_you_mean(base, PLANS)}: {known}")
    return partial(k_regular, n=int(number)) if number else PLANS[base]


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
