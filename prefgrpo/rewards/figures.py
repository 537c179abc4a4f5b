"""The judge's metrics of a step, from every comparison that was planned.

Invariant: a figure that does not exist (latency without an answer, inconsistency without swapped pairs) is left out,
never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefgrpo.rewards.base import Comparison
from prefgrpo.rewards.flight import Flight, busy_s


def judge_metrics(groups: list[list[Comparison]], flights: Sequence[Flight], wait_s: float) -> dict[str, float]:
    """judge/… metrics of a step from every group's comparisons."""
    every = [c for group in groups for c in group]
    answered = [p for c in every if (p := c.verdict.first) is not None]
    failures = len(every) - len(answered)
    busy = busy_s(flights)
    metrics = {
        "judge/requests": float(len(every)),
        "judge/retries": float(sum(c.verdict.retries for c in every)),
        "judge/failures": float(failures),
        "judge/busy_s": busy,
        "judge/wait_s": wait_s,
        "judge/queue_max": float(sum(f.peak for f in flights)),
        "judge/queue_mean": sum(f.waited_s for f in flights) / busy if busy else 0.0,
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
