"""Pointwise scores in words from a judge: UnifiedReward's three axes, its version 1.5, and any Qwen-VL.

    unifiedreward_alignment / _coherence / _style   one axis each, 1 … 5; one request serves all of them
    unifiedreward_sglang, qwenvl                    N / 5

Sources: UnifiedReward (arXiv 2503.05236), Flow-GRPO (arXiv 2505.05470). Invariant: an axis that the answer does not
state is missing, whatever the other axes or samples are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.vlm import VlmReward, missing, weighted


class UnifiedRewardAlignment(VlmReward):
    """How much of the caption the image shows, 1 … 5; the other axes are parts."""

    template = "unifiedreward"
    kinds = ("scores",)
    axis: ClassVar[str] = "alignment"

    def __init__(self, judge: Any, template: str = "") -> None:
        """As VlmReward; RewardError for a template that does not ask for the axis.

        Args:
            judge: An open judge or client, a JudgeConfig, or a mapping of its fields.
            template: Shipped name or path; empty: the one that `judge` names, else the reward's own.
        """
        super().__init__(judge, template)
        asked = [name.lower() for name, *_ in self.question.scores]
        if self.axis not in asked:
            raise RewardError(
                f"template '{self.question.name}' must ask for the score '{self.axis}', it asks for {asked}"
            )

    async def judge_sample(self, sample: Sample) -> Score:
        """The axis, if the answer states it."""
        answer = await self.ask(self.question, sample)
        parts = {name.lower(): value for name, value in answer.parts.items()}
        return missing(answer) or weighted(parts, {self.axis: 1.0})


class UnifiedRewardCoherence(UnifiedRewardAlignment):
    """How well the picture holds together, 1 … 5."""

    axis = "coherence"


class UnifiedRewardStyle(UnifiedRewardAlignment):
    """How pleasing the picture is, 1 … 5."""

    axis = "style"


class UnifiedRewardSglang(VlmReward):
    """UnifiedReward 1.5 behind SGLang: "Final Score: N", N / 5."""

    template = "unifiedreward_sglang"
    kinds = ("scores",)

    async def judge_sample(self, sample: Sample) -> Score:
        """The template's one number, as a share of its highest."""
        answer = await self.ask(self.question, sample)
        name, _, high = self.question.scores[0]
        return missing(answer) or Score(answer.parts[name] / high)


class QwenVl(UnifiedRewardSglang):
    """Quality by an instruction-tuned Qwen-VL: <Score>N</Score>, N / 5."""

    template = "qwenvl"
    needs = ("media_1",)
    may = ("prompt",)
