"""Interface of a suite: prompts, a file for each sample, and tables from our scores or from its own tools' results.

Invariants: means are over scored samples only; missing ones are counted and listed, never taken as 0. What files
contain is checked before it is counted: a DataError names the file and the value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, FiniteFloat, TypeAdapter, ValidationError

from prefgrpo.config.loading import EXPECTED
from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Score

SampleFile = tuple[Prompt, int, Path]
"""(prompt, index of the sample, file to write it to)"""
T = TypeVar("T")


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


Number = Annotated[FiniteFloat, BeforeValidator(_not_bool)]
"""A score in a suite's file: a finite number, or the text of one."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    mean: float | None
    """None if nothing was scored."""
    count: int
    """Number of values in the mean."""
    missing: int = 0
    """Number of missing values."""


@dataclass(frozen=True)
class Results:
    """A suite's results."""

    suite: str
    scored_by: str
    """How the numbers were obtained, and what they are comparable with."""
    summary: dict[str, float | None]
    """The suite's headline numbers; None if part of the data they are computed from is missing."""
    tables: dict[str, list[Row]]
    problems: list[str] = field(default_factory=list)
    """Missing items, each with its reason."""

    def markdown(self, max_problems: int = 0) -> str:
        """Tables and problems as Markdown; max_problems: list at most this many problems, 0: all."""
        lines = [f"# {self.suite}", "", self.scored_by, *(["", "| | |", "|---|---:|"] if self.summary else [])]
        lines += [f"| {name} | {_percent(value)} |" for name, value in self.summary.items()]
        for title, rows in self.tables.items():
            lines += ["", f"| {title} | mean | of | missing |", "|---|---:|---:|---:|"]
            lines += [f"| {row.name} | {_percent(row.mean)} | {row.count} | {row.missing} |" for row in rows]
        if self.problems:
            shown = self.problems[: max_problems or None]
            lines += ["", f"{len(self.problems)} missing:", "", *(f"- {problem}" for problem in shown)]
            lines += [f"- … and {len(self.problems) - len(shown)} more"] if len(shown) < len(self.problems) else []
        return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean; None if there are no values or any is missing."""
    numbers = list(values)
    return sum(map(float, numbers)) / len(numbers) if numbers and None not in numbers else None  # type: ignore[arg-type]


def rows_by_name(values: Iterable[tuple[str, float | None]]) -> list[Row]:
    """One row per name, in order of first appearance, from (name, value or None if missing)."""
    by_name: dict[str, list[float | None]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    rows = []
    for name, values_of_name in by_name.items():
        scored = [value for value in values_of_name if value is not None]
        rows.append(Row(name, mean(scored), len(scored), len(values_of_name) - len(scored)))
    return rows


class Suite(ABC):
    """Base class of suites."""

    title: ClassVar[str]
    source: ClassVar[str]
    """What --prompts must point to, and where to find it in the suite's repository."""
    samples: ClassVar[int]
    """Images or clips per prompt."""
    takes: ClassVar[str] = "image"
    reward: ClassVar[str] = ""
    """The reward in prefgrpo.rewards that scores its samples; empty: only the suite's own tools score them."""
    results_source: ClassVar[str]
    """What --results must point to: output of the suite's own tools."""
    shares_files: ClassVar[bool] = False
    """Whether equal prompts share a file."""

    @abstractmethod
    def read(self, path: Path) -> list[Prompt]:
        """Read the suite's prompts. Raises DataError if the file or folder is not the suite's."""

    @abstractmethod
    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """Every sample with its file below `out`; samples: per prompt, 0: the suite's own number."""

    def write_other_files(self, files: Sequence[SampleFile], out: Path, world: World) -> None:  # noqa: B027  (often none)
        """Write the layout's files other than the samples; the work is divided among ranks."""

    def options(self, given: Mapping[str, Any], question: str) -> dict[str, Any]:
        """Options of `reward`; question: judge template, empty: the reward's default. Raises DataError."""
        if question:
            raise DataError(f"--question: {self.title} uses no judge")
        return dict(given)

    def results(self, files: Sequence[Generated], scores: Sequence[Score], options: Mapping[str, Any]) -> Results:
        """Tables from the scores of `reward`."""
        raise TypeError(f"{type(self).__name__} has no reward")

    def write_scores(  # noqa: B027  (most suites' tools do not read external scores)
        self, files: Sequence[Generated], scores: Sequence[Score], out: Path
    ) -> None:
        """Write scores in the format of the suite's own tools."""

    @abstractmethod
    def read_results(self, path: Path) -> Results:
        """Tables from the output of the suite's own tools. Raises DataError if it cannot be read."""


def problems(files: Sequence[Generated], scores: Sequence[Score], depth: int) -> list[str]:
    """One line per file without a score, with its path below the output folder, which has `depth` parts."""
    missing = [(g.file.parts[-depth:], s.reason) for g, s in zip(files, scores, strict=True) if s.value is None]
    return [f"{'/'.join(parts)}: {reason}" for parts, reason in missing]


def read_text(path: Path, expected: str) -> str:
    """The text of a file, without a byte order mark. The DataError says what was expected."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected {expected}, as UTF-8: {error}") from error


def check(form: TypeAdapter[T], value: object, where: object, expected: str) -> T:
    """The value in that form. The DataError names the place, what was expected, and the first part that is wrong."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        part = "".join(f"{key}: " for key in first["loc"])
        known = EXPECTED.get(first["type"], "").format(**first.get("ctx", {}))
        wrong = f"expected {known}" if known else first["msg"]
        raise DataError(f"{where}: expected {expected}: {part}{wrong}, got {first['input']!r:.80}") from error
