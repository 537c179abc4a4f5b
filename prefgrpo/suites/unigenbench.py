"""UniGenBench (arXiv 2510.18701): 600 prompts × 4 images, 1 to 10 test points each, marked by a served judge.

    a test point's mark is 1 or 0; each row is the fraction of ones among all marks of that name, over all images

10 primary dimensions (the name up to its '-') and 27 test points. If a reply, or the test points of a table row (row
509 of test_prompts_en_long.csv), cannot be parsed, its marks are left out of every denominator, as in the suite; here
they are also counted and listed.
"""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Json, TypeAdapter

from prefgrpo.data.file_names import Generated, file_name
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.rewards.base import Score
from prefgrpo.rewards.unigenbench import points_of
from prefgrpo.suites.base import Results, SampleFile, Suite, check, mean, problems, read_text, rows_by_name

COLUMNS = ("index", "prompt", "testpoint", "output", "result_json", "img_path")
"""Columns of the table written by the suite's tools, one row per image."""
Mark = tuple[str, float | None]
"""(name of the test point, 1 or 0; None if the reply could not be parsed)"""


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class _Row:
    """A row of the suite's results."""

    testpoint: Annotated[list[str], BeforeValidator(_literal)]
    result_json: str
    img_path: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class _Result:
    """The content of a cell result_json."""

    score: list[Annotated[int, Field(ge=0, le=1)]]


_ROW = TypeAdapter(_Row)
_RESULT: TypeAdapter[_Result] = TypeAdapter(Json[_Result])


class UniGenBench(Suite):
    """UniGenBench, English or Chinese, short or long, depending on the table given by --prompts."""

    title = "UniGenBench"
    source = "data/test_prompts_{en,zh}[_long].csv of CodeGoat24/UniGenBench"
    samples = 4
    reward = "unigenbench"
    results_source = "results/MODEL_CATEGORY.csv of its eval/"

    def read(self, path: Path) -> list[Prompt]:
        """The rows of a table, including those whose test points cannot be parsed."""
        prompts = read_prompts(path, unique=False)
        points = {"sub_dims_en", "sub_dims_zh"}
        if invalid := [p for p in prompts if not points & p.meta.keys() or "index" not in p.meta]:
            got = f"expected columns index and sub_dims_en or sub_dims_zh, got {['prompt', *invalid[0].meta]}"
            raise DataError(f"{path}: {got}; the suite's files: {self.source}")
        return prompts

    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """images/INDEX_K.png"""
        numbers = range(samples or self.samples)
        return [(p, k, out / "images" / file_name(p, k, "unigenbench", ending)) for p in prompts for k in numbers]

    def options(self, given: Mapping[str, Any], question: str) -> dict[str, Any]:
        """question: a judge template, or the suite's eval_common.py."""
        return dict(given) | ({"template": question} if question else {})

    def results(self, files: Sequence[Generated], scores: Sequence[Score], options: Mapping[str, Any]) -> Results:
        """The table of all marks."""
        marks = [mark for g, s in zip(files, scores, strict=True) for mark in marks_of(g.prompt, s)]
        unparsed = sum(s.value is None for s in scores)
        asked = str(options.get("template", ""))
        if asked.endswith(".py"):
            wording = "the suite's own wording; comparable with published numbers if the judge is its evaluation model"
        else:
            words = f"the wording of {Path(asked).name}" if asked else "our own wording"
            why = "which no evaluation model of the suite was trained on; not comparable with published numbers"
            wording = f"{words}, {why}"
        by = f"Marked by a served judge with {wording}. {len(files) - unparsed} of {len(files)} images have marks."
        return table(by, marks, problems(files, scores, 2))

    def write_scores(self, files: Sequence[Generated], scores: Sequence[Score], out: Path) -> None:
        """Write results.csv in the format of the suite's eval/, for eval/src/calculate_score.py."""
        with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for g, s in zip(files, scores, strict=True):
                names = [name for name, _ in marks_of(g.prompt, s)]
                content = {"prompt": g.prompt.text, "testpoint": names, "score": [int(v) for v in s.parts.values()]}
                result = json.dumps(None if s.value is None else content, ensure_ascii=False, indent=4)
                rows.writerow([g.prompt.meta["index"], g.prompt.text, str(names), s.raw, result, str(g.file)])

    def read_results(self, path: Path) -> Results:
        """From a results table written by this command or by the suite's own tools."""
        marks: list[Mark] = []
        unparsed: list[str] = []
        for row in _rows(path):
            try:
                marks += _marks_in(row)
            except DataError as error:
                marks += [(name, None) for name in row.testpoint]
                unparsed.append(str(error))
        return table(f"Read from {path.name}.", marks, unparsed)


def _rows(path: Path) -> Iterable[_Row]:
    """The rows of a csv file."""
    csv.field_size_limit(1 << 24)
    expected = f"a table with the columns {', '.join(COLUMNS)}"
    rows = csv.DictReader(io.StringIO(read_text(path, expected)))
    try:
        if not {"testpoint", "result_json", "img_path"} <= set(rows.fieldnames or ()):
            raise DataError(f"{path}: expected {expected}, got {rows.fieldnames}")
        for row in rows:
            yield check(_ROW, row, f"{path}, line {rows.line_num}", expected)
    except csv.Error as error:
        raise DataError(f"{path}: expected {expected}: {error}") from error


def _marks_in(row: _Row) -> list[Mark]:
    """The marks of a row. Raises DataError unless there is one per test point."""
    count, image = len(row.testpoint), Path(row.img_path).name
    expected = f"a result_json with 0 or 1 per test point ({count})"
    scores = check(_RESULT, row.result_json, image, expected).score
    if len(scores) != count:
        raise DataError(f"{image}: expected {expected}, got {len(scores)}")
    return list(zip(row.testpoint, map(float, scores)))


def marks_of(prompt: Prompt, score: Score) -> list[Mark]:
    """The marks of an image, all None if its reply could not be parsed; empty if its test points could not."""
    try:
        names = points_of(prompt.meta).names
    except ValueError:
        return []
    marks: Sequence[float | None] = [None] * len(names) if score.value is None else list(score.parts.values())
    return list(zip(names, marks, strict=True))


def table(scored_by: str, marks: Sequence[Mark], missing: list[str]) -> Results:
    """A row per primary dimension and test point; the suite's overall score is the mean over primary dimensions."""
    primary = rows_by_name((name.split("-", 1)[0].strip(), value) for name, value in marks)
    all_points = rows_by_name(("all", value) for _, value in marks)
    summary = {
        "mean of the primary dimensions": mean(row.mean for row in primary),
        "share of all test points": all_points[0].mean if all_points else None,
    }
    tables = {"primary dimension": primary, "test point": sorted(rows_by_name(marks), key=lambda row: row.name)}
    return Results("UniGenBench", scored_by, summary, tables, missing)
