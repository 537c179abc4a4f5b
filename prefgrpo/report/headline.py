"""The result in one sentence and a few large figures, and the table of all held-out numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefgrpo.report import charts
from prefgrpo.report.curves import measure_names, readable, win_names
from prefgrpo.report.run import Rows, Run

LARGE = 8


@dataclass(frozen=True)
class Figure:
    """One large figure: what it is, its value (with the value before, if it has one), and a line below."""

    name: str
    value: str
    before: str = ""
    detail: str = ""


def percent(value: float) -> str:
    """A share as '91 %' (no line break inside), with a decimal near the ends."""
    return f"{100 * value:.{1 if 0 < min(value, 1 - value) < 0.015 else 0}f}\u00a0%"


def number(value: float) -> str:
    """Three significant digits, two decimals for values around 1."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}".replace("-", "−") if 0.1 <= abs(value) < 10 or value == 0 else charts.number(value)


def _three_decimals(value: float) -> str:
    """Three decimals, or three significant digits of a value that these would hide."""
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 or math.isnan(value) else charts.number(value)


def _interval(rows: Rows, win: str) -> str:
    low, high = rows.last(f"{win}_low"), rows.last(f"{win}_high")
    return "" if math.isnan(low + high) else f"95\u00a0% interval {100 * low:.0f}–{percent(high)}"


def _orders(rows: Rows, win: str) -> str:
    first, second = rows.last(f"{win}_first"), rows.last(f"{win}_second")
    return "" if math.isnan(first + second) else f"shown first {percent(first)}, shown second {percent(second)}"


def figures(run: Run) -> list[Figure]:
    """Win rates with their intervals, then measures before and after, of the run's best evaluation."""
    if run.best_set is None:
        return []
    rows = run.evals[run.best_set]
    out = []
    for win in win_names(rows):
        if not math.isnan(rows.last(win)):
            detail = "; ".join(t for t in (_interval(rows, win), _orders(rows, win)) if t)
            out.append(
                Figure(
                    f"Win rate by {'the judge' if win == 'win_judge' else readable(win[4:])}",
                    percent(rows.last(win)),
                    detail=detail,
                )
            )
    for name in measure_names(rows):
        if not math.isnan(rows.last(name)):
            out.append(Figure(readable(name), number(rows.last(name)), number(rows.last(f"{name}_before"))))
    return out[:LARGE]


def sentence(run: Run) -> str:
    """The result in one sentence; says so when there is none yet."""
    if run.best_set is None:
        if run.evals or not run.finished:
            return "No evaluation after the first training step yet, so there is no result to tell."
        return "This run had no evaluation set (eval.prompts, eval.holdout), so there is no before/after result."
    rows, name = run.evals[run.best_set], run.best_set
    step = int(rows.steps[-1])
    parts = []
    for win in win_names(rows):
        if not math.isnan(rows.last(win)):
            within = ", ".join(t for t in (_interval(rows, win), _orders(rows, win)) if t)
            judge = "the judge" if win == "win_judge" else readable(win[4:])
            parts.append(f"{percent(rows.last(win))} by {judge}" + (f" ({within})" if within else ""))
    told = f"After {step} steps, on the held-out prompts ({name}), the policy "
    told += f"wins {' and '.join(parts)} against its own start from the same noise" if parts else "was measured"
    measures = [n for n in measure_names(rows) if "." not in n or n.endswith(".all")]
    moves = [f"{readable(n)} {number(rows.last(f'{n}_before'))} → {number(rows.last(n))}" for n in measures]
    return told + (f"; {', '.join(moves)}." if moves else ".")


@dataclass(frozen=True)
class Line:
    """A row of the table: measure, set, step, before, after, interval."""

    name: str
    set: str
    step: int
    before: str
    after: str
    interval: str


def table(run: Run) -> list[Line]:
    """The last evaluation of every set, all numbers."""
    lines = []
    for name, rows in run.evals.items():
        step = int(rows.steps[-1])
        for win in win_names(rows):
            low, high = rows.last(f"{win}_low"), rows.last(f"{win}_high")
            told = "" if math.isnan(low + high) else f"{low:.3f}–{high:.3f}"
            lines.append(Line(f"win rate by {readable(win[4:])}", name, step, "", f"{rows.last(win):.3f}", told))
            orders = [("shown first", f"{win}_first"), ("shown second", f"{win}_second")]
            lines += [
                Line(f"win rate by {readable(win[4:])}, {told}", name, step, "", f"{rows.last(key):.3f}", "")
                for told, key in orders
                if key in rows
            ]
        lines += [
            Line(readable(m), name, step, _three_decimals(rows.last(f"{m}_before")), _three_decimals(rows.last(m)), "")
            for m in measure_names(rows)
        ]
    return [line for line in lines if line.after != "nan"]
