"""What a judge answers, and how a judge of pairs is called.

A verdict is P(first is better) in [0, 1]; a tie is 0.5, a verdict like any other. A comparison that failed has
`first is None` with a reason: missing is never 0.5. An answer is the same for any question.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefgrpo.data.media import Media

Pair = tuple[int, int]
"""(first shown, second shown): indices into a group."""


_ROUNDING = 0.01
"""A log-probability above 0 by more than this is none."""


class JudgeError(RuntimeError):
    """A judge that cannot be used; the message says what was expected, what came, what to do."""


@dataclass(frozen=True)
class Answer:
    """A judge's answer to one question."""

    value: float | None
    """P(first label) in [0, 1], or the verdict on a pair; None if there is none or the template asks for none."""
    reason: str = ""
    """Why nothing could be read; '' if something could."""
    latency_s: float = 0.0
    """Seconds from the question to the answer, waiting and retries included."""
    raw: str = ""
    """What the judge wrote."""
    retries: int = 0
    """Requests beyond the first that this question took."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named scores, or P(first) per category; a name that could not be read is not in it."""
    cached: bool = False
    """It was found in the cache: nobody was asked."""


@dataclass(frozen=True)
class Verdict(Answer):
    """A judge's answer to one ordered pair; parts: P(first) per category."""

    @property
    def first(self) -> float | None:
        """P(first is better) in [0, 1]; None if the comparison failed."""
        return self.value


def two_label_softmax(first: float, second: float, min_mass: float) -> tuple[float | None, str]:
    """(sigmoid(first − second), '') from the labels' log-probabilities, or (None, why not).

    Missing where the two labels together have less than `min_mass` of the answer's probability, or are not finite.
    """
    mass = math.exp(min(first, 0.0)) + math.exp(min(second, 0.0))
    if not mass >= min_mass or math.isnan(first - second) or max(first, second) > _ROUNDING:
        return None, f"the labels have only {mass:.2g} of the answer's probability (at least {min_mass:g} expected)"
    gap = max(-700.0, min(700.0, first - second))
    return 1.0 / (1.0 + math.exp(-gap)), ""


class PairJudge(ABC):
    """A backend that compares two media for a prompt."""

    streams: bool
    """True: `submit` returns at once and pairs may be sent one by one; False: whole groups on the calling thread."""
    clips: bool = False
    """Whether it takes videos."""
    answer_s: float = 0.0
    """Longest that one answer may take, in seconds, where there is a limit."""

    @abstractmethod
    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Verdict]:
        """Verdicts for ordered pairs of one prompt's media, in order; never raises for a single failed pair.

        source: the images that the media are edits of. It is given where there are any.
        """

    def submit(self, prompt: str, first: Media, second: Media, source: Sequence[Media] = ()) -> Future[Verdict]:
        """Send one pair without waiting (streaming backends only)."""
        raise TypeError(f"{type(self).__name__} judges whole groups; use judge_group")

    def close(self) -> None:  # noqa: B027  (a backend without resources has nothing to release)
        """Release what the backend holds."""
