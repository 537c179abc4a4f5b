"""The result of comparing a policy with another one on held-out prompts: win rates with intervals, and means.

Used in training (against the initial policy) and by `prefgrpo evaluate` (against any). Intervals are bootstrap
percentiles over prompts, because images of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_PROMPTS = 30
"""Below this number of prompts, a result is called inconclusive."""
ORDERS = ("_first", "_second")
Row = dict[str, float]
"""A pair's measures; NaN where one is missing: of reward r `r` (now), `r_before` and `win_r` (1, a tie ½, 0); of a
judge j `win_j`, `win_j_first` and `win_j_second`, by the order in which the policy's image was shown."""


class Mean(NamedTuple):
    """The mean of the values that there are, NaN if there is none, and the share that is missing."""

    value: float
    missing: float


@dataclass(frozen=True)
class WinRate:
    """How often the policy's images beat the other ones; NaN without any verdict."""

    rate: float
    missing: float
    """Share of images without a verdict."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    prompts: int
    """Number of prompts with a verdict."""
    first: float | None = None
    """The rate where the policy's image was shown first; None if the two orders are not distinguished."""
    second: float | None = None

    @property
    def verdict(self) -> str:
        """Interpretation of the interval."""
        return verdict(self.low, self.high, self.prompts)

    def __str__(self) -> str:
        text = f"{self.rate:.3f}"
        if self.prompts:
            text += f" [{self.low:.3f}, {self.high:.3f}]"
        if self.first is not None and self.second is not None:
            text += f" (orders {self.first:.3f} / {self.second:.3f})"
        return text + (f" ({self.missing:.1%} missing)" if self.missing else "")


@dataclass(frozen=True)
class Comparison:
    """All measures on one set of prompts."""

    name: str
    """The set: dev or test."""
    means: dict[str, Mean]
    """Of every measure of `Row`."""
    win_rates: dict[str, WinRate]
    """By reward; that of the first judge is called judge."""
    changes: dict[str, tuple[float, float, int]]
    """By reward: 95 % interval of the mean change of a pair, and the number of prompts with one."""
    accuracy: WinRate | None = None
    """Share of held-out pairs from files that the policy's implicit reward ranks rightly (`offline`)."""
    margin: float = math.nan
    """Mean of these rewards of the winners minus those of the losers."""

    @property
    def rewards(self) -> dict[str, tuple[Mean, Mean]]:
        """Means of the rewards' values: now, and before."""
        names = [name for name in self.means if f"{name}_before" in self.means]
        return {name: (self.means[name], self.means[f"{name}_before"]) for name in names}

    @property
    def win_rate(self) -> float | None:
        """The win rate by the judge, or else by the first reward."""
        by = self.win_rates.get("judge") or next(iter(self.win_rates.values()), None)
        return by.rate if by else None

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""
        out: dict[str, float] = {}
        for name, mean in self.means.items():
            out[f"{self.name}/{name}"] = mean.value
            if mean.missing:
                out[f"{self.name}/{name}_missing"] = mean.missing
        for name, win in self.win_rates.items():
            key = f"{self.name}/win_{name}"
            if win.prompts:
                out |= {f"{key}_low": win.low, f"{key}_high": win.high}
            if win.prompts and win.missing:
                out[f"{key}_prompts"] = float(win.prompts)
        for name, (low, high, prompts) in self.changes.items():
            key = f"{self.name}/{name}"
            if prompts:
                out |= {f"{key}_low": low, f"{key}_high": high, f"{key}_prompts": float(prompts)}
        if self.accuracy is not None:
            key = f"{self.name}/pairs"
            out |= {f"{key}_accuracy": self.accuracy.rate, f"{key}_margin": self.margin}
            out |= {f"{key}_low": self.accuracy.low, f"{key}_high": self.accuracy.high}
            out[f"{key}_prompts"] = float(self.accuracy.prompts)
        return out

    def line(self, step: int) -> str:
        """The summary line: means now (and before), win rates with their intervals."""
        parts = [f"{name} {before.value:.3f} → {now.value:.3f}" for name, (now, before) in self.rewards.items()]
        parts += [f"win rate by {name} {win}" for name, win in self.win_rates.items()]
        parts += [f"held-out pairs ranked rightly {self.accuracy}"] if self.accuracy else []
        return f"eval at step {step}, {self.name}: " + (", ".join(parts) or "images, without a reward")


def compared(name: str, group: Sequence[int], rows: Sequence[Row]) -> Comparison:
    """The comparison on the set `name` from one row per pair of images; group: prompt index per row."""
    names = sorted({column for row in rows for column in row})
    columns = {column: np.array([row.get(column, np.nan) for row in rows]) for column in names}
    means = {column: mean_of(values) for column, values in columns.items()}
    win_rates: dict[str, WinRate] = {}
    for column, values in columns.items():
        if column.startswith("win_") and not column.endswith(ORDERS):
            orders = [means[f"{column}{end}"].value for end in ORDERS if f"{column}{end}" in means]
            low, high, prompts = interval(np.array(group), values)
            win_rates[column.removeprefix("win_")] = WinRate(*means[column], low, high, prompts, *orders)
    pairs = {column: columns.get(f"{column}_before") for column in names}
    changes = {c: interval(np.array(group), columns[c] - old) for c, old in pairs.items() if old is not None}
    return Comparison(name, means, win_rates, changes)


def mean_of(values: NDArray[np.float64]) -> Mean:
    """The mean of the values that are not NaN."""
    lost = np.isnan(values)
    return Mean(float(values[~lost].mean()) if not lost.all() else math.nan, float(lost.mean()))


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
