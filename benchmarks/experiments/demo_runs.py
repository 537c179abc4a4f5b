"""Training runs in the demo's world, their evaluations as JSON files, and plots over several seeds.

A file grows with its run's evaluations; only incomplete runs are run again. Seconds are the process's CPU seconds
without evaluations, so that other load on the machine hardly counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_judge import machine
from benchmarks.blocks import rounded, write_json

ROOT = Path(__file__).resolve().parents[2]
Run = dict[str, Any]
COLOURS = ("#2a6f97", "#c1121f", "#e09f3e", "#588157", "#7b2cbf", "#4a4e69")


@dataclass(frozen=True)
class Columns:
    """Columns of `evaluations` besides the step, calls and training seconds so far."""

    evaluated: Mapping[str, str]
    """Column → metric of the evaluation."""
    stepped: Mapping[str, str]
    """Column → training metric, averaged over the steps since the previous evaluation; null at the start."""

    @property
    def names(self) -> tuple[str, ...]:
        """All columns in order."""
        return ("step", "calls", "seconds", *self.evaluated, *self.stepped)


T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval by Student's t, or NaN for a single number)."""
    n = len(numbers)
    return float(np.mean(numbers)), float(T95[n - 2] * np.std(numbers, ddof=1) / sqrt(n)) if n > 1 else np.nan


def spread(numbers: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """0.512 ± 0.031."""
    if not numbers:
        return "–"
    mean, half = interval(numbers)
    return f"{mean:{sign}.{digits}f}" + ("" if np.isnan(half) else f" ± {half:.{digits}f}")


class Watch:
    """Callbacks that record calls and CPU seconds of training, and a row per evaluation; steps are counted from
    `before`, the steps of the runs that this one continues."""

    def __init__(self, columns: Columns, calls: Callable[[dict[str, float]], float]) -> None:
        """calls: returns the number of judge calls of a step, given its metrics."""
        self.columns = columns
        self.write = lambda: None
        self.evaluations: list[list[float | None]] = []
        self.before = 0
        self._asked = calls
        self._calls = 0.0
        self._seconds = 0.0
        self._mark = 0.0
        self._since: list[list[float]] = []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """After a training step."""
        now = time.process_time()
        self._seconds = self._seconds + now - self._mark
        self._mark = now
        self._calls += self._asked(metrics)
        self._since.append([metrics[name] for name in self.columns.stepped.values()])

    def evaluation(self, step: int, name: str, metrics: dict[str, float]) -> None:
        """After an evaluation, whose seconds are not counted."""
        self._mark = time.process_time()
        if step == 0 and self.before:
            return  # the end of the run before
        stepped = np.mean(self._since, axis=0).tolist() if self._since else [None] * len(self.columns.stepped)
        measured = [metrics[name] for name in self.columns.evaluated.values()]
        self.evaluations.append(rounded([self.before + step, self._calls, self._seconds, *measured, *stepped]))
        self.write()
        self._since = []


def measure(
    recipe: Path, file: Path, facts: Run, watch: Watch, steps: int, every: int, output: str = "", **values: Any
) -> None:
    """Train with a recipe of the demo for `steps` steps, evaluating at the start and every `every` steps.

    An uninformative judge does not end the run. `file` receives the facts, the machine, columns and evaluations.
    output: where the run's folder is kept; by default it is removed. values: overrides of the recipe, or arguments of
    `Trainer`.
    """
    from prefgrpo import Trainer
    from prefgrpo.config.recipe import merge
    from prefgrpo.run import targets

    targets.PATIENCE_STEPS = steps + 1

    def write() -> None:
        found = facts | {"machine": machine(), "columns": watch.columns.names}
        write_json(file, found | {"evaluations": watch.evaluations})

    watch.write = write
    fixed = {
        "steps": steps, "trackers": [], "checkpoint": {"every": steps},
        "eval": {"every": every, "final_prompts": ""},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Trainer.from_recipe(
            recipe, output=output or folder, **merge(fixed, values), on_step=watch.step, on_evaluation=watch.evaluation
        ).train()


def recipe(name: str) -> Path:
    """The demo's recipe of an objective."""
    return ROOT / "scripts" / "demo" / f"{name}.yaml"


def ended(file: Path, steps: int) -> Run | None:
    """The run of a file if it reached its last step."""
    run = json.loads(file.read_text()) if file.exists() else {"evaluations": []}
    return run if run["evaluations"] and run["evaluations"][-1][0] >= steps else None


def gaps(names: Sequence[str], seeds: Sequence[int], done: Callable[[str, int], object]) -> str:
    """The runs that are not done: 'seed 1, 2 of `a`, `b`; seed 2 of `c`'; empty if all are."""
    without: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        if absent := tuple(seed for seed in seeds if not done(name, seed)):
            without.setdefault(absent, []).append(f"`{name}`")
    return "; ".join(f"seed {', '.join(map(str, absent))} of {', '.join(own)}" for absent, own in without.items())


def column(run: Run, name: str) -> list[float]:
    """One column of `evaluations`; NaN where it was not measured."""
    at = run["columns"].index(name)
    return [np.nan if row[at] is None else row[at] for row in run["evaluations"]]


@contextmanager
def drawing(path: Path, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """Panels [rows][columns] of a figure, written to `path` at the end; equal numbers give an identical file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefgrpo"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, squeeze=False, **options)
    yield panels
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def band(axes: Any, x: Sequence[Sequence[float]], y: Sequence[Sequence[float]], colour: str, **line: Any) -> None:
    """Plot the mean of y over seeds [n][k] against the mean of x, with the range over seeds as a band."""
    least = min(map(len, y))
    across = np.array([row[:least] for row in x]).mean(0)
    up = np.array([row[:least] for row in y])
    axes.plot(across, up.mean(0), color=colour, **line)
    axes.fill_between(across, up.min(0), up.max(0), color=colour, alpha=0.15, linewidth=0)
