"""Rewards that compare the samples of a group in pairs: which pairs, and from P(first is better) to win rates.

    p[group, i, j]  P(i beats j) of the pair shown in this order; NaN: not compared, or no answer
    win_rate:       r_i = Σ_j W_ij / n_i            over the comparisons of i with an answer
    bradley_terry:  r_i = mean over j ≠ i of σ(θ_i − θ_j),  P(i beats j) = σ(θ_i − θ_j)   (Hunter 2004)
    unifiedreward_flex            (w_o · r_i + w_c · Σ_d w_d r_id / Σ_d w_d) / (w_o + w_c)

A plan is a function (group size, seed) -> [(first shown, second shown), …], and depends on nothing else. The order
within pairs is balanced, so that a judge's position bias favours no member: each is as often first as second, ±1. W
holds the probabilities; with `round_verdicts`, each is rounded to {0, ½, 1} and the two orders of a pair are averaged,
so that contradictory answers give ½. θ maximises the likelihood under a prior worth PRIOR drawn games of every member
against θ = 0. r_id: win rate of member i in the judge's category d; the sums run over the categories in which it was
compared. The win rates are what is reported; where they alone are trained on, the update computes their advantages from
the same wins W and counts n (objectives/advantages.py). Invariant: a failed comparison is ignored for both members, a
member without any answer is missing, the strength of an undefeated member stays finite, and values do not depend on the
order in which members or answers arrive.
Sources: UnifiedReward-Think (arXiv 2505.03318), UnifiedReward-Flex, Pref-GRPO (arXiv 2508.20751).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from torch import Tensor

from prefgrpo.config.recipe import did_you_mean
from prefgrpo.data.answer import Answer
from prefgrpo.judge.template import Query, Shown, load_pair_templates
from prefgrpo.rewards.base import Key, Question, Reward, RewardError, Sample, Tally
from prefgrpo.rewards.vlm import Judged

Plan = Callable[[int, int], list[Key]]
Floats = NDArray[np.float64]
Rate = Literal["win_rate", "bradley_terry"]
PRIOR = 0.3
"""Drawn games of every member against an average one."""
_MAX_NEWTON_STEPS = 200
"""Sparse groups of 24 with one-sided results need about 20."""
_TOLERANCE = 1e-10
_LABEL = re.compile(r"^\s*(?:category\s+)?(?:[a-z]|\d+)\s*[.):]\s*", re.I)


def _in_arrival_order(pairs: list[Key]) -> list[Key]:
    """Sort pairs by their later member, because members usually arrive in order."""
    return sorted(pairs, key=lambda p: (max(p), min(p), p[0]))


def rings(size: int, seed: int, shuffled: bool = True) -> list[list[Key]]:
    """Every pair once, as rings: ring d pairs each seat of a circle with the d-th seat after it; each is first once.

    shuffled: False seats members in order, so that neighbours meet and can be judged while others are generated.
    For even sizes the last ring pairs opposite seats, and a random bit per pair decides which is first.
    """
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist() if shuffled else list(range(size))
    coins = rng.integers(0, 2, size // 2)
    found: list[list[Key]] = [
        [(seats[a], seats[(a + d) % size]) for a in range(size)] for d in range(1, (size - 1) // 2 + 1)
    ]
    if size % 2 == 0:
        half = size // 2
        found.append([(seats[a + half * int(c)], seats[a + half * (1 - int(c))]) for a, c in enumerate(coins)])
    return found


def round_robin(size: int, seed: int) -> list[Key]:
    """Every pair once, G(G − 1)/2 verdicts; the order is random, balanced per member."""
    return _in_arrival_order([p for ring in rings(size, seed) for p in ring])


def both_orders(size: int, seed: int) -> list[Key]:
    """Every pair twice, once in each order, G(G − 1) verdicts: the position bias cancels in the mean."""
    del seed  # unused; all plans share one signature
    return _in_arrival_order([(i, j) for i in range(size) for j in range(size) if i != j])


def k_regular(size: int, seed: int, n: int = 4) -> list[Key]:
    """Every member in n pairs, n·G/2 verdicts, connected for n >= 2. ValueError unless 1 <= n < G and n·G is even."""
    if not 1 <= n < size or n * size % 2:
        raise ValueError(f"k_regular({n}) needs 1 <= k < G and k·G even, got G = {size}")
    circle = rings(size, seed, shuffled=False)
    chosen = circle[: n // 2]
    if n % 2:
        chosen.append(circle[-1])
    return _in_arrival_order([p for ring in chosen for p in ring])


PLANS: dict[str, Callable[..., list[Key]]] = {plan.__name__: plan for plan in (round_robin, both_orders, k_regular)}


def get_plan(name: str) -> Plan:
    """Plan by name: 'round_robin', 'both_orders' or 'k_regular(n)' (k_regular: n = 4); ValueError if unknown."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*", name)
    base, number = (match[1], match[2]) if match else (name, None)
    if base not in PLANS or (number and base != "k_regular"):
        known = "expected one of round_robin, both_orders, k_regular(n)"
        raise ValueError(f"unknown pair plan '{name}'{did_you_mean(base, PLANS)}: {known}")
    return partial(k_regular, n=int(number)) if number else PLANS[base]


def rounded(answer: Answer) -> Answer:
    """P(first is better) rounded to {0, ½, 1}."""
    return answer if answer.value is None else replace(answer, value=(float(np.sign(answer.value - 0.5)) + 1) / 2)


def pair_table(size: int, values: Iterable[tuple[Key, float | None]]) -> Floats:
    """p [G, G] of a group from ((first, second), P(first) or None); each ordered pair at most once."""
    p = np.full((size, size), np.nan)
    for key, value in values:
        if value is not None:
            p[key] = value
    return p


def rate_groups(p: Floats, rate: Rate = "win_rate", round_verdicts: bool = False) -> tuple[Floats, Floats, Floats]:
    """Rate P groups of G members, from their verdicts p [P, G, G], in one batch.

    rate: the mean over a member's comparisons, or its mean win probability against the whole group under Bradley-Terry.
    round_verdicts: round each to {0, ½, 1}, and average the two orders of a pair. Returns
    (ratings [P, G] in [0, 1], NaN without a verdict; wins [P, G, G]: the summed verdicts that row beats column; counts
    [P, G, G]: the number of these verdicts).
    """
    shown = torch.from_numpy(~np.isnan(p)).double()
    first = torch.from_numpy(np.nan_to_num((np.sign(p - 0.5) + 1) / 2 if round_verdicts else p))
    wins = first + (shown - first).mT
    counts = shown + shown.mT
    if rate == "bradley_terry":
        return _mean_win(bradley_terry(wins, counts)).double().numpy(), wins.numpy(), counts.numpy()
    if round_verdicts:
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


@dataclass(eq=False)
class Compares(Reward):
    """Asks about pairs of a group's members. A subclass, or a class beside it, answers.

    plan: which pairs are compared: both_orders, round_robin or k_regular(n). round_verdicts: count a pair as won, tied
    or lost, whatever its probability. rate: win_rate, or bradley_terry for plans that do not compare every pair.
    """

    plan: str = "both_orders"
    round_verdicts: bool = False
    rate: Rate = "win_rate"

    compares = True

    def __post_init__(self) -> None:
        get_plan(self.plan)  # an unknown one is an error here
        super().__post_init__()

    @property
    def is_win_rate(self) -> bool:
        """Whether the values are the win rates of `Tally.comparisons`."""
        return self.rate == "win_rate"

    def keys(self, size: int, seed: int) -> list[Key]:
        """The plan's pairs. ValueError for a plan that does not fit the group."""
        return get_plan(self.plan)(size, seed)

    def tally(self, size: int, answers: Mapping[Key, Answer]) -> Tally:
        """Win rates from the answers about pairs."""
        p = pair_table(size, ((pair, answer.value) for pair, answer in answers.items()))
        rates, wins, counts = rate_groups(p[None], self.rate, self.round_verdicts)
        reasons = _reasons(size, answers)
        members = [Answer(None, reasons[i]) if np.isnan(r) else Answer(r) for i, r in enumerate(rates[0].tolist())]
        return Tally(members, np.stack([wins[0], counts[0]]))


@dataclass(eq=False)
class ComparesInCategories(Compares):
    """Weighted mean of the overall win rate and the win rates in the judge's categories.

    overall_weight: w_o of the overall win rate. category_weight: w_c of the categories' mean. category_weights: w_d in
    order of first appearance; 1 for categories beyond the list. normalise_parts: normalise the overall rate and the
    categories' mean separately over the group and average the advantages (Pref-GRPO's `--apply_gdpo`), not the rates.
    """

    overall_weight: NonNegativeFloat = 0.3
    category_weight: NonNegativeFloat = 0.7
    category_weights: Sequence[NonNegativeFloat] = (1.0, 0.7, 0.7)
    normalise_parts: bool = False

    def __post_init__(self) -> None:
        if not self.overall_weight + self.category_weight > 0:
            raise RewardError("overall_weight or category_weight must be above 0")
        if self.normalise_parts and not self.overall_weight:
            raise RewardError("normalise_parts needs an overall_weight above 0, for members without categories")
        super().__post_init__()
        if self.normalise_parts:
            self.part_weights = {"overall": self.overall_weight, "categories": self.category_weight}

    @property
    def is_win_rate(self) -> bool:
        """False: the values combine several win rates."""
        return False

    def tally(self, size: int, answers: Mapping[Key, Answer]) -> Tally:
        """As Compares, with combined values; parts: `overall`, `categories`, and each category's rate by name."""
        overall = super().tally(size, answers)
        parts = {pair: _categories(answer.parts) for pair, answer in answers.items() if answer.value is not None}
        names = list(dict.fromkeys(name for of_pair in parts.values() for name in of_pair))
        rates: dict[str, list[float]] = {}
        if names:
            tables = [pair_table(size, ((pair, of_pair.get(n)) for pair, of_pair in parts.items())) for n in names]
            found, _, _ = rate_groups(np.stack(tables), self.rate, self.round_verdicts)
            rates = dict(zip(names, found.tolist(), strict=True))
        members = [self._blend(s, {n: r[i] for n, r in rates.items()}) for i, s in enumerate(overall.members)]
        return replace(overall, members=members)

    def _blend(self, overall: Answer, rates: dict[str, float]) -> Answer:
        if overall.value is None:
            return overall
        weights = dict(zip(rates, [*self.category_weights, *[1.0] * len(rates)], strict=False))
        known = {name: rate for name, rate in rates.items() if not np.isnan(rate)}
        total = sum(weights[name] for name in known)
        parts = {"overall": overall.value} | {f"category/{name}": rate for name, rate in known.items()}
        if not known or not self.category_weight:
            return Answer(overall.value, parts=parts)
        mean = sum(weights[n] * r for n, r in known.items()) / total if total else sum(known.values()) / len(known)
        blend = self.overall_weight * overall.value + self.category_weight * mean
        return Answer(blend / (self.overall_weight + self.category_weight), parts=parts | {"categories": mean})


@dataclass(eq=False)
class VlmPairwise(Compares, Judged):
    """Win rate under a pairwise judge."""

    takes = ("image", "video")

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.template or type(self).template or "compare"
        self.templates = load_pair_templates(name, Shown(self.frames, self.max_pixels))
        self.judge.check(self.templates.images)
        self.answer_s = self.judge.timeout_s or max(template.timeout_s for template in self.templates)

    def _query(self, first: Sample, second: Sample) -> Query:
        return self.templates.query(first.prompt, first.media, second.media, first.source)

    async def ask_one(self, *samples: Sample) -> Answer:
        """Ask the judge which of two samples is better."""
        return await self.judge.ask(self._query(*samples))

    def ask(self, asked: list[Question]) -> list[Answer]:
        """Ask about all pairs together: a judge in this process shares work between those of a prompt."""
        return self.judge.ask_all([self._query(*samples) for samples in asked])


class UnifiedRewardThink(VlmPairwise):
    """Win rate under UnifiedReward-Think (arXiv 2505.03318), whose verdict is in `<answer>`."""

    template = "think"


class UnifiedRewardEditPairwise(VlmPairwise):
    """Win rate of edits under UnifiedReward-Edit, which sees the source images."""

    takes = ("image",)  # type: ignore[assignment]
    template = "edit_pairwise"
    needs_source = True


@dataclass(eq=False)
class UnifiedRewardFlex(ComparesInCategories, VlmPairwise):
    """Weighted mean of the overall win rate and the win rates in the categories that UnifiedReward-Flex chooses.

    Source: Pref-GRPO (arXiv 2508.20751).
    """

    template = "flex"


def _reasons(size: int, answers: Mapping[Key, Answer]) -> list[str]:
    """For each member, the most common reason why its comparisons failed."""
    seen: list[Counter[str]] = [Counter() for _ in range(size)]
    for pair, answer in answers.items():
        for member in pair:
            if answer.value is None:
                seen[member][answer.reason] += 1
    return [s.most_common(1)[0][0] if s else "the plan has no pair with this member" for s in seen]


def _categories(parts: dict[str, float]) -> dict[str, float]:
    """The categories of an answer, with names lower-cased and without numbering."""
    scores: dict[str, float] = {}
    for name, value in parts.items():
        scores.setdefault(" ".join(_LABEL.sub("", name).split()).casefold() or "category", value)
    return scores
