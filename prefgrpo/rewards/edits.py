"""Edits rated one by one, as 0 … 25 scores in JSON: UnifiedReward-Edit's two questions and EditScore's blend of them.

    _image_quality          Σ w·s / Σ w over naturalness and artifacts         (the result alone)
    _instruction_following  Σ w·s / Σ w over success and overediting           (the result beside its source)
    edit_score              sqrt(mean(success, overediting) · mean(naturalness, artifacts)) / 25, or of the minima

Higher is better for every number (overediting 25: nothing else was touched). Sources: UnifiedReward-Edit, EditScore
(arXiv 2509.23909). Invariant: a number that cannot be read makes the score missing, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.vlm import VlmReward, both, missing, weighted, weights_of

Markers = tuple[str, ...]
_RESULT: Markers = ("media_1",)
_BOTH: Markers = ("prompt", "source", "media_1")
_MORE: Markers = ("prompt", "source")


class EditImageQuality(VlmReward):
    """The edited image as a picture, 0 … 25."""

    template = "edit_quality"
    needs = _RESULT
    may = _MORE
    kinds = ("json",)

    def __init__(
        self,
        judge: Any,
        template: str = "",
        weights: Mapping[str, float] | None = None,
        normalise_parts: bool = False,
    ) -> None:
        """As VlmReward.

        Args:
            judge: An open judge or client, a JudgeConfig, or a mapping of its fields.
            template: Shipped name or path; empty: the one that `judge` names, else the reward's own.
            weights: Weight of each number by name; 1 each by default.
            normalise_parts: Normalise each number over the group, and weigh the advantages (Pref-GRPO) instead of the
                numbers.
        """
        super().__init__(judge, template)
        self.weights = weights_of(weights, [name for name, *_ in self.question.scores], "weights")
        if normalise_parts:
            self.part_weights = self.weights

    async def judge_sample(self, sample: Sample) -> Score:
        """The weighted mean of the answer's numbers, which are its parts."""
        answer = await self.ask(self.question, sample)
        return missing(answer) or weighted(answer.parts, self.weights)


class EditInstructionFollowing(EditImageQuality):
    """The edit against its instruction, 0 … 25."""

    template = "edit_following"
    needs = _BOTH
    needs_source = True


class EditScore(VlmReward):
    """Geometric mean of following and quality, 0 … 1."""

    template = "edit_following"
    needs = _BOTH
    may = _MORE
    kinds = ("json",)
    needs_source = True

    def __init__(
        self, judge: Any, template: str = "", quality_template: str = "edit_quality", reduce: str = "mean"
    ) -> None:
        """As VlmReward.

        Args:
            judge: An open judge or client, a JudgeConfig, or a mapping of its fields.
            template: Template that asks how well the instruction was followed.
            quality_template: Template that asks how good the picture is.
            reduce: mean of a rating's two numbers, as in PaCo-RL, or min, as EditScore's own evaluation.
        """
        if reduce not in ("mean", "min"):
            raise RewardError(f"edit_score: reduce must be mean or min, got {reduce!r}")
        super().__init__(judge, template)
        self.reduce = reduce
        self.quality = self.load(quality_template, _RESULT)

    async def judge_sample(self, sample: Sample) -> Score:
        """Both questions at once."""
        answers = await both(self.ask(self.question, sample), self.ask(self.quality, sample))
        if absent := missing(*answers):
            return absent
        means = []
        for question, answer in zip((self.question, self.quality), answers, strict=True):
            shares = [answer.parts[name] / high for name, _, high in question.scores]
            means.append(min(shares) if self.reduce == "min" else sum(shares) / len(shares))
        return Score(math.sqrt(means[0] * means[1]), parts={"following": means[0], "quality": means[1]})
