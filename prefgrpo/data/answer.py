"""An answer to a question about images or clips: of a judge, of a reward about a sample, or about a pair of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A score, or P(first is better) in [0, 1], where a tie is 0.5; or why it is missing."""

    value: float | None
    """The score or probability; None if it is missing, or if a judge's template asks for parts only."""
    reason: str = ""
    """Why it is missing; '' if it is not."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named sub-scores, or P(first) per category; unreadable ones are left out."""
    raw: str = ""
    """What a judge wrote; '' if it did not answer, or no judge was asked."""
    seconds: float = field(default=0.0, compare=False)
    """From question to answer, including waiting and retries."""
    retries: int = field(default=0, compare=False)
    """Number of retries."""

    def finite(self) -> Answer:
        """This answer with its value as a float; missing, with the reason, if the value is not finite."""
        if self.value is None:
            return replace(self, reason=self.reason or "the reward gave no reason")
        value = float(self.value)
        if math.isfinite(value):
            return replace(self, value=value)
        return replace(self, value=None, reason=f"the reward returned {value}")

    def row(self) -> dict[str, Any]:
        """As JSON: value, or null with the reason, and parts; non-finite numbers become null."""
        answer = self.finite()
        row: dict[str, Any] = {"value": answer.value} | ({"reason": answer.reason} if answer.value is None else {})
        if self.parts:
            row["parts"] = {name: float(v) if math.isfinite(v) else None for name, v in self.parts.items()}
        return row
