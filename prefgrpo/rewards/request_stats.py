"""Counts a reward's in-flight requests during one step, and their latency.

Invariant: every request sent is counted as done exactly once, however it ends; latency is only recorded for answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from prefgrpo.data.metric import Metric

DEADLINE_PASSED = "no answer before the step's deadline; the server hangs, or deadline_s is too short"
"""Reason for a sample or pair that was still unanswered at the deadline."""


class RequestStats:
    """Counts of a step's requests; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first_sent: float | None = None
        self.last_done: float | None = None
        self.in_flight = self.peak = 0
        self.waited_s = 0.0
        """Total duration of all requests so far, in seconds."""
        self._at = 0.0
        self.seconds: list[float] = []

    def sent(self) -> None:
        """Record that a request was submitted."""
        with self._lock:
            self._count(1)
            self.first_sent = self.first_sent or self._at
            self.peak = max(self.peak, self.in_flight)

    def done(self, seconds: float | None = None) -> None:
        """Record that a request was answered, failed or was cancelled, `seconds` after it was submitted."""
        with self._lock:
            self._count(-1)
            self.last_done = self._at
            if seconds is not None:
                self.seconds.append(seconds)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self.waited_s += self.in_flight * (now - self._at)
        self._at, self.in_flight = now, self.in_flight + change


def latency(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p95 of the seconds per request (for an in-process reward: of each of its calls)."""
    if not seconds:
        return {}
    p50, p95 = np.percentile(list(seconds), [50, 95]).tolist()
    return {f"{prefix}latency_p50": Metric(p50, timed=True), f"{prefix}latency_p95": Metric(p95, "max", timed=True)}
