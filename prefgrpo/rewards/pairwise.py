"""A vision-language judge compares the members of a group in pairs; the reward is the win rate.

    r_i = Σ_j W_ij / n_i over the comparisons of i with a verdict, or its Bradley-Terry estimate (judge/rate.py)
    unifiedreward_flex            (w_o · r_i + w_c · Σ_d w_d r_id / Σ_d w_d) / (w_o + w_c)

r_id: win rate of member i in category d; the sums run over the categories in which it was compared. The rewards
differ in their templates: `vlm_pairwise` asks for one token, `unifiedreward_think` for a verdict inside
<answer>…</answer>, `unifiedreward_edit_pairwise` for "Edited image k is better", with the source image in the request.

`soft`: W holds the judge's probabilities. `hard`: each verdict is rounded to {0, ½, 1} and the two orders of a pair
are averaged, so that contradictory verdicts give ½. Invariant: a failed comparison is ignored for both members, a
member without any verdict is missing, and values do not depend on the order in which members or answers arrive.
Sources: UnifiedReward-Think (arXiv 2505.03318), UnifiedReward-Flex, Pref-GRPO (arXiv 2508.20751).
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefgrpo.judge.plans import Judged, get_plan
from prefgrpo.judge.rate import Rate, Rating, VerdictKind, rate_groups
from prefgrpo.judge.verdict import Pair, PairJudge, Verdict
from prefgrpo.rewards.base import Comparison, GroupScores, GroupwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.judges import open_judge
from prefgrpo.rewards.request_stats import DEADLINE_PASSED, RequestStats

CATEGORIES = 3
"""Only the first categories of an answer are used, because the judge may add one of its own after them."""
_LABEL = re.compile(r"^\s*(?:category\s+)?(?:[a-z]|\d+)\s*[.):]\s*", re.I)


@dataclass(eq=False)
class VlmPairwise(GroupwiseReward):
    """Win rate under a pairwise judge.

    judge: an open judge, its config, or a mapping of the config's fields with `backend: http | local`. plan: which
    pairs are compared. verdict: soft or hard, see above. rate: win_rate, or bradley_terry for plans that do not compare
    every pair.
    """

    takes = ("image", "video")
    judged = True
    template = "compare"
    judge: Any
    plan: str = "both_orders"
    verdict: VerdictKind = "soft"
    rate: Rate = "win_rate"

    def __post_init__(self) -> None:
        self.rating = Rating(self.rate, self.verdict)
        self.plan_pairs = get_plan(self.plan)
        self._owned = not isinstance(self.judge, PairJudge)
        self.judge = open_judge(self.judge, self.template) if self._owned else self.judge
        if not self.judge.clips:
            self.takes = ("image",)  # type: ignore[assignment]
        self.streams, self.answer_s = self.judge.streams, self.judge.answer_s

    @property
    def is_win_rate(self) -> bool:
        """Whether the scores are the win rates of wins and counts."""
        return self.rate == "win_rate"

    def check(self, group_size: int) -> None:
        """Raise ValueError for a plan that does not fit the group size."""
        self.plan_pairs(group_size, 0)

    def score_group(self, group: list[Sample], seed: int) -> GroupScores:
        """Judge the whole group now and wait for the answers."""
        pairs = self.plan_pairs(len(group), seed)
        verdicts = self.judge.judge_group(group[0].prompt, [s.media for s in group], pairs, group[0].source)
        comparisons = [Comparison(i, j, v) for (i, j), v in zip(pairs, verdicts, strict=True)]
        return self.tally(len(group), comparisons)

    def tally(self, size: int, comparisons: list[Comparison]) -> GroupScores:
        """Wins and counts [G, G], and every member's rate, from a group's comparisons."""
        rated, reasons = rate_groups(size, [judged(comparisons)], self.rating), _reasons(size, comparisons)
        scores = [Score(None, reasons[i]) if np.isnan(r) else Score(r) for i, r in enumerate(rated.values[0].tolist())]
        return GroupScores(scores, rated.wins[0], rated.counts[0], comparisons)

    def session(self, size: int, seed: int, stats: RequestStats) -> PairSession:
        """Start judging a group of `size` members that arrive one by one (streaming judges only)."""
        return PairSession(self, size, seed, stats)

    def close(self) -> None:
        """Close the judge if this reward opened it."""
        if self._owned:
            self.judge.close()


class UnifiedRewardThink(VlmPairwise):
    """Win rate under UnifiedReward-Think."""

    template = "think"


class UnifiedRewardEditPairwise(VlmPairwise):
    """Win rate of edits under UnifiedReward-Edit."""

    takes = ("image",)  # type: ignore[assignment]
    template = "edit_pairwise"
    needs_source = True


@dataclass(eq=False)
class UnifiedRewardFlex(VlmPairwise):
    """Weighted mean of the overall win rate and the win rates in the judge's categories.

    overall_weight: w_o of the overall win rate. category_weight: w_c of the categories' mean. category_weights: w_d in
    order of first appearance; 1 for categories beyond the list. normalise_parts: normalise the overall rate and the
    categories' mean separately over the group and average the advantages (Pref-GRPO's `--apply_gdpo`), not the rates.
    """

    template = "flex"
    overall_weight: float = 0.3
    category_weight: float = 0.7
    category_weights: Sequence[float] = (1.0, 0.7, 0.7)
    normalise_parts: bool = False

    def __post_init__(self) -> None:
        weights = (self.overall_weight, self.category_weight, *self.category_weights)
        if not all(0 <= w < float("inf") for w in weights) or not self.overall_weight + self.category_weight > 0:
            raise RewardError(
                "overall_weight, category_weight and category_weights must be at least 0, and one of the first two "
                f"positive; got {self.overall_weight}, {self.category_weight}, {list(self.category_weights)}"
            )
        super().__post_init__()
        if self.normalise_parts:
            if not self.overall_weight:
                raise RewardError("normalise_parts needs an overall_weight above 0, for members without categories")
            self.part_weights = {"overall": self.overall_weight, "categories": self.category_weight}

    @property
    def is_win_rate(self) -> bool:
        """False: the scores combine several win rates."""
        return False

    def tally(self, size: int, comparisons: list[Comparison]) -> GroupScores:
        """Combined scores; parts: `overall`, `categories` and the rate in each category by name."""
        overall = super().tally(size, comparisons)
        games, parts = judged(comparisons), [_categories(c.verdict.parts) for c in comparisons]
        rates = {}
        for name in dict.fromkeys(name for p in parts for name in p):
            answered = [(i, j, None if v is None else p.get(name)) for (i, j, v), p in zip(games, parts, strict=True)]
            rates[name] = rate_groups(size, [answered], self.rating).values[0].tolist()
        scores = [self._blend(s, {n: r[i] for n, r in rates.items()}) for i, s in enumerate(overall.scores)]
        return replace(overall, scores=scores)

    def _blend(self, overall: Score, rates: dict[str, float]) -> Score:
        if overall.value is None:
            return overall
        weights = dict(zip(rates, [*self.category_weights, *[1.0] * len(rates)], strict=False))
        known = {name: rate for name, rate in rates.items() if not np.isnan(rate)}
        total = sum(weights[name] for name in known)
        parts = {"overall": overall.value} | {f"category/{name}": rate for name, rate in known.items()}
        if not known or not self.category_weight:
            return Score(overall.value, parts=parts)
        mean = sum(weights[n] * r for n, r in known.items()) / total if total else sum(known.values()) / len(known)
        blend = self.overall_weight * overall.value + self.category_weight * mean
        return Score(blend / (self.overall_weight + self.category_weight), parts=parts | {"categories": mean})


class PairSession:
    """Judges one group: a pair is sent as soon as both members exist."""

    def __init__(self, reward: VlmPairwise, size: int, seed: int, stats: RequestStats) -> None:
        self.reward = reward
        self.size = size
        self._stats = stats
        self.pairs = reward.plan_pairs(size, seed)
        self._members: dict[int, Sample] = {}
        self._answers: dict[Pair, Future[Verdict]] = {}

    def add(self, member: int, sample: Sample) -> None:
        """Add member `member` and send its pairs with members that already exist. Does not block."""
        self._members[member] = sample
        for pair in self.pairs:
            if member in pair and pair[0] in self._members and pair[1] in self._members:
                self._send(pair)

    def result(self, deadline: float) -> GroupScores:
        """Wait for all answers until `deadline` (`time.monotonic()`); verdicts not available by then are missing."""
        comparisons = [Comparison(*pair, self._answer(pair, deadline)) for pair in self.pairs]
        return self.reward.tally(self.size, comparisons)

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for answer in list(self._answers.values()):
            answer.cancel()

    def _send(self, pair: Pair) -> None:
        first, second = (self._members[m] for m in pair)
        self._stats.sent()
        answer = self.reward.judge.submit(first.prompt, first.media, second.media, first.source)
        self._answers[pair] = answer
        answer.add_done_callback(self._answered)

    def _answered(self, answer: Future[Verdict]) -> None:
        """Callback for an answered or cancelled request (on any thread)."""
        self._stats.done(None if answer.cancelled() else answer.result().latency_s)

    def _answer(self, pair: Pair, deadline: float) -> Verdict:
        if pair not in self._answers:
            return Verdict(None, "one image of the pair was not generated")
        try:
            return self._answers[pair].result(max(deadline - time.monotonic(), 0.0))
        except (FutureTimeout, CancelledError):
            self.cancel()
            return Verdict(None, DEADLINE_PASSED)


def judged(comparisons: list[Comparison]) -> list[Judged]:
    """Comparisons in the form that plans and rates use."""
    return [(c.first, c.second, c.verdict.first) for c in comparisons]


def _reasons(size: int, comparisons: list[Comparison]) -> list[str]:
    """For each member, the most common reason why its comparisons failed."""
    seen: list[Counter[str]] = [Counter() for _ in range(size)]
    for c in comparisons:
        for member in (c.first, c.second):
            if c.verdict.first is None:
                seen[member][c.verdict.reason] += 1
    return [s.most_common(1)[0][0] if s else "the plan has no pair with this member" for s in seen]


def _categories(parts: dict[str, float]) -> dict[str, float]:
    """The first CATEGORIES categories of an answer, with names lower-cased and without numbering."""
    scores: dict[str, float] = {}
    for name, value in list(parts.items())[:CATEGORIES]:
        scores.setdefault(" ".join(_LABEL.sub("", name).split()).casefold() or "category", value)
    return scores
