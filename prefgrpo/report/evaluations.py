"""Evaluations after training, from the JSON that `prefgrpo evaluate` wrote into the run folder.

Invariant: the page shows every number of these files; missing scores are counted and listed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefgrpo.report.curves import readable
from prefgrpo.report.headline import number

Table = tuple[list[str], list[list[str]]]
"""(head, rows of cells)"""
PROBLEMS = 20
"""Maximum number of lines about missing scores."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on a suite, or a comparison of the run's weights with others."""

    title: str
    notes: list[str]
    tables: list[Table]
    problems: list[str]


def read_evaluation(file: Path) -> list[Evaluation]:
    """Content of RUN/evaluations/WEIGHTS/NAME/*.json; [] for other files. Raises ValueError, KeyError, TypeError."""
    content, weights = json.loads(file.read_text(encoding="utf-8")), _display_name(file.parent.parent.name)
    if "win_rates" in content:
        other = _display_name(file.parent.name.removeprefix("against_"))
        return [_comparison(f"{weights} against {other}", content)]
    return [_suite(f"{content['suite']}, {weights}", content)] if "suite" in content else []


def _display_name(weights: str) -> str:
    """'run_step_000020_live' → 'run step 20 (live)'."""
    return re.sub(r"_?step_0*(\d+)_(live|ema)$", r" step \1 (\2)", weights).strip()


def _suite(title: str, content: Mapping[str, Any]) -> Evaluation:
    tables: list[Table] = []
    if content["summary"]:
        tables.append((["", "score"], [[name, _share(value, 2)] for name, value in content["summary"].items()]))
    for name, rows in content["tables"].items():
        cells = [[r["name"], _share(r["mean"], 2), str(r["count"]), str(r["missing"])] for r in rows]
        tables.append(([name, "mean", "of", "missing"], cells))
    problems = [str(line) for line in content["problems"]]
    left = len(problems) - PROBLEMS
    problems = problems[:PROBLEMS] + [f"… and {left} more, in {content['suite']}'s JSON file"] * (left > 0)
    score = next(iter(content["summary"].values()), None)
    return Evaluation(f"{title}: {_share(score, 2)}", [content["scored_by"]], tables, problems)


def _comparison(title: str, content: Mapping[str, Any]) -> Evaluation:
    rates, means = [], []
    for name, row in content["win_rates"].items():
        rate, low, high, first, second, missing = (
            _share(row[key]) for key in ("rate", "low", "high", "first", "second", "missing")
        )
        own = [readable(name.replace("/win_", "/")), rate, f"{low} to {high}", f"{first}, {second}", missing]
        rates.append([*own, row["verdict"]])
    for name, row in content["means"].items():
        now, against = (number(math.nan if row[key] is None else row[key]) for key in ("now", "against"))
        means.append([readable(name), against, now, _share(row["missing"])])
    head = ["win rate", "rate", "95 % interval", "shown first, second", "missing", "result"]
    tables: list[Table] = [(head, rates), (["mean", "other", "this", "missing"], means)]
    notes = [", ".join(f"{count} prompts ({name})" for name, count in content["prompts"].items()), *content["judges"]]
    result = ""
    for name, row in list(content["win_rates"].items())[:1]:
        prompts, _, judge = name.partition("/win_")
        result = f": {_share(row['rate'])} by {readable(judge)} on {prompts}, {row['verdict']}"
    return Evaluation(title + result, notes, [t for t in tables if t[1]], [])


def _share(value: float | None, decimals: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{decimals}f}\u00a0%"
