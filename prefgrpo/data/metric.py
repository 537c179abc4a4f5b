"""A number that every rank reports, and how the ranks' numbers become one."""

from __future__ import annotations

from typing import Literal

Reduction = Literal["sum", "max", "mean"]


class Metric(float):
    """A number that carries its reduction over ranks (a plain float is averaged)."""

    reduction: Reduction
    timed: bool
    """It depends on clocks, servers or earlier attempts, not on the run: its key is logged under `time/`."""
    weight: float
    """In a mean over ranks: how many things it is the mean of."""

    def __new__(cls, value: float, reduction: Reduction = "mean", timed: bool = False, weight: float = 1.0) -> Metric:
        """`value` with its reduction."""
        metric = super().__new__(cls, value)
        metric.reduction, metric.timed, metric.weight = reduction, timed, weight
        return metric
