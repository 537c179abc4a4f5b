"""The result of comparing a policy with another one on held-out prompts: win rates with intervals, and means.

Used in training (against the initial policy) and by `prefgrpo evaluate` (against any). Intervals are bootstrap
percentiles over prompts, because images of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefgrpo.parallel.world import World

MIN_PROMPTS = 30
"""Below this number of prompts, a result is called inconclusive."""
Row = dict[str, float]
"""A pair's measures; NaN where one is missing: of reward r `r` (now), `r_before` and `win_r` (1, a tie ½, 0); of
judge j `win_j`, `win_j_first` and `win_j_second`, by the order in which the image of the policy was shown."""


@dataclass(frozen=True)
class Value:
    """A mean over images."""

    mean: float
    """Over those that have a value; NaN if none has one."""
    missing: float
    """Share of images that have none."""

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Value:
        """The mean of [n] values, NaN where missing."""
        lost = np.isnan(values)
        return cls(float(values[~lost].mean()) if not lost.all() else math.nan, float(lost.mean()))

    def metrics(self, key: str) -> dict[str, float]:
        """Under `key`, with the missing share if there is one."""
        return {key: self.mean} | ({f"{key}_missing": self.missing} if self.missing else {})


@dataclass(frozen=True)
class WinRate:
    """How often the policy's images beat the other one's."""

    rate: Value
    low: float
    """Lower end of the 95 % interval; NaN without any verdict."""
    high: float
    prompts: int
    """Number of prompts with a verdict."""
    first: Value | None = None
    """The rate where the policy's image was shown first; None if the two orders are not distinguished."""
    second: Value | None = None

    @property
    def verdict(self) -> str:
        """Interpretation of the interval."""
        return verdict(self.low, self.high, self.prompts)

    def metrics(self, key: str) -> dict[str, float]:
        """Rate, interval, and details that there are."""
        out = self.rate.metrics(key)
        if self.prompts:
            out |= {f"{key}_prompts": float(self.prompts)} if self.rate.missing else {}
            out |= {f"{key}_low": self.low, f"{key}_high": self.high}
        for end, value in (("first", self.first), ("second", self.second)):
            out |= {} if value is None else value.metrics(f"{key}_{end}")
        return out


@dataclass(frozen=True)
class Mean:
    """A reward's mean on the images of the policy and of the other one."""

    now: Value
    before: Value

    def metrics(self, key: str) -> dict[str, float]:
        """Both means."""
        return self.now.metrics(key) | self.before.metrics(f"{key}_before")


@dataclass(frozen=True)
class Comparison:
    """All measures on one set of prompts, by judge or reward; a judge's names are judge, judge2 …"""

    name: str
    """The set: dev or test."""
    win_rates: dict[str, WinRate]
    means: dict[str, Mean]

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""
        out: dict[str, float] = {}
        for name, mean in self.means.items():
            out |= mean.metrics(f"{self.name}/{name}")
        for name, win in self.win_rates.items():
            out |= win.metrics(f"{self.name}/win_{name}")
        return out

    def line(self, step: int) -> str:
        """The summary line: means now (and before), win rates with their intervals."""
        parts = [f"{name} {m.before.mean:.3f} → {m.now.mean:.3f}" for name, m in self.means.items()]
        for name, win in self.win_rates.items():
            interval = f" [{win.low:.3f}, {win.high:.3f}]" if win.prompts else ""
            orders = ""
            if win.first is not None and win.second is not None:
                orders = f" (orders {win.first.mean:.3f} / {win.second.mean:.3f})"
            missing = f" ({win.rate.missing:.1%} missing)" if win.rate.missing else ""
            parts.append(f"win rate by {name} {win.rate.mean:.3f}{interval}{orders}{missing}")
        return f"eval at step {step}, {self.name}: " + ", ".join(parts)


def over_ranks(world: World, name: str, group: NDArray[np.int64], table: Sequence[Row]) -> Comparison:
    """The comparison on the set `name` from the rows of all ranks. group: prompt index per local row."""
    prompts, rows = zip(*world.gather_items(zip(group.tolist(), table, strict=False)), strict=True)
    return compared(name, np.array(prompts), rows)


def compared(name: str, group: NDArray[np.int64], rows: Sequence[Row]) -> Comparison:
    """The comparison from one row per pair of images; group: prompt index per row."""
    names = sorted({column for row in rows for column in row})
    columns = {column: np.array([row.get(column, np.nan) for row in rows]) for column in names}
    wins = [c for c in columns if c.startswith("win_") and not c.endswith(("_first", "_second"))]
    return Comparison(
        name,
        {column.removeprefix("win_"): _win_rate(columns, column, group) for column in wins},
        {c: Mean(Value.of(columns[c]), Value.of(columns[f"{c}_before"])) for c in columns if f"{c}_before" in columns},
    )


def _win_rate(columns: dict[str, NDArray[np.float64]], column: str, group: NDArray[np.int64]) -> WinRate:
    low, high, prompts = interval(group, columns[column])
    first, second = (Value.of(columns[key]) if (key := f"{column}_{end}") in columns else None for end in ORDERS)
    return WinRate(Value.of(columns[column]), low, high, prompts, first, second)


ORDERS = ("first", "second")


def interval(group: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[float, float, int]:
    """(low, high) of the 95 % bootstrap interval over prompts (2000 draws, fixed seed) of the mean over images, and the
    number of prompts that have a value; NaN is missing."""
    there = ~np.isnan(values)
    if not there.any():
        return math.nan, math.nan, 0
    ids, inverse = np.unique(group[there], return_inverse=True)
    total = np.bincount(inverse, values[there])
    count = np.bincount(inverse)
    draws = np.random.default_rng(0).integers(len(ids), size=(2000, len(ids)))
    means = total[draws].sum(1) / count[draws].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high), len(ids)


def verdict(low: float, high: float, prompts: int) -> str:
    """Interpretation of a win rate's interval: better, worse, or inconclusive if it contains ½ or prompts are few.

    prompts: how many have a verdict.
    """
    if math.isnan(low):
        return "inconclusive: no verdicts"
    if prompts < MIN_PROMPTS:
        return f"inconclusive: fewer than {MIN_PROMPTS} prompts"
    if low <= 0.5 <= high:
        return "inconclusive: the interval contains 50 %"
    return "better" if low > 0.5 else "worse"
