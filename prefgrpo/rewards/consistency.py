"""One-token Yes/No questions: P = P(Yes) / (P(Yes) + P(No)), by default summed over all spellings of each word.

    consistency_score        mean of P over all pairs of a grid's cells, then over criteria, then over dimensions
    consistency_for_editing  sqrt(P(consistent with the source) · P(instruction carried out))

Source: PaCo-RL (arXiv 2512.04784). Invariant: if there is no pair, or a question was answered for no pair, the score
is missing, never 0.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.template import Template
from prefgrpo.rewards.base import Sample, read_column
from prefgrpo.rewards.simple import grid_of, split, sub_prompts
from prefgrpo.rewards.vlm import VlmReward

_TEXTS = Annotated[dict[str, str], Field(min_length=1)]
_CRITERIA: TypeAdapter[dict[str, dict[str, str]]] = TypeAdapter(Annotated[dict[str, _TEXTS], Field(min_length=1)])


@dataclass(eq=False)
class YesNo(VlmReward):
    """A reward from P(Yes). spellings: all counts " yes", "YES" … as Yes, if the template does; exact: as PaCo-RL."""

    spellings: Literal["all", "exact"] = "all"

    def load(self, name: str, needs: tuple[str, ...] | None = None) -> Template:
        """As in VlmReward, but with exact labels only if `spellings` is exact."""
        question = super().load(name, needs)
        return replace(question, variants=None) if self.spellings == "exact" else question


class ConsistencyScore(YesNo):
    """Whether the cells of a generated grid belong together, 0 … 1. `meta["criteria"]`: {dimension: {name: text}}.

    P(Yes) that two cells are consistent, averaged over pairs, criteria and dimensions (PaCo-RL, arXiv 2512.04784).
    Criteria are used if the template contains {criterion} (template: consistency_criterion), and asked concurrently.
    Parts: one mean per dimension.
    """

    template = "consistency"
    reads = ("grid", "criteria")
    needs = ("media_1", "media_2")
    may = ("prompt", "criterion")

    async def ask_one(self, *samples: Sample) -> Answer:
        """The mean over dimensions of criteria of pairs of cells."""
        (sample,) = samples
        wanted = {"": {"": ""}}
        if "{criterion}" in self.question.pieces:
            wanted = read_column(sample.meta, "criteria", _CRITERIA, "{dimension: {name: text}}")
        texts = list(dict.fromkeys(text for of_dimension in wanted.values() for text in of_dimension.values()))
        cells = split(sample.media, *grid_of(sample.prompt, sample.meta))  # once: all criteria share them
        answers = await asyncio.gather(*(self._mean(sample, cells, text) for text in texts))
        means = dict(zip(texts, answers, strict=True))
        parts = {name: fmean(means[text] for text in of_dimension.values()) for name, of_dimension in wanted.items()}
        return Answer(fmean(parts.values()), parts={name: value for name, value in parts.items() if name})

    async def _mean(self, sample: Sample, cells: list[Media], criterion: str) -> float:
        """Mean of P(Yes) over the pairs of cells with an answer; ValueError with a reason if there is none."""
        texts = {"prompt": sub_prompts(sample.prompt)[0], "criterion": criterion}
        pairs = list(combinations(cells, 2))
        answers = await asyncio.gather(*(self.answer_to(self.question, sample, pair, **texts) for pair in pairs))
        values = [answer.value for answer in answers if answer.value is not None]
        if not values:
            raise ValueError(answers[0].reason)
        return fmean(values)


class ConsistencyForEditing(YesNo):
    """Whether the edit follows the instruction (asked with edit_done) and changes nothing else (`template`), 0 … 1.

    sqrt(P(the rest is unchanged) · P(the instruction is followed)). Source: PaCo-RL (arXiv 2512.04784).
    """

    template = "edit_consistency"
    needs = ("source", "media_1")
    may = ("prompt",)
    needs_source = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.following = self.load("edit_done", ("prompt", "source", "media_1"))

    async def ask_one(self, *samples: Sample) -> Answer:
        """The geometric mean of the two probabilities."""
        answers = await self.answers_to(samples[0], self.question, self.following)
        same, done = [answer.value for answer in answers if answer.value is not None]
        return Answer(math.sqrt(same * done), parts={"consistency": same, "following": done})
