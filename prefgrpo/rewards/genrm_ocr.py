"""`genrm_ocr`: as `ocr`, with a vision-language model that reads the text.

    value = 1 − min(d, n) / n    d: Levenshtein distance of what it reads to the target, n: length of the target

Spaces and case do not count, and an image that contains the target whole has 1. Invariant: a prompt that quotes
nothing is missing; a picture in which the model reads nothing has 0.
"""

from __future__ import annotations

from typing import Any, ClassVar

from prefgrpo.rewards.base import Sample, Score
from prefgrpo.rewards.ocr import image_value, levenshtein, plain, target, unnamed
from prefgrpo.rewards.vlm import VlmReward, missing


class GenrmOcr(VlmReward):
    """How much of the quoted text the judge reads in the image, 0 to 1."""

    template = "read_text"
    needs = ("media_1",)
    kinds = ("text",)
    probe: ClassVar[dict[str, Any]] = {"prompt": 'a sign that says "A"'}

    def __init__(self, judge: Any, template: str = "") -> None:
        """As VlmReward; RewardError if rapidfuzz is not installed.

        Args:
            judge: An open judge or client, a JudgeConfig, or a mapping of its fields.
            template: Shipped name or path; empty: the one that `judge` names, else the reward's own.
        """
        self._distance = levenshtein()
        super().__init__(judge, template)

    def refuse(self, sample: Sample) -> str:
        """Also for a prompt that names no text."""
        return super().refuse(sample) or unnamed(sample)

    async def judge_sample(self, sample: Sample) -> Score:
        """What the judge reads against what the prompt quotes."""
        answer = await self.ask(self.question, sample)
        return missing(answer) or Score(image_value(target(sample), plain(answer.raw).strip("`\"'"), self._distance))
