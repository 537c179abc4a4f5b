"""The interface of rewards.

A reward scores samples one by one (`PointwiseReward`) or a prompt's whole group at once (`GroupwiseReward`). A sample
that could not be scored has the value None and a reason; it is never 0, −1 or 0.5. A reward's module can be imported
without the reward's libraries; its constructor loads them, or raises RewardError.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from prefgrpo.config.recipe import UserError
from prefgrpo.data.media import Media
from prefgrpo.judge.verdict import Verdict
from prefgrpo.rewards.request_stats import RequestStats


class RewardError(UserError, RuntimeError):
    """A reward cannot be used; the message says what was expected, what was found, and what to do."""


def library(name: str, install: str) -> ModuleType:
    """Import a library that a reward needs; the RewardError says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RewardError(
            f"this reward needs the package {name} ({error}): pip install {install}; or run the reward where it is "
            "installed with `prefgrpo reward serve NAME` and give the option url"
        ) from error


def unusable(media: Media, takes: Sequence[str] = ("image", "video")) -> str:
    """Why a medium cannot be scored by a reward that accepts `takes`; '' if it can."""
    shape = media.pixels.shape
    if len(shape) not in (3, 4) or shape[-1] != 3 or media.pixels.dtype != np.uint8:
        return f"expected 8-bit RGB pixels, got {media.pixels.dtype} {list(shape)}"
    if not all(shape):
        return f"the image or clip has no pixels: {list(shape)}"
    kind = "video" if media.clip else "image"
    return "" if kind in takes else f"expected {' or '.join(takes)}, got {kind}"


def too_long(media: Media, ratio: int) -> str:
    """Why a medium whose aspect ratio is over 1:`ratio` cannot be scored; '' if it can."""
    high, wide = media.pixels.shape[-3:-1]
    if max(high, wide) <= ratio * min(high, wide):
        return ""
    return f"an image of {wide}×{high} is too long; expected an aspect ratio of at most 1:{ratio}"


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated image or clip with its inputs."""

    prompt: str
    """The caption, or the edit instruction."""
    media: Media
    """The image or clip."""
    source: tuple[Media, ...] = ()
    """The source images of an edit."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The other columns of the prompt file's row."""


@dataclass(frozen=True)
class Score:
    """A reward's result for one sample."""

    value: float | None
    """The reward, or None if it is missing."""
    reason: str = ""
    """Why it is missing."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named sub-scores, for logs."""
    raw: str = ""
    """The judge's text, for rewards that keep it."""

    def finite(self) -> Score:
        """This score with its value as a float; missing, with the reason, if the value is not finite."""
        if self.value is None:
            return replace(self, reason=self.reason or "the reward gave no reason")
        value = float(self.value)
        if math.isfinite(value):
            return replace(self, value=value)
        return replace(self, value=None, reason=f"the reward returned {value}")


@dataclass(frozen=True)
class Comparison:
    """One judged pair of a group: members `first` and `second`, in the order shown, and the verdict."""

    first: int
    second: int
    verdict: Verdict


@dataclass
class GroupScores:
    """A groupwise reward's result for one group of G samples."""

    scores: list[Score]
    wins: NDArray[np.float64] | None = None
    """[G, G] sum of soft verdicts that row beats column (pairwise rewards)."""
    counts: NDArray[np.float64] | None = None
    """[G, G] number of these verdicts."""
    comparisons: list[Comparison] = field(default_factory=list)
    """All comparisons behind the scores (pairwise rewards)."""

    def mean_p_first(self, first: int, second: int) -> float:
        """Mean P(`first` beats `second`) over the comparisons shown in this order; NaN if there are none."""
        answers = [c.verdict.first for c in self.comparisons if (c.first, c.second) == (first, second)]
        known = [p for p in answers if p is not None]
        return float(np.mean(known)) if known else float("nan")


class GroupSession(Protocol):
    """A group that is being scored by a streaming reward."""

    def add(self, member: int, sample: Sample) -> None:
        """Hand over member `member`. Does not block."""

    def result(self, deadline: float) -> GroupScores:
        """Wait for all scores until `deadline` (`time.monotonic()`); scores not available by then are missing."""
        ...

    def cancel(self) -> None:
        """Cancel all unanswered requests."""


class Reward(ABC):  # noqa: B024  (the abstract methods are in its two subclasses)
    """Base class: declares the inputs of a reward, which are checked before a run starts."""

    takes: tuple[str, ...] = ("image",)
    """Media it accepts: "image", "video" or both."""
    needs_source: bool = False
    """Whether it scores edits, so that samples must have source images."""
    meta_keys: tuple[str, ...] = ()
    """Columns that every prompt must have."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Columns that it uses where a prompt has them."""
    judged: ClassVar[bool] = False
    """Whether it queries a vision-language model; its constructor then takes `judge` first."""
    template: str = ""
    """Default judge template (judged rewards)."""
    probe: ClassVar[dict[str, Any]] = {}
    """Meta and "prompt" of the sample that its server scores before reporting ready; empty: any caption will do."""
    part_weights: Mapping[str, float] = MappingProxyType({})
    """Weights of sub-scores (`Score.parts`) that are normalised separately and then summed; empty: the value is
    normalised. Needs advantage.combine weighted_advantage_sum."""
    streams: bool = False
    """Whether samples are handed over one by one while others are being generated (`submit` or `session`)."""

    answer_s: float = 0.0
    """Timeout in seconds of one answer from a server (the scorer's deadline is longer)."""

    def refuse(self, sample: Sample) -> str:
        """Why a sample cannot be scored; '' if it can. By default checks the pixels and the kind of media."""
        return unusable(sample.media, self.takes)

    def check(self, group_size: int) -> None:  # noqa: B027  (most rewards accept groups of any size)
        """Raise ValueError if it cannot score groups of this size."""

    def close(self) -> None:  # noqa: B027  (rewards without resources need not override it)
        """Release its resources."""


class PointwiseReward(Reward):
    """Scores samples one by one."""

    @abstractmethod
    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, in order; a failed sample gets a missing score, never an exception."""

    def in_batches(
        self, samples: Sequence[Sample], size: int, score: Callable[[list[Sample]], Iterable[Score]]
    ) -> list[Score]:
        """Apply `score` to `size` samples at a time, in order; samples that `refuse` rejects get missing scores."""
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
    """Scores all samples of one prompt together."""

    @abstractmethod
    def score_group(self, group: list[Sample], seed: int) -> GroupScores:
        """Scores for the group, in order. `seed` fixes any random choice (pair plan, A/B order)."""

    def session(self, size: int, seed: int, stats: RequestStats) -> GroupSession:
        """Start scoring a group of `size` members that arrive one by one (streaming rewards only)."""
        raise TypeError(f"{type(self).__name__} does not stream; use score_group")
