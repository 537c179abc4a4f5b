"""A run folder, read for the report: metrics as columns, evaluation images, judged groups.

Invariant: a run at any stage can be read. Missing keys and nulls are NaN; a damaged file is left out and named in
`Run.problems`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from prefgrpo.run.log import read_metrics
from prefgrpo.run.run_folder import PRODUCTS, RunFolder, step_of

Floats = NDArray[np.float64]
Images = NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Rows of one kind as columns over the training steps, in ascending order."""

    steps: Floats
    columns: dict[str, Floats]

    def __contains__(self, name: str) -> bool:
        """Whether `name` was ever measured."""
        return name in self.columns

    def __getitem__(self, name: str) -> Floats:
        """Values [n] of a metric, NaN where it is missing."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def last(self, name: str) -> float:
        """Value of the last row, NaN if missing there."""
        return float(self[name][-1]) if len(self.steps) else float("nan")


@dataclass(frozen=True)
class Shown:
    """Images of one evaluation: prompts [n], before and now uint8 [n, H, W, 3] from the same initial noise, or of clips
    [n, F, H, W, 3]; the source images of edits, uint8 [n, H, W, 3], or None."""

    step: int
    prompts: list[str]
    before: Images
    now: Images
    sources: Images | None = None


@dataclass(frozen=True)
class Group:
    """One judged group: images uint8 [G, H, W, 3]; wins, counts [G, G] (row over column); rates [G], NaN missing."""

    step: int
    prompt: str
    images: Images
    wins: Floats
    counts: Floats
    rates: Floats


@dataclass(frozen=True)
class Run:
    """All that the report shows."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    train: Rows
    evals: dict[str, Rows]
    """Set name → rows; metric names without the set's prefix."""
    shown: dict[str, list[Shown]]
    groups: list[Group]
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        ends = [rows.steps[-1] for rows in (self.train, *self.evals.values()) if len(rows.steps)]
        return int(max(ends, default=0))

    @property
    def planned(self) -> int:
        """Steps in the configuration, 0 if unknown."""
        steps = self._train.get("steps")
        return steps if isinstance(steps, int) else 0

    @property
    def _train(self) -> dict[str, Any]:
        section = self.config.get("train")
        return section if isinstance(section, dict) else {}

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: all steps, or the time limit (then its product lies in the folder)."""
        exported = any((self.folder / name).exists() for name in PRODUCTS)
        return 0 < self.planned <= self.step or (exported and bool(self._train.get("max_minutes")))

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go, None if unknown."""
        low = _number(self._train.get("clip_range"))
        high = _number(self._train.get("clip_range_high", low))
        high = low if np.isnan(high) else high
        return None if np.isnan(low) else (low, high)

    @property
    def best_set(self) -> str | None:
        """The evaluation set to judge the run by: 'test' once it was evaluated after step 0, else the one that was."""
        late = [name for name, rows in self.evals.items() if rows.steps[-1] > 0]
        return "test" if "test" in late else next(iter(late), None)


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises FileNotFoundError if it holds neither a configuration nor metrics."""
    files = RunFolder(folder)
    source = files.config
    if not source.is_file() and not files.metrics.is_file():
        expected = f"{source.name} or {files.metrics.name}"
        raise FileNotFoundError(f"{folder} is no run: expected {expected} in it; pass a folder runs/NAME")
    problems: list[str] = []
    text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
    config = _guard(source, problems, lambda path: yaml.safe_load(text))
    rows = [r for r in read_metrics(files.metrics) if isinstance(r, dict) and isinstance(r.get("step"), int)]
    sets = sorted({str(r["set"]) for r in rows if r.get("kind") == "eval" and r.get("set")})
    evals = {name: columns([_unprefixed(r, name) for r in rows if r.get("set") == name]) for name in sets}
    shown = {name: found for name in sets if (found := _shown(files, name, problems))}
    train = columns([r for r in rows if r.get("kind") == "train"])
    groups = _groups(files, problems)
    return Run(folder, config if isinstance(config, dict) else {}, text, train, evals, shown, groups, problems)


def columns(rows: list[dict[str, Any]]) -> Rows:
    """Rows as columns; the last row of a step counts; metrics without a single number are dropped."""
    by_step = {row["step"]: row for row in rows}
    steps = sorted(by_step)
    names = dict.fromkeys(k for row in rows for k, v in row.items() if k != "step" and _is_number(v))
    table = {name: np.array([_number(by_step[s].get(name)) for s in steps], dtype=np.float64) for name in names}
    return Rows(np.array(steps, dtype=np.float64), {k: v for k, v in table.items() if not np.isnan(v).all()})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) and np.isfinite(value) else float("nan")


def _unprefixed(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {k.removeprefix(f"{name}/"): v for k, v in row.items()}


def _shown(run: RunFolder, name: str, problems: list[str]) -> list[Shown]:
    listing = run.prompts(name)
    texts = _guard(listing, problems, lambda path: json.loads(path.read_text(encoding="utf-8"))) or []
    prompts = [str(t) for t in texts] if isinstance(texts, list) else []
    origin = run.sources(name)
    sources = _guard(origin, problems, lambda path: np.load(path)["sources"]) if origin.is_file() else None

    def load(path: Path) -> Shown:
        with np.load(path, allow_pickle=False) as file:
            before, now = file["before"], file["now"]
        if before.shape != now.shape or before.ndim not in (4, 5) or before.dtype != np.uint8:
            raise ValueError(f"expected before and now as uint8 [n, (F,) H, W, 3], got {before.shape} and {now.shape}")
        names = (prompts + [""] * len(now))[: len(now)]
        shown = sources if sources is not None and sources.ndim == 4 and len(sources) == len(now) else None
        return Shown(step_of(path), names, before, now, shown)

    found = [_guard(path, problems, load) for path in run.all_shown(name)]
    return [s for s in found if s is not None and len(s.now)]


def _groups(run: RunFolder, problems: list[str]) -> list[Group]:
    def load(path: Path) -> list[Group]:
        with np.load(path, allow_pickle=False) as file:
            parts = [file[key] for key in ("prompts", "images", "wins", "counts", "rates")]
        _, images, wins, counts, rates = (p.shape for p in parts)
        k, size = rates
        if len(images) != 5 or images[:2] != (k, size) or wins != (k, size, size) or counts != wins:
            raise ValueError(f"expected k groups of G images, got shapes {[p.shape for p in parts]}")
        return [Group(step_of(path), str(p), i, w, c, r) for p, i, w, c, r in zip(*parts, strict=True)]

    return [group for path in run.all_groups() for group in _guard(path, problems, load) or []]


def _guard(path: Path, problems: list[str], load: Callable[[Path], T]) -> T | None:
    """`load(path)`; a missing or damaged file gives None and an entry in `problems`."""
    try:
        return load(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, yaml.YAMLError) as error:
        problems.append(f"{path.name} could not be read: {error}")
    return None
