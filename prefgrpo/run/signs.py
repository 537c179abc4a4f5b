"""Early signs of reward hacking: metrics that tend to get worse before the reward shows it.

    diversity            pixel distance within groups: mean of the last WINDOW steps < LESS_DIVERSE · first WINDOW steps
    order_inconsistency  share of verdicts that flip when swapped: likewise > MORE_INCONSISTENT · the first, and > LEAST
    monitors             an evaluation metric is FALLEN (relative) below its best while a trained one is at its best

The limits come from the demo, whose runs that got worse had crossed them. Invariant: the signs depend only on the run's
metrics rows, so a resumed run reports the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prefgrpo.run.metrics import PARTS_OF_WINS

Sign = Literal["diversity", "order_inconsistency", "monitors"]
SIGNS: tuple[Sign, ...] = get_args(Sign)
WINDOW, LESS_DIVERSE, MORE_INCONSISTENT, LEAST, FALLEN = 10, 0.45, 4.0, 0.15, 0.08
DIVERSITY, INCONSISTENCY = "diversity/pixels", "judge/order_inconsistency"


def pixel_distance(images: NDArray[np.uint8]) -> float:
    """RMS pixel difference between two of G images or clips [G, …], with pixels in 0 … 1: √(2 · variance)."""
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255.0
    return float(np.sqrt(2.0 * pixels.var(axis=0, ddof=1, dtype=np.float64).mean()))


class HackingMonitor:
    """Watches the rows of a run; reports a sign when it appears, and again only after it had disappeared."""

    def __init__(self, trained: Iterable[str], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """trained: names of the rewards with non-zero weight. rows: earlier rows of metrics.jsonl of a resumed run."""
        self._trained = set(trained)
        self._steps: dict[str, list[float]] = {DIVERSITY: [], INCONSISTENCY: []}
        self._best: dict[Any, dict[str, float]] = {}
        """Evaluation set → measure → the largest value so far."""
        self._shown = set[Sign]()
        for row in rows:
            self.add(row["kind"], row)

    def add(self, kind: str, row: Mapping[str, Any]) -> dict[Sign, str]:
        """Add a row (kind "train" or "eval"); returns the signs that are new with it, each with a description."""
        seen = self._step_signs(row) if kind == "train" else self._eval_signs(row)
        own: set[Sign] = {"diversity", "order_inconsistency"} if kind == "train" else {"monitors"}
        new = {sign: text for sign, text in seen.items() if sign not in self._shown}
        self._shown = (self._shown - own) | set(seen)
        return new

    def _step_signs(self, row: Mapping[str, Any]) -> dict[Sign, str]:
        out: dict[Sign, str] = {}
        for name, values in self._steps.items():
            values += [] if row.get(name) is None else [float(row[name])]
        first, last = self._means(DIVERSITY)
        if last < LESS_DIVERSE * first:
            out["diversity"] = f"images of a group differ by {last:.3f}, at the start by {first:.3f}"
        first, last = self._means(INCONSISTENCY)
        if last > max(MORE_INCONSISTENT * first, LEAST):
            out["order_inconsistency"] = f"{last:.0%} of the verdicts flip when swapped, at the start {first:.0%}"
        return out

    def _means(self, name: str) -> tuple[float, float]:
        """Means over the first and the last WINDOW steps with a value; NaN before there are 2 · WINDOW values."""
        values = self._steps[name]
        if len(values) < 2 * WINDOW:
            return float("nan"), float("nan")
        return float(np.mean(values[:WINDOW])), float(np.mean(values[-WINDOW:]))

    def _eval_signs(self, row: Mapping[str, Any]) -> dict[Sign, str]:
        name = row.get("set")
        values = {
            k: v for k, v in row.items() if k.startswith(f"{name}/") and not k.endswith(("_before", *PARTS_OF_WINS))
        }
        trained = {f"{name}/{way}{reward}" for reward in ("judge", *self._trained) for way in ("", "win_")}
        known = self._best.setdefault(name, {})
        best = {k: known.get(k, np.nan) for k in values}
        known |= {k: max(float(v), known.get(k, v)) for k, v in values.items() if v is not None}
        rising = [k for k, v in values.items() if k in trained and v is not None and v >= best[k]]
        fallen = [
            f"{k} fell from {best[k]:.3f} to {v:.3f}"
            for k, v in values.items()
            if k not in trained and "/win_" not in k and v is not None and v < best[k] - FALLEN * abs(best[k])
        ]
        return {"monitors": f"{', '.join(fallen)}, while {', '.join(rising)} rose"} if rising and fallen else {}
