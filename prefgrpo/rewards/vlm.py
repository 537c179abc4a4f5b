"""Rewards that ask a vision-language model about one sample at a time, over HTTP.

A sample is asked about as soon as it exists; rewards with the same server settings share one client, and the same
question about the same medium is asked once whoever asks. Invariant: what the answer does not state is missing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from prefgrpo.data.media import Media
from prefgrpo.judge.template import Template, load_template
from prefgrpo.judge.verdict import Answer
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.judges import open_client


class VlmReward(PointwiseReward):
    """A question, or several at once, about each sample."""

    judged = True
    streams = True
    needs: ClassVar[tuple[str, ...]] = ("prompt", "media_1")
    """Markers that the template must have."""
    may: ClassVar[tuple[str, ...]] = ()
    """Markers that it can have besides."""
    kinds: ClassVar[tuple[str, ...]] = ("soft",)
    """Answers that it can use."""

    def __init__(self, judge: Any, template: str = "") -> None:
        """JudgeError within seconds if the judge cannot be asked.

        Args:
            judge: An open judge or client, a JudgeConfig, or a mapping of its fields.
            template: Shipped name or path; empty: the one that `judge` names, else the reward's own.
        """
        self.client, named = open_client(judge, self.template)
        self.question = self.load(template or named)

    def load(self, name: str, needs: tuple[str, ...] | None = None) -> Template:
        """A template that this reward can fill in, ready to be asked with."""
        question = load_template(name, needs or self.needs, self.may, self.kinds)
        self.client.prepare(question)
        self.answer_s = max(self.answer_s, self.client.config.timeout_s or question.timeout_s)
        return question

    def submit(self, sample: Sample) -> Future[Score]:
        """Ask about one sample without waiting."""
        if not (why := self.refuse(sample)):
            return self.client.run(self.judge_sample(sample))
        refused: Future[Score] = Future()
        refused.set_result(Score(None, why))
        return refused

    def score(self, samples: list[Sample]) -> list[Score]:
        """Ask about all samples at once and wait."""
        return [answer.result() for answer in [self.submit(s) for s in samples]]

    @abstractmethod
    async def judge_sample(self, sample: Sample) -> Score:
        """One sample's score (runs on the client's loop)."""

    async def ask(
        self, question: Template, sample: Sample, media: Sequence[Media] | None = None, **values: str
    ) -> Answer:
        """The answer about a sample (or about `media` made from it) with its prompt, source and other texts."""
        shown = [sample.media] if media is None else media
        return await self.client.answer(question, {"prompt": sample.prompt, **values}, shown, sample.source, once=True)

    def close(self) -> None:
        """Let the client go."""
        self.client.close()


async def both(first: Any, second: Any) -> tuple[Answer, Answer]:
    """Two answers, asked at once."""
    one, two = await asyncio.gather(first, second)
    return one, two


def missing(*answers: Answer) -> Score | None:
    """The missing score of the first answer that states nothing; None if all state something."""
    return next((Score(None, a.reason) for a in answers if a.reason), None)


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """Σ w·s / Σ w over `weights`; missing if one of its scores with a weight is."""
    if absent := [name for name, weight in weights.items() if weight and name not in parts]:
        return Score(None, f"the answer has no readable {' nor '.join(absent)}", dict(parts))
    total = sum(w * parts[name] for name, w in weights.items() if w)
    return Score(total / sum(weights.values()), parts=dict(parts))


def weights_of(given: Mapping[str, float] | None, names: Sequence[str], option: str) -> dict[str, float]:
    """A weight per name, 1 where none is given; RewardError for other names, negative weights, or nothing but 0."""
    found = {name: float((given or {}).get(name, 1.0)) for name in names}
    unknown = sorted(set(given or {}) - set(names))
    if unknown or not all(0 <= w < float("inf") for w in found.values()) or not sum(found.values()) > 0:
        raise RewardError(f"{option} must give weights of at least 0, not all 0, for {list(names)}; got {given!r}")
    return found
