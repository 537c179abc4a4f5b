"""A vision-language judge compares the members of a group in pairs; the reward is the win rate.

    r_i = Σ_j W_ij / n_i over the comparisons of i with a verdict, or its Bradley-Terry estimate (judge/pairs.py)
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
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from prefgrpo.config.loading import section
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.pairs import Floats, Rate, VerdictKind, get_plan, rate_groups, verdict_table
from prefgrpo.judge.template import Shown
from prefgrpo.judge.verdict import Pair, PairJudge, Verdict
from prefgrpo.rewards.base import Reward, RewardError, Sample, Score

_LABEL = re.compile(r"^\s*(?:category\s+)?(?:[a-z]|\d+)\s*[.):]\s*", re.I)


@dataclass(eq=False)
class VlmPairwise(Reward):
    """Win rate under a pairwise judge.

    judge: an open judge, its config, or a mapping of the config's fields. template: name of a shipped template or path
    of a YAML file; empty: the class's own. plan: which pairs are compared: both_orders, round_robin or k_regular(n).
    verdict: soft or hard, see above. rate: win_rate, or bradley_terry for plans that do not compare every pair. frames,
    max_pixels: of a clip, and of an image or frame, that the judge sees; default: the template's (8 and 2048²).
    """

    takes = ("image", "video")
    judged = True
    judge: Any
    template: str = ""
    plan: str = "both_orders"
    verdict: VerdictKind = "soft"
    rate: Rate = "win_rate"
    frames: PositiveInt | None = None
    max_pixels: PositiveInt | None = None

    def __post_init__(self) -> None:
        self.question = self.template or type(self).template or "compare"
        self.plan_pairs = get_plan(self.plan)
        if not isinstance(self.judge, PairJudge):
            from prefgrpo.judge.check import check, open_judge  # imports aiohttp

            config = self.judge if isinstance(self.judge, JudgeConfig) else section(JudgeConfig, self.judge, "judge")
            self.judge = open_judge(config, self.question, shown=Shown(self.frames, self.max_pixels))
            check(self.judge)
        if not self.judge.clips:
            self.takes = ("image",)  # type: ignore[assignment]
        self.streams = self.judge.streams
        self.answer_s = self.judge.answer_s

    @property
    def is_win_rate(self) -> bool:
        """Whether the scores are the win rates of wins and counts."""
        return self.rate == "win_rate"

    def score(self, group: Sequence[Sample], seed: int = 0) -> list[Score]:
        """Judge a whole group now. seed: of the pair plan."""
        pairs = self.plan_pairs(len(group), seed)
        return self.tally(len(group), self.judge_pairs(dict(enumerate(group)), pairs))[0]

    def judge_pairs(self, members: Mapping[int, Sample], pairs: Sequence[Pair]) -> dict[Pair, Verdict]:
        """The verdicts on these pairs of a group's members, now."""
        samples = [members[m] for m in sorted(members)]
        place = {m: k for k, m in enumerate(sorted(members))}
        media = [sample.media for sample in samples]
        places = [(place[i], place[j]) for i, j in pairs]
        verdicts = self.judge.judge_group(samples[0].prompt, media, places, samples[0].source) if pairs else []
        return dict(zip(pairs, verdicts, strict=True))

    def submit(self, first: Sample, second: Sample) -> Future[Verdict]:
        """Send one pair without waiting (streaming judges only)."""
        answer: Future[Verdict] = self.judge.submit(first.prompt, first.media, second.media, first.source)
        return answer

    def tally(self, size: int, verdicts: Mapping[Pair, Verdict]) -> tuple[list[Score], Floats, Floats]:
        """(scores, wins [G, G], counts [G, G]) of a group of G = `size` from the verdicts on its pairs."""
        p = verdict_table(size, ((i, j, v.first) for (i, j), v in verdicts.items()))
        rates, wins, counts = rate_groups(p[None], self.rate, self.verdict)
        reasons = _reasons(size, verdicts)
        scores = [Score(None, reasons[i]) if np.isnan(r) else Score(r) for i, r in enumerate(rates[0].tolist())]
        return scores, wins[0], counts[0]


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
    overall_weight: NonNegativeFloat = 0.3
    category_weight: NonNegativeFloat = 0.7
    category_weights: Sequence[NonNegativeFloat] = (1.0, 0.7, 0.7)
    normalise_parts: bool = False

    def __post_init__(self) -> None:
        if not self.overall_weight + self.category_weight > 0:
            raise RewardError("overall_weight or category_weight must be above 0")
        super().__post_init__()
        if self.normalise_parts:
            if not self.overall_weight:
                raise RewardError("normalise_parts needs an overall_weight above 0, for members without categories")
            self.part_weights = {"overall": self.overall_weight, "categories": self.category_weight}

    @property
    def is_win_rate(self) -> bool:
        """False: the scores combine several win rates."""
        return False

    def tally(self, size: int, verdicts: Mapping[Pair, Verdict]) -> tuple[list[Score], Floats, Floats]:
        """As VlmPairwise, with combined scores; parts: `overall`, `categories`, and each category's rate by name."""
        overall, wins, counts = super().tally(size, verdicts)
        parts = {pair: _categories(v.parts) for pair, v in verdicts.items() if v.first is not None}
        names = list(dict.fromkeys(name for of_pair in parts.values() for name in of_pair))
        rates: dict[str, list[float]] = {}
        if names:
            tables = [verdict_table(size, ((i, j, of_pair.get(n)) for (i, j), of_pair in parts.items())) for n in names]
            found, _, _ = rate_groups(np.stack(tables), self.rate, self.verdict)
            rates = dict(zip(names, found.tolist(), strict=True))
        scores = [self._blend(s, {n: r[i] for n, r in rates.items()}) for i, s in enumerate(overall)]
        return scores, wins, counts

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


def _reasons(size: int, verdicts: Mapping[Pair, Verdict]) -> list[str]:
    """For each member, the most common reason why its comparisons failed."""
    seen: list[Counter[str]] = [Counter() for _ in range(size)]
    for pair, verdict in verdicts.items():
        for member in pair:
            if verdict.first is None:
                seen[member][verdict.reason] += 1
    return [s.most_common(1)[0][0] if s else "the plan has no pair with this member" for s in seen]


def _categories(parts: dict[str, float]) -> dict[str, float]:
    """The categories of an answer, with names lower-cased and without numbering."""
    scores: dict[str, float] = {}
    for name, value in parts.items():
        scores.setdefault(" ".join(_LABEL.sub("", name).split()).casefold() or "category", value)
    return scores
