"""A per-rank metric value with its reduction over ranks."""

from __future__ import annotations

from typing import Literal

Reduction = Literal["sum", "max", "mean"]


class Metric(float):
    """A float with its reduction over ranks (a plain float is averaged)."""

    reduction: Reduction
    timed: bool
    """Whether it depends on clocks, servers or earlier attempts and is therefore logged under `time/`."""
    weight: float
    """Its weight in a mean over ranks: the number of items that it averages."""

    def __new__(cls, value: float, reduction: Reduction = "mean", timed: bool = False, weight: float = 1.0) -> Metric:
        """`value` with its reduction."""
        metric = super().__new__(cls, value)
        metric.reduction = reduction
        metric.timed = timed
        metric.weight = weight
        return metric
