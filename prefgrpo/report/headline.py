"""The result in one sentence and a few large figures, and the table of all held-out numbers."""

from __future__ import annotations

import math

from prefgrpo.report import charts
from prefgrpo.report.curves import measure_names, readable, win_names
from prefgrpo.report.run import Rows, Run

LARGE = 8


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


def _wins(rows: Rows) -> list[tuple[str, str, list[str]]]:
    """(who judged, win rate, interval and orders where they are known) of the last row."""
    wins = []
    for win in win_names(rows):
        rate, low, high, first, second = (rows.last(win + end) for end in ("", "_low", "_high", "_first", "_second"))
        details = [] if math.isnan(low + high) else [f"95\u00a0% interval {100 * low:.0f}–{percent(high)}"]
        if not math.isnan(first + second):
            details.append(f"shown first {percent(first)}, shown second {percent(second)}")
        if not math.isnan(rate):
            wins.append(("the judge" if win == "win_judge" else readable(win[4:]), percent(rate), details))
    return wins


def figures(run: Run) -> list[tuple[str, str, str, str]]:
    """(name, before, value, line below) of the last evaluation of the run's best set: win rates, then measures."""
    if run.best_set is None:
        return []
    rows = run.evals[run.best_set]
    wins = [(f"Win rate by {judge}", "", rate, "; ".join(details)) for judge, rate, details in _wins(rows)]
    measures = [
        (readable(name), number(rows.last(f"{name}_before")), number(rows.last(name)), "")
        for name in measure_names(rows)
        if not math.isnan(rows.last(name))
    ]
    return (wins + measures)[:LARGE]


def sentence(run: Run) -> str:
    """The result in one sentence; says so when there is none yet."""
    if run.best_set is None:
        if run.evals or not run.finished:
            return "No evaluation has finished since training started, so there is no result yet."
        return "This run had no evaluation set (eval.prompts, eval.holdout), so there is no before/after result."
    rows = run.evals[run.best_set]
    wins = [
        f"{rate} by {judge}" + (f" ({', '.join(details)})" if details else "") for judge, rate, details in _wins(rows)
    ]
    result = f"wins {' and '.join(wins)} against its own start from the same noise" if wins else "was measured"
    names = [n for n in measure_names(rows) if "." not in n or n.endswith(".all")]
    moves = [f"{readable(n)} {number(rows.last(f'{n}_before'))} → {number(rows.last(n))}" for n in names]
    where = f"After {int(rows.steps[-1])} steps, on the held-out prompts ({run.best_set}), the policy"
    return f"{where} {result}" + (f"; {', '.join(moves)}." if moves else ".")


def table(run: Run) -> list[tuple[str, str, int, str, str, str]]:
    """(measure, set, step, before, after, interval) of all numbers of the last evaluation of every set."""
    lines = []
    for name, rows in run.evals.items():
        step = int(rows.steps[-1])
        for win in win_names(rows):
            low, high = rows.last(f"{win}_low"), rows.last(f"{win}_high")
            interval = "" if math.isnan(low + high) else f"{low:.3f}–{high:.3f}"
            for label, end in (("", ""), (", shown first", "_first"), (", shown second", "_second")):
                if win + end in rows:
                    rate = f"{rows.last(win + end):.3f}"
                    lines.append((f"win rate by {readable(win[4:])}{label}", name, step, "", rate, interval))
                interval = ""
        for measure in measure_names(rows):
            before, after = (_three_decimals(rows.last(measure + end)) for end in ("_before", ""))
            lines.append((readable(measure), name, step, before, after, ""))
    return [line for line in lines if line[4] != "nan"]
