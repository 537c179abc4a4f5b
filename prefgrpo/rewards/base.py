"""The interface of rewards, which score samples one by one or compare those of a prompt in pairs (pairwise.py).

A sample that could not be scored has the value None and a reason; it is never 0, −1 or 0.5. A reward's module can be
imported without the reward's libraries; its constructor loads them, or raises RewardError.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from prefgrpo.config.recipe import UserError
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media

T = TypeVar("T")
INSTALL = "'prefgrpo[rewards]'"
"""What pip installs for the rewards that run in process."""


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


def check_media(media: Media, takes: Sequence[str] = ("image", "video")) -> None:
    """Raise ValueError for a medium that a reward which accepts `takes` cannot score."""
    shape = media.pixels.shape
    if len(shape) not in (3, 4) or shape[-1] != 3 or media.pixels.dtype != np.uint8:
        raise ValueError(f"expected 8-bit RGB pixels, got {media.pixels.dtype} {list(shape)}")
    if not all(shape):
        raise ValueError(f"the image or clip has no pixels: {list(shape)}")
    if (kind := "video" if media.clip else "image") not in takes:
        raise ValueError(f"expected {' or '.join(takes)}, got {kind}")


def check_aspect_ratio(media: Media, most: int) -> None:
    """Raise ValueError for a medium whose aspect ratio is over 1:`most`."""
    high, wide = media.pixels.shape[-3:-1]
    if max(high, wide) > most * min(high, wide):
        raise ValueError(f"expected an aspect ratio of at most 1:{most}, got {wide}×{high} pixels")


def read_column(meta: Mapping[str, Any], name: str, form: TypeAdapter[T], expected: str) -> T:
    """The column `name` in that form. Raises ValueError that says what was expected."""
    try:
        return form.validate_python(meta.get(name))
    except ValidationError as error:
        raise ValueError(f"column '{name}': expected {expected}, got {meta.get(name)!r:.80}") from error


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


class Reward(ABC):  # noqa: B024  (its two subclasses have the methods that score)
    """Base class: declares the inputs of a reward, which are checked before a run starts."""

    takes: tuple[str, ...] = ("image",)
    """Media it accepts: "image", "video" or both."""
    frames: int | None = None
    """Frames of a clip that it looks at, evenly spaced from first to last; None: all."""
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
    """Weights of sub-scores (`Answer.parts`) that are normalised separately and then summed; empty: the value is
    normalised. Needs advantage.combine weighted_advantage_sum or gdpo."""
    streams: bool = False
    """Whether `submit` sends a sample, or a pair, without waiting; others are called on a thread of the scorer."""
    answer_s: float = 0.0
    """Timeout in seconds of one answer from a server (the scorer's deadline is longer)."""

    def check(self, sample: Sample) -> None:
        """Raise ValueError, with the reason, for a sample that cannot be scored; by default by its pixels and kind."""
        check_media(sample.media, self.takes)

    def close(self) -> None:  # noqa: B027  (rewards without resources need not override it)
        """Release its resources."""


class PointwiseReward(Reward):
    """Scores samples one by one. A subclass defines `score_batch`, or `score`."""

    batch_size: int = sys.maxsize
    """Most samples of a call of `score_batch`; by default all."""

    def score(self, samples: list[Sample]) -> list[Answer]:
        """One score per sample, in order; those that `check` rejects, or that fail, are missing."""
        scores: dict[int, Answer] = {}
        able = []
        for k, sample in enumerate(samples):
            try:
                self.check(sample)
                able.append(k)
            except ValueError as error:
                scores[k] = Answer(None, str(error))
        for start in range(0, len(able), self.batch_size):
            batch = able[start : start + self.batch_size]
            scores |= zip(batch, self.score_batch([samples[k] for k in batch]), strict=True)
        return [scores[k] for k in range(len(samples))]

    def score_batch(self, samples: list[Sample]) -> Iterable[Answer]:
        """One score per sample, in order, of samples that `check` accepts."""
        raise TypeError(f"{type(self).__name__} defines neither score_batch nor score")

    def submit(self, sample: Sample) -> Future[Answer]:
        """Send one sample without waiting (streaming rewards only)."""
        raise TypeError(f"{type(self).__name__} does not stream; use score")


class StreamingReward(PointwiseReward):
    """A pointwise reward whose `submit` sends a sample without waiting."""

    streams = True

    def score(self, samples: list[Sample]) -> list[Answer]:
        """Send all samples, and wait for their scores."""
        return [answer.result() for answer in [self.submit(sample) for sample in samples]]


def score_in_process(name: str, reward: PointwiseReward, samples: list[Sample]) -> list[Answer]:
    """The scores from one call; if it raises, from one call per sample. Those that fail are missing."""
    try:
        scores = reward.score(samples) if samples else []
        if len(scores) != len(samples) or not all(isinstance(s, Answer) for s in scores):
            kinds = ", ".join(sorted({type(s).__name__ for s in scores})) or "nothing"
            got = f"expected one Answer for each of {len(samples)} samples, got {len(scores)} of {kinds}"
            raise RewardError(f"reward '{name}': {got}")
        return scores
    except RewardError as error:  # it did not return a list of scores, and would not for one sample
        return [Answer(None, str(error))] * len(samples)
    except Exception as error:  # noqa: BLE001  (a reward's libraries may raise anything)
        if len(samples) == 1:
            return [Answer(None, reason_of(error))]
        traceback.print_exc()
        return [score_in_process(name, reward, [sample])[0] for sample in samples]


def reason_of(error: Exception) -> str:
    """Why a value is missing."""
    return f"the reward raised {type(error).__name__}: {str(error)[:200]}"
