"""UnifiedReward's judges of pairs: they reason in words, and the reward is the win rate.

    unifiedreward_think           verdict inside <answer>…</answer>
    unifiedreward_edit_pairwise   "Edited image k is better", with the source image in the request
    unifiedreward_flex            (w_o · overall + w_c · Σ_d w_d rate_d / Σ_d w_d) / (w_o + w_c)

rate_d: win rate of the comparisons under category d, over the categories in which the member was compared. Images
and clips (8 even frames). Sources: UnifiedReward-Think (arXiv 2505.03318), UnifiedReward-Flex, Pref-GRPO (arXiv
2508.20751). Invariant: a member's missing categories do not count, and its missing win rate stays missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefgrpo.rewards.base import Comparison, GroupScores, RewardError, Score
from prefgrpo.rewards.pairwise import VlmPairwise, tally

CATEGORIES = 3
"""Categories of an answer that count: the judge may add one of its own after them."""
_LABEL = re.compile(r"^\s*(?:category\s+)?(?:[a-z]|\d+)\s*[.):]\s*", re.I)


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
    """Overall win rate blended with the win rates of the judge's categories.

    overall_weight: w_o, of the overall win rate. category_weight: w_c, of the categories' mean. category_weights: w_d
    by order of first appearance; 1 for categories beyond the list. normalise_parts: normalise the overall rate and the
    categories' mean each over the group, and blend the advantages (Pref-GRPO with `--apply_gdpo`), not the rates.
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

    def tally(self, size: int, comparisons: list[Comparison]) -> GroupScores:
        """Blended scores; parts: `overall`, `categories` and the rate in each category by name."""
        overall = super().tally(size, comparisons)
        parts = [_categories(c.verdict.parts) for c in comparisons]
        names = list(dict.fromkeys(name for p in parts for name in p))
        rates = {}
        for name in names:
            comparisons = [
                Comparison(
                    c.first, c.second, replace(c.verdict, value=None if c.verdict.first is None else p.get(name))
                )
                for c, p in zip(comparisons, parts, strict=True)
            ]
            rates[name] = [s.value for s in tally(size, comparisons, self.rating).scores]
        scores = [self._blend(s, {n: rates[n][i] for n in names}) for i, s in enumerate(overall.scores)]
        return replace(overall, scores=scores)

    def _blend(self, overall: Score, rates: dict[str, float | None]) -> Score:
        if overall.value is None:
            return overall
        weights = dict(zip(rates, [*self.category_weights, *[1.0] * len(rates)], strict=False))
        known = {name: rate for name, rate in rates.items() if rate is not None}
        total = sum(weights[name] for name in known)
        parts = {"overall": overall.value} | {f"category/{name}": rate for name, rate in known.items()}
        if not known or not self.category_weight:
            return Score(overall.value, parts=parts)
        mean = sum(weights[n] * r for n, r in known.items()) / total if total else sum(known.values()) / len(known)
        blend = self.overall_weight * overall.value + self.category_weight * mean
        return Score(blend / (self.overall_weight + self.category_weight), parts=parts | {"categories": mean})


def _categories(parts: dict[str, float]) -> dict[str, float]:
    """The first CATEGORIES of an answer, names without numbering and case."""
    scores: dict[str, float] = {}
    for name, value in list(parts.items())[:CATEGORIES]:
        scores.setdefault(" ".join(_LABEL.sub("", name).split()).casefold() or "category", value)
    return scores
