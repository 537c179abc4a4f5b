"""What is in flight at a reward during one step, its latency, and the step's judge metrics.

Invariant: rates are over comparisons that were planned; a figure that does not exist (latency without an answer,
inconsistency without swapped pairs) is left out, never 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from prefgrpo.rewards.base import Comparison


class Flight:
    """Counts of a step's requests; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first_sent: float | None = None
        self.last_done: float | None = None
        self.depth = 0
        self.peak = 0
        self.seconds: list[float] = []

    def sent(self) -> None:
        """One request was submitted."""
        with self._lock:
            self.first_sent = self.first_sent or time.monotonic()
            self.depth += 1
            self.peak = max(self.peak, self.depth)

    def done(self, seconds: float | None = None) -> None:
        """One request was answered, failed or was cancelled, `seconds` after it was submitted."""
        with self._lock:
            self.last_done = time.monotonic()
            self.depth -= 1
            if seconds is not None:
                self.seconds.append(seconds)

    def latency(self, prefix: str) -> dict[str, float]:
        """p50 and p95 of the seconds per request (an in-process reward: of its one call for the step)."""
        with self._lock:
            seconds = list(self.seconds)
        if not seconds:
            return {}
        p50, p95 = np.percentile(seconds, [50, 95]).tolist()
        return {f"{prefix}latency_p50": p50, f"{prefix}latency_p95": p95}


def busy_s(flights: Sequence[Flight]) -> float:
    """Seconds from the first submission to the last answer so far, 0 before one."""
    first = [f.first_sent for f in flights if f.first_sent]
    last = [f.last_done for f in flights if f.last_done]
    return max(last) - min(first) if first and last else 0.0


def judge_metrics(groups: list[list[Comparison]], flights: Sequence[Flight], wait_s: float) -> dict[str, float]:
    """judge/… metrics of a step from every group's comparisons."""
    every = [c for group in groups for c in group]
    answered = [p for c in every if (p := c.verdict.first) is not None]
    failures = len(every) - len(answered)
    metrics = {
        "judge/requests": float(len(every)),
        "judge/retries": float(sum(c.verdict.retries for c in every)),
        "judge/failures": float(failures),
        "judge/failure_rate": failures / len(every),
        "judge/busy_s": busy_s(flights),
        "judge/wait_s": wait_s,
        "judge/queue_max": float(sum(f.peak for f in flights)),
    }
    if answered:
        latencies = [c.verdict.latency_s for c in every if c.verdict.first is not None]
        metrics["judge/latency_p50"], metrics["judge/latency_p95"] = np.percentile(latencies, [50, 95]).tolist()
        metrics["judge/tie_rate"] = float(np.mean([p == 0.5 for p in answered]))
        metrics["judge/position_bias"] = float(np.mean([(np.sign(p - 0.5) + 1) / 2 for p in answered]))
    swapped = [s for group in groups for s in _swaps(group)]
    if swapped:
        metrics["judge/order_inconsistency"] = float(np.mean(swapped))
    return metrics


def _swaps(group: list[Comparison]) -> list[bool]:
    """For every pair judged in both orders: do the two orders name different winners?"""
    found = {(c.first, c.second): p for c in group if (p := c.verdict.first) is not None}
    both = [(p, found[j, i]) for (i, j), p in found.items() if i < j and (j, i) in found]
    return [np.sign(p - 0.5) != np.sign(0.5 - q) for p, q in both]
