"""A judge's verdicts, and the interface of pairwise judges.

A verdict is P(first is better) in [0, 1]; a tie is 0.5, a verdict like any other. A failed comparison has
`first is None` and a reason; it is never counted as 0.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefgrpo.config.recipe import UserError

if TYPE_CHECKING:
    from prefgrpo.data.media import Media

Pair = tuple[int, int]
"""(first shown, second shown): indices into a group."""


class JudgeError(UserError, RuntimeError):
    """A judge cannot be used; the message says what was expected, what was found, and what to do."""


@dataclass(frozen=True)
class Verdict:
    """A judge's answer to one question: which of two media is better, or another one."""

    first: float | None
    """P(first is better), or P(first label), in [0, 1]; None if it is missing or the template asks for none."""
    reason: str = ""
    """Why the answer is unusable; '' if it is usable."""
    latency_s: float = 0.0
    """Seconds from question to answer, including waiting and retries."""
    raw: str = ""
    """What the judge wrote; '' if it did not answer."""
    retries: int = 0
    """Number of retries."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named scores, or P(first) per category; unreadable ones are left out."""


class PairJudge(ABC):
    """A backend that compares pairs of media for a prompt."""

    streams: bool
    """True: pairs may be sent one by one with `submit`, which does not block; False: whole groups, synchronously."""
    clips: bool = False
    """Whether it accepts videos."""
    answer_s: float = 0.0
    """Timeout of one answer in seconds; 0: none."""

    @abstractmethod
    def judge_group(
        self, prompt: str, media: Sequence[Media], pairs: Sequence[Pair], source: Sequence[Media] = ()
    ) -> list[Verdict]:
        """Verdicts for ordered pairs of one prompt's media, in order; never raises for a single failed pair.

        source: the source images if the media are edits.
        """
