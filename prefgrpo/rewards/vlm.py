"""Rewards that ask a vision-language model about one sample at a time, over HTTP.

    unifiedreward_alignment / _coherence / _style    one axis each, 1 … 5; one request serves all of them
    unifiedreward_sglang, qwenvl                     N / 5
    unifiedreward_edit_pointwise_*                   Σ w·s / Σ w over the answer's two numbers, 0 … 25

Sources: UnifiedReward (arXiv 2503.05236), Flow-GRPO (2505.05470), UnifiedReward-Edit. A sample is sent as soon as it
exists; rewards with the same server settings share one client, and identical questions about the
same medium are sent only once. Invariant: a value that the answer does not state is missing, never 0.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from prefgrpo.data.media import Media
from prefgrpo.judge.template import Template, load_template
from prefgrpo.judge.verdict import Answer
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.judges import open_client


@dataclass(eq=False)
class VlmReward(PointwiseReward):
    """Asks one or several questions about each sample. JudgeError within seconds if the judge is not usable.

    judge: an open judge or client, a JudgeConfig, or a mapping of its fields. template: shipped name or path of the
    question; empty: the reward's default, an attribute of its class.
    """

    judge: Any
    template: str = ""

    judged = True
    streams = True
    needs: ClassVar[tuple[str, ...]] = ("prompt", "media_1")
    """Markers required in the template."""
    may: ClassVar[tuple[str, ...]] = ()
    """Markers that are optional."""
    kinds: ClassVar[tuple[str, ...]] = ("soft",)
    """Kinds of answers that it supports."""

    def __post_init__(self) -> None:
        self.client = open_client(self.judge)
        self.question = self.load(self.template or type(self).template)

    def load(self, name: str, needs: tuple[str, ...] | None = None) -> Template:
        """Load a template, checked against `needs`, `may` and `kinds`."""
        question = load_template(name, needs or self.needs, self.may, self.kinds, self.client.config.prompt)
        self.answer_s = max(self.answer_s, self.client.config.timeout_s or question.timeout_s)
        return question

    def score(self, samples: list[Sample]) -> list[Score]:
        """Ask about all samples concurrently and wait for the answers."""
        return [answer.result() for answer in [self.submit(s) for s in samples]]

    def submit(self, sample: Sample) -> Future[Score]:
        """Ask about one sample without waiting."""
        return self.client.run(self._score(sample))

    async def _score(self, sample: Sample) -> Score:
        if why := self.refuse(sample):
            return Score(None, why)
        try:
            return await self._judge(sample)
        except ValueError as error:
            return Score(None, str(error))

    @abstractmethod
    async def _judge(self, sample: Sample) -> Score:
        """One sample's score (runs on the client's event loop); ValueError with the reason if it has none."""

    async def ask(
        self, question: Template, sample: Sample, media: Sequence[Media] | None = None, **values: str
    ) -> Answer:
        """Ask about a sample (or `media` derived from it) with its prompt, source images and other texts."""
        shown = [sample.media] if media is None else media
        return await self.client.answer(question, {"prompt": sample.prompt, **values}, shown, sample.source, once=True)

    async def answers(self, sample: Sample, *questions: Template, **values: str) -> list[Answer]:
        """The answers to questions asked concurrently; ValueError with the reason of the first unusable one."""
        answers = await asyncio.gather(*(self.ask(question, sample, None, **values) for question in questions))
        if unusable := next((a for a in answers if a.reason), None):
            raise ValueError(unusable.reason)
        return answers

    def close(self) -> None:
        """Release the client."""
        self.client.close()


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """Σ w·s / Σ w over `weights`; missing if any score with a non-zero weight is missing."""
    if absent := [name for name, weight in weights.items() if weight and name not in parts]:
        return Score(None, f"the answer has no readable {' nor '.join(absent)}", dict(parts))
    total = sum(w * parts[name] for name, w in weights.items() if w)
    return Score(total / sum(weights.values()), parts=dict(parts))


class UnifiedRewardAlignment(VlmReward):
    """How much of the caption the image shows, 1 … 5; the other axes are parts. RewardError if the template does not
    ask for this axis."""

    template = "unifiedreward"
    kinds = ("scores",)
    axis: ClassVar[str] = "alignment"

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [name.lower() for name, *_ in self.question.scores]
        if self.axis not in asked:
            name = self.question.name
            raise RewardError(f"template '{name}' must ask for the score '{self.axis}', but asks for {asked}")

    async def _judge(self, sample: Sample) -> Score:
        (answer,) = await self.answers(sample, self.question)
        parts = {name.lower(): value for name, value in answer.parts.items()}
        return weighted(parts, {self.axis: 1.0})


class UnifiedRewardCoherence(UnifiedRewardAlignment):
    """How coherent the image is, 1 … 5."""

    axis = "coherence"


class UnifiedRewardStyle(UnifiedRewardAlignment):
    """How aesthetically pleasing the image is, 1 … 5."""

    axis = "style"


class UnifiedRewardSglang(VlmReward):
    """UnifiedReward 1.5 behind SGLang: "Final Score: N", N / 5."""

    template = "unifiedreward_sglang"
    kinds = ("scores",)

    async def _judge(self, sample: Sample) -> Score:
        (answer,) = await self.answers(sample, self.question)
        name, _, high = self.question.scores[0]
        return Score(answer.parts[name] / high)


class QwenVl(UnifiedRewardSglang):
    """Quality rated by an instruction-tuned Qwen-VL: <Score>N</Score>, N / 5."""

    template = "qwenvl"
    needs = ("media_1",)
    may = ("prompt",)


@dataclass(eq=False)
class EditImageQuality(VlmReward):
    """Quality of the edited image on its own, 0 … 25.

    weights: weight of each score by name; default: 1 each. normalise_parts: normalise each score over the group and
    weight the advantages (as in Pref-GRPO) instead of the scores.
    """

    template = "edit_quality"
    needs: ClassVar[tuple[str, ...]] = ("media_1",)
    may = ("prompt", "source")
    kinds = ("json",)
    weights: Mapping[str, float] | None = None
    normalise_parts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given, names = self.weights or {}, [name for name, *_ in self.question.scores]
        self.by_name = {name: float(given.get(name, 1.0)) for name in names}
        good = all(0 <= w < math.inf for w in self.by_name.values()) and sum(self.by_name.values()) > 0
        if set(given) - set(names) or not good:
            raise RewardError(f"weights: expected values of at least 0, not all 0, for {names}, got {self.weights!r}")
        if self.normalise_parts:
            self.part_weights = self.by_name

    async def _judge(self, sample: Sample) -> Score:
        (answer,) = await self.answers(sample, self.question)
        return weighted(answer.parts, self.by_name)


class EditInstructionFollowing(EditImageQuality):
    """How well the edit follows its instruction, 0 … 25 (overediting 25: nothing else was changed)."""

    template = "edit_following"
    needs = ("prompt", "source", "media_1")
    needs_source = True
