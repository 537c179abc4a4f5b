"""Interface of a suite: prompts, a file for each sample, and tables from our scores or from its own tools' results.

Invariants: means are over scored samples only; missing ones are counted and listed, never taken as 0. The
contents of files are checked before they are counted: a DataError names the file and the value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import DataError, Prompt, read_prompts

SampleFile = tuple[Prompt, int, Path]
"""(prompt, index of the sample, file to write it to)"""
T = TypeVar("T")


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
    percent: bool = True
    """Whether the numbers are shares; False: grades, shown as they are."""

    def markdown(self, max_problems: int = 0) -> str:
        """Tables and problems as Markdown; max_problems: list at most this many problems, 0: all."""
        lines = [f"# {self.suite}", "", self.scored_by, "", "| | |", "|---|---:|"]
        lines += [f"| {name} | {self._shown(value)} |" for name, value in self.summary.items()]
        for title, rows in self.tables.items():
            lines += ["", f"| {title} | mean | of | missing |", "|---|---:|---:|---:|"]
            lines += [f"| {row.name} | {self._shown(row.mean)} | {row.count} | {row.missing} |" for row in rows]
        if self.problems:
            shown = self.problems[: max_problems or None]
            lines += ["", f"{len(self.problems)} missing:", "", *(f"- {problem}" for problem in shown)]
            lines += [f"- … and {len(self.problems) - len(shown)} more"] if len(shown) < len(self.problems) else []
        return "\n".join(lines) + "\n"

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{100 * value:.2f} %" if self.percent else f"{value:.2f}"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean; None if there are no values or any is missing."""
    numbers = list(values)
    return sum(map(float, numbers)) / len(numbers) if numbers and None not in numbers else None  # type: ignore[arg-type]


def rows_by_name(values: Iterable[tuple[str, float | None]]) -> list[Row]:
    """One row per name, in order of first appearance, from (name, value or None if missing)."""
    by_name: dict[str, list[float | None]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    scored = {name: [v for v in of_name if v is not None] for name, of_name in by_name.items()}
    return [Row(name, mean(there), len(there), len(by_name[name]) - len(there)) for name, there in scored.items()]


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
    reward_options: ClassVar[Mapping[str, Any]] = {}
    """Options of this reward that make it follow the suite's rule."""
    results_source: ClassVar[str] = ""
    """What --results must point to: output of the suite's own tools; empty: it is scored here only."""
    shares_files: ClassVar[bool] = False
    """Whether equal prompts share a file."""

    columns: ClassVar[str] = ""
    """The columns that its prompts need, as text."""

    def read(self, path: Path) -> list[Prompt]:
        """Read the suite's prompts. Raises DataError if the file or folder is not the suite's."""
        prompts = read_prompts(path, unique=False)
        if foreign := [prompt for prompt in prompts if not self.owns(prompt)]:
            found = f"{foreign[0]}: expected columns {self.columns}, got {', '.join(foreign[0].meta) or 'none'}"
            raise DataError(f"{path}: {found}; the suite's file: {self.source}")
        return prompts

    def owns(self, prompt: Prompt) -> bool:
        """Whether a row has the suite's columns."""
        return True

    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """Every sample with its file below `out`; samples: per prompt, 0: the suite's own number."""
        counts = [samples or self.samples_of(prompt) for prompt in prompts]
        numbered = [(prompt, k) for prompt, count in zip(prompts, counts, strict=True) for k in range(count)]
        return [(prompt, k, out / self.file(prompt, k, ending)) for prompt, k in numbered]

    def samples_of(self, prompt: Prompt) -> int:
        """The suite's number of samples of a prompt."""
        return self.samples

    @abstractmethod
    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """A sample's file, relative to the output folder."""

    def write_other_files(self, files: Sequence[SampleFile], out: Path) -> None:  # noqa: B027  (often none)
        """Write the layout's files other than the samples."""

    def results(self, files: Sequence[Generated], scores: Sequence[Answer], options: Mapping[str, Any]) -> Results:
        """Tables from the scores of `reward`."""
        raise TypeError(f"{type(self).__name__} has no reward")

    def write_scores(  # noqa: B027  (most suites' tools do not read external scores)
        self, files: Sequence[Generated], scores: Sequence[Answer], out: Path
    ) -> None:
        """Write scores in the format of the suite's own tools."""

    def read_results(self, path: Path) -> Results:
        """Tables from the output of the suite's own tools. Raises DataError if it cannot be read."""
        raise DataError(f"--results: {path}: {self.title} is scored here; expected no results of its own tools")


def problems(files: Sequence[Generated], scores: Sequence[Answer], depth: int = 2) -> list[str]:
    """One line per file without a score, with its path below the output folder, which has `depth` parts."""
    missing = [(g.file.parts[-depth:], s.reason) for g, s in zip(files, scores, strict=True) if s.value is None]
    return [f"{'/'.join(parts)}: {reason}" for parts, reason in missing]


def asked_by(options: Mapping[str, Any], judge: str) -> str:
    """The question, and what the numbers are comparable with; options: those of the reward; judge: the suite's own."""
    template = str(options.get("template", ""))
    if template.endswith(".py"):
        return f"the suite's own wording; comparable with published numbers if the judge is {judge}"
    words = f"the wording of {Path(template).name}" if template else "our own wording"
    return f"{words}; not comparable with published numbers, which are those of {judge} and the suite's wording"


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
        raise DataError(f"{where}: expected {expected}: {part}{first['msg']}, got {first['input']!r:.80}") from error
