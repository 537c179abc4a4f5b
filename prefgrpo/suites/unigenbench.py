"""UniGenBench (arXiv 2510.18701): 600 prompts × 4 images, 1 to 10 test points each, marked by a served judge.

    a test point's mark is 1 or 0; each row is the fraction of ones among all marks of that name, over all images

10 primary dimensions (the name up to its '-') and 27 test points. If a reply, or the test points of a table row (row
509 of test_prompts_en_long.csv), cannot be parsed, its marks are left out of every denominator, as in the suite; here
they are also counted and listed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated, file_name
from prefgrpo.data.prompts import Prompt
from prefgrpo.rewards.unigenbench import points_of
from prefgrpo.suites.base import Results, Suite, asked_by, mean, problems, rows_by_name

COLUMNS = ("index", "prompt", "testpoint", "output", "result_json", "img_path")
"""Columns of the table written by the suite's tools, one row per image."""
Mark = tuple[str, float | None]
"""(name of the test point, 1 or 0; None if the reply could not be parsed)"""


class UniGenBench(Suite):
    """UniGenBench, English or Chinese, short or long, depending on the table given by --prompts."""

    title = "UniGenBench"
    source = "data/test_prompts_{en,zh}[_long].csv of CodeGoat24/UniGenBench"
    samples = 4
    reward = "unigenbench"

    columns = "index and sub_dims_en or sub_dims_zh"

    def owns(self, prompt: Prompt) -> bool:
        """Also a row whose test points cannot be parsed."""
        return "index" in prompt.meta and bool({"sub_dims_en", "sub_dims_zh"} & prompt.meta.keys())

    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """images/INDEX_K.png"""
        return Path("images", file_name(prompt, number, "unigenbench", ending))

    def results(self, files: Sequence[Generated], scores: Sequence[Answer], options: Mapping[str, Any]) -> Results:
        """The table of all marks."""
        marks = [mark for g, s in zip(files, scores, strict=True) for mark in marks_of(g.prompt, s)]
        unparsed = sum(s.value is None for s in scores)
        asked = asked_by(options, "one of its evaluation models, which were trained on it")
        by = f"Marked by a served judge with {asked}. {len(files) - unparsed} of {len(files)} images have marks."
        return table(by, marks, problems(files, scores))

    def write_scores(self, files: Sequence[Generated], scores: Sequence[Answer], out: Path) -> None:
        """Write results.csv in the format of the suite's eval/, for eval/src/calculate_score.py."""
        with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for g, s in zip(files, scores, strict=True):
                names = [name for name, _ in marks_of(g.prompt, s)]
                content = {"prompt": g.prompt.text, "testpoint": names, "score": [int(v) for v in s.parts.values()]}
                result = json.dumps(None if s.value is None else content, ensure_ascii=False, indent=4)
                rows.writerow([g.prompt.meta["index"], g.prompt.text, str(names), s.raw, result, str(g.file)])


def marks_of(prompt: Prompt, score: Answer) -> list[Mark]:
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
