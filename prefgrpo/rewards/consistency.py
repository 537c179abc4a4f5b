"""One-token Yes/No questions: P = P(Yes) / (P(Yes) + P(No)), by default summed over all spellings of each word.

    consistency_score        mean of P over all pairs of a grid's cells, then over criteria, then over dimensions
    consistency_for_editing  sqrt(P(consistent with the source) · P(instruction carried out))

Source: PaCo-RL (arXiv 2512.04784). Invariant: if there is no pair, or a question was answered for no pair, the score
is missing, never 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from prefgrpo.data.media import Media
from prefgrpo.judge.template import Template
from prefgrpo.judge.verdict import Answer
from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.grid import require_grid, split, sub_prompts
from prefgrpo.rewards.vlm import VlmReward


@dataclass(eq=False)
class YesNo(VlmReward):
    """A reward computed from P(Yes).

    spellings: all counts " yes", "YES" … as Yes, if the template does; exact counts only the labels, as in PaCo-RL.
    """

    spellings: str = "all"

    def __post_init__(self) -> None:
        if self.spellings not in ("all", "exact"):
            raise RewardError(f"spellings must be all or exact, got '{self.spellings}'")
        super().__post_init__()

    def load(self, name: str, needs: tuple[str, ...] | None = None) -> Template:
        """As in VlmReward, but with exact labels only if `spellings` is exact."""
        question = super().load(name, needs)
        return replace(question, variants=None) if self.spellings == "exact" else question

    async def probabilities(self, sample: Sample, *questions: Template, **values: str) -> list[float]:
        """P(Yes) of each question about a sample; ValueError with the reason if one is missing."""
        return [a.value for a in await self.answers(sample, *questions, **values) if a.value is not None]


class ConsistencyScore(YesNo):
    """Whether the cells of a generated grid belong together, 0 … 1. `meta["criteria"]`: {dimension: {name: text}}.

    Criteria are used if the template contains {criterion} (template: consistency_criterion), and asked concurrently.
    Parts: one mean per dimension.
    """

    template = "consistency"
    reads = ("grid", "criteria")
    needs = ("media_1", "media_2")
    may = ("prompt", "criterion")

    async def _judge(self, sample: Sample) -> Score:
        cells = split(sample.media, *require_grid(sample.prompt, sample.meta))
        wanted = criteria(sample.meta) if "{criterion}" in self.question.pieces else {"": [""]}
        texts = list(dict.fromkeys(text for group in wanted.values() for text in group))
        answers = await asyncio.gather(*(self._ask_pairs(sample, cells, text) for text in texts))
        rates = {text: _mean_answered(of_text) for text, of_text in zip(texts, answers, strict=True)}
        parts = {name: _mean([rates[text] for text in group]) for name, group in wanted.items()}
        return Score(_mean(list(parts.values())), parts={name: value for name, value in parts.items() if name})

    async def _ask_pairs(self, sample: Sample, cells: Sequence[Media], criterion: str) -> list[Answer]:
        """The answers about all pairs of cells."""
        texts = {"prompt": sub_prompts(sample.prompt)[0], "criterion": criterion}
        return await asyncio.gather(*(self.ask(self.question, sample, p, **texts) for p in combinations(cells, 2)))


@dataclass(eq=False)
class ConsistencyForEditing(YesNo):
    """Whether the edit follows the instruction and leaves the rest unchanged, 0 … 1.

    following_template: template that asks whether the instruction was carried out; `template` asks whether the rest is
    consistent with the source.
    """

    template = "edit_consistency"
    needs = ("source", "media_1")
    may = ("prompt",)
    needs_source = True
    following_template: str = "edit_done"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.following = self.load(self.following_template, ("prompt", "source", "media_1"))

    async def _judge(self, sample: Sample) -> Score:
        same, done = await self.probabilities(sample, self.question, self.following)
        return Score(math.sqrt(same * done), parts={"consistency": same, "following": done})


def criteria(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """{dimension: texts} of `meta["criteria"]`: {dimension: {name: text} | [text] | text}. ValueError otherwise."""
    given = meta.get("criteria")
    texts_of: dict[str, list[str]] = {}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        texts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        if texts and all(isinstance(t, str) and t.strip() for t in texts):
            texts_of[str(name)] = texts
    if not isinstance(given, Mapping) or not texts_of or len(texts_of) < len(given):
        raise ValueError(f"column 'criteria': expected {{dimension: {{name: text}}}}, got {str(given)[:80]}")
    return texts_of


def _mean_answered(answers: Sequence[Answer]) -> float:
    """Mean over the pairs with an answer; ValueError with a reason if there is none."""
    values = [a.value for a in answers if a.value is not None]
    if not values:
        raise ValueError(answers[0].reason)
    return _mean(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
