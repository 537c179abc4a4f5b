"""What every reward takes and gives.

A reward scores samples, alone (`PointwiseReward`) or a prompt's whole group at once (`GroupwiseReward`). The
value of a sample that could not be scored is None with a reason: missing is never 0, −1 or 0.5. A module of a
reward imports without the reward's libraries; its constructor loads them, or raises RewardError.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.media import Media
from prefgrpo.judge.verdict import Verdict
from prefgrpo.rewards.flight import Flight


class RewardError(RuntimeError):
    """A reward that cannot be used; the message says what was expected, what came, what to do."""


def library(name: str, install: str) -> ModuleType:
    """Import a reward's library; RewardError says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardError(
            f"this reward needs the package {name} ({error}): pip install {install}; or run the reward where it is "
            "installed with `prefgrpo reward serve NAME` and give reward.options.NAME.url"
        ) from error


def unusable(media: Media, takes: Sequence[str] = ("image", "video")) -> str:
    """Why a medium cannot be scored by what takes these kinds; '' if it can."""
    shape = media.pixels.shape
    if len(shape) not in (3, 4) or shape[-1] != 3 or media.pixels.dtype != np.uint8:
        return f"expected 8-bit RGB pixels, got {media.pixels.dtype} {list(shape)}"
    if not all(shape):
        return f"the medium has no pixels: {list(shape)}"
    kind = "video" if media.clip else "image"
    return "" if kind in takes else f"expected {' or '.join(takes)}, got {kind}"


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated medium with what it was made from."""

    prompt: str
    """The caption, or the instruction of an edit."""
    media: Media
    """The image or clip."""
    source: tuple[Media, ...] = ()
    """The source images of an edit."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's line."""


@dataclass(frozen=True)
class Score:
    """A reward's verdict on one sample."""

    value: float | None
    """The reward, or None if it is missing."""
    reason: str = ""
    """Why it is missing."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named sub-scores, for logs."""
    raw: str = ""
    """What a judge wrote, where somebody reads that."""


@dataclass(frozen=True)
class Comparison:
    """One ordered pair of a group that was put to a judge: members `first` and `second`, as shown, and the verdict."""

    first: int
    second: int
    verdict: Verdict


@dataclass
class GroupScores:
    """A groupwise reward's result for one group of G samples."""

    scores: list[Score]
    wins: NDArray[np.float64] | None = None
    """[G, G] summed soft verdicts that row beats column (pairwise rewards)."""
    counts: NDArray[np.float64] | None = None
    """[G, G] how many verdicts exist."""
    comparisons: list[Comparison] = field(default_factory=list)
    """Every judgement behind the scores (pairwise rewards)."""

    def shown(self, first: int, second: int) -> float:
        """Mean P(`first` beats `second`) over the comparisons that showed them in this order; NaN if none."""
        answers = [c.verdict.first for c in self.comparisons if (c.first, c.second) == (first, second)]
        known = [p for p in answers if p is not None]
        return float(np.mean(known)) if known else float("nan")


class GroupSession(Protocol):
    """A group on its way at a streaming reward."""

    def add(self, member: int, sample: Sample) -> None:
        """Member `member` exists now. Does not wait."""

    def result(self, deadline: float) -> GroupScores:
        """Scores once all is answered, or at `deadline` (`time.monotonic()`): what is not there is missing."""
        ...

    def cancel(self) -> None:
        """Give up what has not been answered."""


class Reward(ABC):  # noqa: B024  (its two kinds have the abstract methods)
    """What a reward takes; the run is checked against it before it starts."""

    takes: tuple[str, ...] = ("image",)
    """Which media it scores: "image", "video" or both."""
    needs_source: bool = False
    """It scores edits: samples must have source images."""
    meta_keys: tuple[str, ...] = ()
    """Columns that a prompt's line must have."""
    judged: ClassVar[bool] = False
    """It asks a vision-language model: its constructor takes `judge` first."""
    template: str = ""
    """Judge template that it asks with unless the options name another (judged rewards)."""
    probe: ClassVar[dict[str, Any]] = {}
    """Meta, with "prompt", of the sample that its server scores before it says ready; empty: any caption will do."""
    part_weights: Mapping[str, float] = MappingProxyType({})
    """Sub-scores (`Score.parts`) that are normalised each before they are weighed so; empty: the value is normalised.
    Needs reward.combine weighted_advantage_sum."""
    streams: bool = False
    """Samples are handed over one by one while others are being made (`submit` or `session`)."""

    answer_s: float = 0.0
    """Longest that one answer from outside may take, in seconds (the scorer's deadline is longer)."""

    def refuse(self, sample: Sample) -> str:
        """Why a sample cannot be scored; '' if it can. By default: pixels or a kind of media that it does not take."""
        return unusable(sample.media, self.takes)

    def check(self, group_size: int) -> None:  # noqa: B027  (most rewards take groups of any size)
        """Raise ValueError if it cannot score groups of this size."""

    def close(self) -> None:  # noqa: B027  (a reward without resources has nothing to release)
        """Release what it holds."""


class PointwiseReward(Reward):
    """Scores samples one by one."""

    @abstractmethod
    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, in order; a sample that fails is a missing score, never an exception."""

    def in_batches(
        self, samples: Sequence[Sample], size: int, score: Callable[[list[Sample]], Iterable[Score]]
    ) -> list[Score]:
        """`score` of `size` samples at a time, in order; those that `refuse` has a reason for are missing."""
        scores = [Score(None, self.refuse(s)) for s in samples]
        able = [k for k, s in enumerate(scores) if not s.reason]
        for start in range(0, len(able), size):
            batch = able[start : start + size]
            for k, value in zip(batch, score([samples[k] for k in batch]), strict=True):
                scores[k] = value
        return scores

    def submit(self, sample: Sample) -> Future[Score]:
        """Send one sample without waiting (streaming rewards only)."""
        raise TypeError(f"{type(self).__name__} does not stream; use score")


class GroupwiseReward(Reward):
    """Scores the samples of one prompt together, when all exist."""

    @abstractmethod
    def score_group(self, group: list[Sample], seed: int) -> GroupScores:
        """Scores for the group, in order. `seed` fixes any random choice (pair plan, A/B order)."""

    def session(self, size: int, seed: int, flight: Flight) -> GroupSession:
        """A group of `size` members that arrive one by one (streaming rewards only)."""
        raise TypeError(f"{type(self).__name__} does not stream; use score_group")
