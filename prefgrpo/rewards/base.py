"""The interface of rewards, which score samples one by one or compare those of a prompt in pairs (pairs.py).

A sample that could not be scored has the value None and a reason; it is never 0, −1 or 0.5. A reward's module can be
imported without the reward's libraries; its constructor loads them, or raises RewardError.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
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
    """Raise ValueError for a medium that a reward that accepts `takes` cannot score."""
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


Question = tuple[Sample, ...]
"""The samples that a reward is asked about: one, or two in the order in which they are shown."""
Key = tuple[int, ...]
"""The same as members of a group: (member,), or (first shown, second shown)."""
NOT_GENERATED = "a sample was not generated"


@dataclass(frozen=True)
class Tally:
    """What the answers about a group of G samples are worth."""

    members: list[Answer]
    """The value of each member, with its parts, or why it is missing."""
    comparisons: NDArray[np.float64] | None = None
    """[2, G, G], of a reward that compares: sum (wins) and number (counts) of the answers that row beats column."""


class Reward:
    """Says what is asked about a group, answers it, and what the answers are worth.

    A subclass defines `ask`, or `ask_one` with `streams = True`. Its attributes, which are checked before a run starts,
    declare the inputs. One that compares samples derives from `Compares` (rewards/pairs.py).
    """

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
    of_function: ClassVar[bool] = False
    """Whether a function answers, so that trying it before a run costs nothing (`functions.failure`)."""
    compares: bool = False
    """Whether its questions are about two samples."""
    template: str = ""
    """Default judge template (judged rewards)."""
    kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of judge's answers that it supports (judged rewards)."""
    probe: ClassVar[dict[str, Any]] = {}
    """Meta and "prompt" of the sample that its server scores before reporting ready; empty: any caption will do."""
    part_weights: Mapping[str, float] = MappingProxyType({})
    """Weights of sub-scores (`Answer.parts`) that are normalised separately and then summed; empty: the value is
    normalised. Needs advantage.combine weighted_advantage_sum or gdpo."""
    streams: bool = False
    """Whether `ask_one` is awaited for each question as soon as its samples exist, on the event loop of the process;
    otherwise a thread of the scorer calls `ask` once whole groups exist."""
    answer_s: float = 0.0
    """Timeout in seconds of one answer from a server (the scorer's deadline is longer)."""
    batch_size: int = sys.maxsize
    """Maximum number of questions per call of `ask`; by default all."""

    def __post_init__(self) -> None:
        """Of subclasses that are dataclasses: called when the fields are set."""

    @property
    def is_win_rate(self) -> bool:
        """Whether the values are the win rates of `Tally.comparisons`."""
        return False

    def check(self, sample: Sample) -> None:
        """Raise ValueError, with the reason, for a sample that cannot be scored; by default by its pixels and kind."""
        check_media(sample.media, self.takes)

    def keys(self, size: int, seed: int) -> list[Key]:
        """What is asked about a group of `size` samples: by default, about every member alone."""
        del seed  # for rewards that draw pairs
        return [(member,) for member in range(size)]

    def ask(self, asked: list[Question]) -> Iterable[Answer]:
        """One answer per question, in order, about samples that `check` accepts. By default those of `ask_one`."""
        from prefgrpo.judge.event_loop import loop_thread  # imports aiohttp

        return [answer.result() for answer in [loop_thread().submit(self.answer(*samples)) for samples in asked]]

    async def ask_one(self, *samples: Sample) -> Answer:
        """The answer to one question; ValueError with the reason if it has none."""
        raise TypeError(f"{type(self).__name__} defines neither ask nor ask_one")

    async def answer(self, *samples: Sample) -> Answer:
        """`ask_one`, or why it has no answer."""
        try:
            for sample in samples:
                self.check(sample)
            return await self.ask_one(*samples)
        except ValueError as error:
            return Answer(None, str(error))

    def tally(self, size: int, answers: Mapping[Key, Answer]) -> Tally:
        """What the answers about a group of `size` samples are worth: by default, each is its member's value."""
        return Tally([answers.get((member,), Answer(None, NOT_GENERATED)) for member in range(size)])

    def score(self, group: Sequence[Sample], seed: int = 0) -> list[Answer]:
        """The values of a group now; those that `check` rejects are missing. seed: of the pairs that are compared."""
        keys = self.keys(len(group), seed)
        answers = answers_of(self, [tuple(group[member] for member in key) for key in keys])
        return self.tally(len(group), dict(zip(keys, answers, strict=True))).members

    def close(self) -> None:
        """Release its resources."""


def answers_of(reward: Reward, asked: Sequence[Question]) -> list[Answer]:
    """One answer per question, in order; missing, with the reason, about samples that the reward's `check` rejects.

    Raises what the reward raises, and RewardError unless it returns one answer per question.
    """
    answers: dict[int, Answer] = {}
    able: list[int] = []
    for k, samples in enumerate(asked):
        try:
            for sample in samples:
                reward.check(sample)
            able.append(k)
        except ValueError as error:
            answers[k] = Answer(None, str(error))
    for start in range(0, len(able), reward.batch_size):
        batch = able[start : start + reward.batch_size]
        found = list(reward.ask([asked[k] for k in batch]))
        if len(found) != len(batch) or not all(isinstance(answer, Answer) for answer in found):
            kinds = ", ".join(sorted({type(answer).__name__ for answer in found})) or "nothing"
            got = f"expected one Answer for each of {len(batch)} questions, got {len(found)} of {kinds}"
            raise RewardError(f"{type(reward).__name__}.ask: {got}")
        answers |= zip(batch, found, strict=True)
    return [answers[k] for k in range(len(asked))]


def answers_in_process(reward: Reward, asked: Sequence[Question]) -> list[Answer]:
    """`answers_of` from one call; if it raises, from one call per question. Those that fail are missing."""
    try:
        return answers_of(reward, asked)
    except RewardError as error:  # it did not return answers, and would not for one question
        return [Answer(None, str(error))] * len(asked)
    except Exception as error:  # noqa: BLE001  (a reward's libraries may raise anything)
        if len(asked) == 1:
            return [Answer(None, reason_of(error))]
        traceback.print_exc()
        return [answers_in_process(reward, [samples])[0] for samples in asked]


def reason_of(error: Exception) -> str:
    """Why a value is missing."""
    return f"the reward raised {type(error).__name__}: {str(error)[:200]}"
