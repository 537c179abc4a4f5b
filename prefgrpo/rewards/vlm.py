"""Rewards that ask a vision-language model about one sample at a time.

Rewards with the same judge settings share one judge, and identical questions about the same medium are sent only once.
Invariant: a value that the answer does not state is missing, never 0.
Sources: UnifiedReward (arXiv 2503.05236), Flow-GRPO (2505.05470), UnifiedReward-Edit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import NonNegativeFloat, PlainValidator, PositiveInt

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.client import Judge, open_judge
from prefgrpo.judge.template import PAIR_ANSWERS, Shown, Template, load_template
from prefgrpo.rewards.base import Reward, RewardError, Sample

JudgeOption = Annotated[Judge, PlainValidator(lambda judge: judge)]
"""The option `judge`: an open one, or a JudgeConfig or a mapping of its fields, which is opened."""


@dataclass(eq=False)
class Judged(Reward):
    """A reward that asks a judge. JudgeError within seconds if it is not usable.

    judge: an open judge, a JudgeConfig, or a mapping of its fields. template: shipped name or path of the question;
    empty: the class's default. frames, max_pixels: of a clip, and of an image or frame, that the judge sees; default:
    the template's (8 and 2048²).
    """

    judge: JudgeOption
    template: str = ""
    frames: PositiveInt | None = None
    max_pixels: PositiveInt | None = None

    judged = True
    kinds: ClassVar[tuple[str, ...]] = PAIR_ANSWERS

    def __post_init__(self) -> None:
        given = self.judge
        self.judge = open_judge(given, self.kinds)
        if self.judge is not given:
            self.judge.reach()
        self.streams = self.judge.streams
        if not self.judge.clips:
            self.takes = ("image",)
        super().__post_init__()


@dataclass(eq=False)
class VlmReward(Judged):
    """Asks one or several questions about each sample; a subclass defines `ask_one`."""

    needs: ClassVar[tuple[str, ...]] = ("prompt", "media_1")
    """Markers required in the template."""
    may: ClassVar[tuple[str, ...]] = ()
    """Markers that are optional."""
    kinds: ClassVar[tuple[str, ...]] = ("soft",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.question = self.load(self.template or type(self).template)

    def load(self, name: str, needs: tuple[str, ...] | None = None) -> Template:
        """Load a template, checked against `needs`, `may`, `kinds` and what the judge can answer."""
        shown = Shown(self.frames, self.max_pixels)
        question = load_template(name, needs or self.needs, self.may, self.kinds, shown)
        self.judge.check(question)
        self.answer_s = max(self.answer_s, self.judge.timeout_s or question.timeout_s)
        return question

    async def answer_to(
        self, question: Template, sample: Sample, media: Sequence[Media] | None = None, **texts: str
    ) -> Answer:
        """The judge's answer about a sample (or `media` derived from it) with its prompt, sources and other texts. Its
        value is None, without a reason, if the template asks for parts."""
        shown = [sample.media] if media is None else media
        return await self.judge.ask(question, {"prompt": sample.prompt, **texts}, shown, sample.source, once=True)

    async def answers_to(self, sample: Sample, *questions: Template) -> list[Answer]:
        """The answers to questions asked concurrently; ValueError with the reason of the first unusable one."""
        answers = await asyncio.gather(*(self.answer_to(question, sample) for question in questions))
        for answer in answers:
            if answer.reason:
                raise ValueError(answer.reason)
        return answers


@dataclass(eq=False)
class VlmScores(VlmReward):
    """Σ w·s / Σ w over the scores s that the answer states; parts: the scores.

    weights: weight of each score by name; default: the class's own, or 1 each. normalise_parts: normalise each score
    over the group and weight the advantages (as in Pref-GRPO) instead of the scores.
    """

    kinds = ("scores", "json")
    weights: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    normalise_parts: bool = False
    default: ClassVar[Mapping[str, float]] = {}
    """Weights unless the option gives others; empty: 1 for every score."""
    unit: ClassVar[bool] = False
    """Whether scores are divided by their highest value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        highest = {name.lower(): high for name, _, high in self.question.scores}
        weights = dict(self.default or dict.fromkeys(highest, 1.0)) | dict(self.weights)
        if set(weights) - set(highest) or not sum(weights.values()):
            message = f"template '{self.question.name}' asks for {', '.join(highest)}"
            raise RewardError(f"{message}: expected weights of these, not all 0, got {weights}")
        self.by_name = weights
        self.highest = highest
        if self.normalise_parts:
            self.part_weights = self.by_name

    async def ask_one(self, *samples: Sample) -> Answer:
        """The weighted mean of the scores that the answer states."""
        (answer,) = await self.answers_to(samples[0], self.question)
        parts = {name.lower(): value for name, value in answer.parts.items()}
        used = {name: weight for name, weight in self.by_name.items() if weight}
        if absent := [name for name in used if name not in parts]:
            return Answer(None, f"the answer has no readable {' nor '.join(absent)}", parts)
        total = sum(w * parts[name] / (self.highest[name] if self.unit else 1.0) for name, w in used.items())
        return Answer(total / sum(used.values()), parts=parts)


class UnifiedRewardAlignment(VlmScores):
    """How much of the caption the image shows, 1 … 5; the other axes are parts.

    UnifiedReward 2.0 (arXiv 2503.05236); one request gives all three axes.
    """

    template = "unifiedreward"
    default: ClassVar = {"alignment": 1.0}


class UnifiedRewardCoherence(UnifiedRewardAlignment):
    """How coherent the image is, 1 … 5, by UnifiedReward 2.0."""

    default: ClassVar = {"coherence": 1.0}


class UnifiedRewardStyle(UnifiedRewardAlignment):
    """How aesthetically pleasing the image is, 1 … 5, by UnifiedReward 2.0."""

    default: ClassVar = {"style": 1.0}


class UnifiedRewardSglang(VlmScores):
    """UnifiedReward 1.5 as Flow-GRPO asks it (behind SGLang; any server works): "Final Score: N", N / 5."""

    template = "unifiedreward_sglang"
    unit = True


class QwenVl(VlmScores):
    """Aesthetic quality rated by an instruction-tuned Qwen-VL: <Score>N</Score>, N / 5.

    The question is Flow-GRPO's; the caption is not shown.
    """

    template = "qwenvl"
    needs = ("media_1",)
    may = ("prompt",)
    unit = True


class EditImageQuality(VlmScores):
    """Quality of the edited image on its own, 0 … 25.

    UnifiedReward-Edit: weighted mean of naturalness and absence of artefacts.
    """

    template = "edit_quality"
    needs = ("media_1",)
    may = ("prompt", "source")


class EditInstructionFollowing(VlmScores):
    """How well the edit follows its instruction, 0 … 25 (overediting 25: nothing else was changed).

    UnifiedReward-Edit: weighted mean of editing success and of not over-editing.
    """

    template = "edit_following"
    needs = ("prompt", "source", "media_1")
    needs_source = True
