"""What a suite is: prompts, where each sample's file lies, and tables, from scores or from its own tools' results.

Invariant: a mean is over what was scored; what is missing is counted beside it and named, never a 0.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Score

Place = tuple[Prompt, int, Path]
"""(prompt, number of the sample, its file)"""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    mean: float | None
    """None if nothing was scored."""
    count: int
    """How many values the mean is of."""
    missing: int = 0
    """How many more there should have been."""


@dataclass(frozen=True)
class Results:
    """A suite's numbers."""

    suite: str
    scored_by: str
    """By what, and what that is comparable with."""
    summary: dict[str, float | None]
    """The suite's headline numbers; None where something that they are made of is missing."""
    tables: dict[str, list[Row]]
    problems: list[str] = field(default_factory=list)
    """What is missing, each with its reason."""

    def json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def markdown(self, most_problems: int = 0) -> str:
        """Tables and problems as a page; most_problems: shows only so many of them, 0: all."""
        lines = [f"# {self.suite}", "", self.scored_by, *(["", "| | |", "|---|---:|"] if self.summary else [])]
        lines += [f"| {name} | {_percent(value)} |" for name, value in self.summary.items()]
        for title, rows in self.tables.items():
            lines += ["", f"| {title} | mean | of | missing |", "|---|---:|---:|---:|"]
            lines += [f"| {row.name} | {_percent(row.mean)} | {row.count} | {row.missing} |" for row in rows]
        if self.problems:
            shown = self.problems[: most_problems or None]
            lines += ["", f"{len(self.problems)} missing:", "", *(f"- {problem}" for problem in shown)]
            lines += [f"- … and {len(self.problems) - len(shown)} more"] if len(shown) < len(self.problems) else []
        return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean, None if there are no values or one of them is missing."""
    listed = list(values)
    return sum(map(float, listed)) / len(listed) if listed and None not in listed else None  # type: ignore[arg-type]


def tally(values: Iterable[tuple[str, float | None]]) -> list[Row]:
    """A row per name, in order of first appearance, of (name, value or None if missing)."""
    by_name: dict[str, list[float | None]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    rows = []
    for name, listed in by_name.items():
        scored = [value for value in listed if value is not None]
        rows.append(Row(name, mean(scored), len(scored), len(listed) - len(scored)))
    return rows


class Suite(ABC):
    """One suite."""

    title: ClassVar[str]
    source: ClassVar[str]
    """Which file or folder --prompts names, and where the suite keeps it."""
    samples: ClassVar[int]
    """Images or clips per prompt."""
    takes: ClassVar[str] = "image"
    reward: ClassVar[str] = ""
    """The reward that scores its files here; empty: only its own tools do."""
    own_results: ClassVar[str]
    """Which file or folder of its own tools --results names."""
    shares_files: ClassVar[bool] = False
    """Equal prompts have one file."""

    @abstractmethod
    def read(self, path: Path) -> list[Prompt]:
        """Its prompts. Raises DataError for anything else."""

    @abstractmethod
    def places(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[Place]:
        """Every sample with its file below `out`; samples: per prompt, 0: as many as the suite wants."""

    def finish(self, places: Sequence[Place], out: Path, world: World) -> None:  # noqa: B027  (most need nothing more)
        """Write what the layout has besides the samples, each rank its share."""

    def options(self, given: Mapping[str, Any], question: str) -> dict[str, Any]:
        """Options of its reward; question: the judge's template, empty: the reward's own. Raises DataError."""
        if question:
            raise DataError(f"--question: {self.title} asks no judge")
        return dict(given)

    def results(self, files: Sequence[Generated], scores: Sequence[Score], options: Mapping[str, Any]) -> Results:
        """Its tables from its reward's scores."""
        raise TypeError(f"{type(self).__name__} has no reward")

    def write_scores(  # noqa: B027  (most of the suites' tools read no scores of others)
        self, files: Sequence[Generated], scores: Sequence[Score], out: Path
    ) -> None:
        """Write scores as the suite's own tools write them."""

    @abstractmethod
    def read_results(self, path: Path) -> Results:
        """Its tables from what its own tools wrote. Raises DataError for anything else."""


def problems(files: Sequence[Generated], scores: Sequence[Score]) -> list[str]:
    """A line for every file without a score."""
    return [f"{g.file.name}: {s.reason}" for g, s in zip(files, scores, strict=True) if s.value is None]


def only_folder(path: Path, title: str, source: str) -> Path:
    """The path if it is a folder, else DataError."""
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder of {title}: {source}")
    return path


def read_json(path: Path, expected: str) -> Any:
    """The content of a JSON file. Raises DataError that says what was expected."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected {expected}: {error}") from error
