"""The result as one sentence, what to doubt about it, and the table of all held-out numbers."""

from __future__ import annotations

import math
import re

import numpy as np

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.report.charts import number, win_names
from prefgrpo.report.run import Floats, Rows, Run
from prefgrpo.run.comparison import verdict
from prefgrpo.run.metrics import WARN_MISSING


def percent(value: float) -> str:
    """A fraction as '91 %' (without a line break), with one decimal near 0 and 100 %."""
    return f"{100 * value:.{1 if 0 < min(value, 1 - value) < 0.015 else 0}f}\u00a0%"


def measure_names(rows: Rows) -> list[str]:
    """Measures with values before and after training."""
    return [name for name in rows.columns if f"{name}_before" in rows]


def facts(run: Run) -> list[tuple[str, str]]:
    """(name, text): what was trained, on how much, and with which judge."""
    rollout = run.section("rollout")
    judge = run.section("judge")
    out = [("Model", f"{run.config.get('model') or '?'} ({run.config.get('family') or '?'})")]
    if steps := len(run.train.steps):
        text = f"{steps:,} steps × {rollout.get('prompts_per_step', '?')} prompts × {rollout.get('group_size', '?')}"
        out.append(("Training", f"{text} samples; {np.nansum(run.train['judge/requests']):,.0f} comparisons"))
    if "judge/requests" in run.train:
        hosts = ", ".join(map(str, judge.get("endpoints") or ())) or "this process"
        out.append(("Judge", f"{judge.get('model') or 'a served model'} ({hosts or '?'})"))
    for name, shown in run.images.items():
        if shown.outcomes:
            lost = sum(any(map(math.isnan, o.wins.values())) for o in shown.outcomes)
            note = f"; no verdict on {lost}" if lost else ""
            prompts = len({o.prompt for o in shown.outcomes})
            out.append((f"Held out ({name})", f"{len(shown.outcomes)} samples of {prompts} prompts{note}"))
    return out


def alarms(run: Run) -> list[str]:
    """Warnings that a reader should see before trusting the result."""
    out = list[str]()
    for name, text in (("judge/missing", "comparisons"), ("reward/missing", "rewards")):
        if (many := run.train[name] > WARN_MISSING).any():
            out.append(f"In {many.sum()} steps more than {percent(WARN_MISSING)} of the {text} were missing.")
    if (skipped := np.nansum(run.train["updates_skipped"])) > 0:
        out.append(f"{skipped:.0f} of {np.nansum(run.train['updates']):.0f} updates were skipped: gradient not finite.")
    for name, rows in run.evals.items():
        for subject, share in _missing(rows).items():
            if (many := share > JudgeConfig.max_missing).any():
                what = f"{'verdicts' if subject.startswith('judge') else 'scores'} by {subject}"
                text = f"{many.sum()} of {len(many)} evaluations on {name}"
                out.append(f"In {text} more than {percent(JudgeConfig.max_missing)} of the {what} were missing.")
    return out


def _missing(rows: Rows) -> dict[str, Floats]:
    """Judge or reward → largest missing share per evaluation (before, after, in either order). Without the parts of
    rewards: a part need not apply to every prompt."""
    out: dict[str, Floats] = {}
    for column in rows.columns:
        subject = re.sub(r"^win_|(_before|_first|_second)?_missing$", "", column)
        is_part = any(subject.startswith(f"{name}.") for name in measure_names(rows))
        if column.endswith("_missing") and not is_part:
            out[subject] = np.fmax(out.get(subject, np.zeros(len(rows.steps))), rows[column])
    return out


def certainty(run: Run) -> tuple[str, str]:
    """("better", "worse" or "inconclusive", reason) by the best set's first win rate; empty strings without one."""
    if run.best_set is None or not (names := win_names(rows := run.evals[run.best_set])):
        return "", ""
    outcomes = run.images[run.best_set].outcomes if run.best_set in run.images else []
    prompts = len({o.prompt for o in outcomes if not math.isnan(o.wins.get(names[0][4:], math.nan))})
    word, _, why = verdict(rows.last(f"{names[0]}_low"), rows.last(f"{names[0]}_high"), prompts).partition(": ")
    return word, why


def sentence(run: Run) -> str:
    """The result in one sentence, or a sentence that there is none yet."""
    if run.best_set is None:
        if run.evals or not run.finished:
            return "No evaluation has finished since training started, so there is no result yet."
        return "This run had no evaluation set (eval.prompts), so there is no before/after result."
    rows = run.evals[run.best_set]
    wins = []
    for win in [name for name in win_names(rows) if not math.isnan(rows.last(name))]:
        low, high, lost = (rows.last(win + end) for end in ("_low", "_high", "_missing"))
        note = f" (95\u00a0% interval {100 * low:.0f}–{percent(high)})" if not math.isnan(low + high) else ""
        note += f", no verdict on {percent(lost)} of the samples" if lost > 0 else ""
        wins.append(f"{percent(rows.last(win))} by {'the judge' if win == 'win_judge' else win[4:]}{note}")
    result = f"beats the initial model from the same noise in {' and '.join(wins)}" if wins else "was measured"
    names = [n for n in measure_names(rows) if "." not in n or n.endswith(".all")]
    moves = [f"{n} {number(rows.last(f'{n}_before'))} → {number(rows.last(n))}" for n in names]
    where = f"After {int(rows.steps[-1])} steps, on the held-out prompts ({run.best_set}), the policy"
    return f"{where} {result}" + (f"; {', '.join(moves)}." if moves else ".")


def table(run: Run) -> list[tuple[str, str, int, str, str, str, str]]:
    """(measure, set, step, before, after, interval, missing) of the last evaluation of every set."""
    lines = []
    for name, rows in run.evals.items():
        step = int(rows.steps[-1])
        for win in win_names(rows):
            low, high = rows.last(f"{win}_low"), rows.last(f"{win}_high")
            interval = "" if math.isnan(low + high) else f"{low:.3f}–{high:.3f}"
            lines.append(
                (f"win rate by {win[4:]}", name, step, "", number(rows.last(win)), interval, _share(rows, win))
            )
        for measure in measure_names(rows):
            before, after = (number(rows.last(measure + end)) for end in ("_before", ""))
            lines.append((measure, name, step, before, after, "", _share(rows, measure, f"{measure}_before")))
    return lines


def _share(rows: Rows, *columns: str) -> str:
    """The largest missing share of these columns; '' for none."""
    share = max((s for c in columns if (s := rows.last(f"{c}_missing")) > 0), default=0.0)
    return percent(share) if share else ""
