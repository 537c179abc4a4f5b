"""The result as one sentence and a few key figures, and the table of all held-out numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.report import svg
from prefgrpo.report.curves import measure_names, namer, part_of, readable, win_names
from prefgrpo.report.run import Floats, Outcome, Rows, Run, reward_weights
from prefgrpo.run.evaluate import verdict
from prefgrpo.run.metrics import WARN_MISSING


def percent(value: float) -> str:
    """A fraction as '91 %' (without a line break), with one decimal near 0 and 100 %."""
    return f"{100 * value:.{1 if 0 < min(value, 1 - value) < 0.015 else 0}f}\u00a0%"


def number(value: float) -> str:
    """Three significant digits, two decimals for values around 1."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}".replace("-", "−") if 0.1 <= abs(value) < 10 or value == 0 else svg.number(value)


def _wins(run: Run, rows: Rows) -> list[tuple[str, str, list[str]]]:
    """(judge, win rate, [interval, missing share and orders, if known]) of the last row."""
    wins = []
    shown = namer(run)
    for win in win_names(rows):
        rate, low, high, first, second = (rows.last(win + end) for end in ("", "_low", "_high", "_first", "_second"))
        note = [] if math.isnan(low + high) else [f"95\u00a0% interval {100 * low:.0f}–{percent(high)}"]
        if (missing := rows.last(f"{win}_missing")) > 0:
            note.append(f"no verdict on {percent(missing)} of the samples")
        details = [", ".join(note)] if note else []
        if not math.isnan(first + second):
            details.append(f"shown first {percent(first)}, shown second {percent(second)}")
        if not math.isnan(rate):
            wins.append(("the judge" if win == "win_judge" else shown(win[4:]), percent(rate), details))
    return wins


def subject(run: Run) -> str:
    """What was trained: weights, model, family, objective and rewards, as far as the configuration has them; "" without
    a model."""
    train = run.section("train")
    family = run.config.get("family")
    shown = namer(run)
    weights = {k: w for k, w in reward_weights(run.config).items() if w}
    if not (model := "/".join(Path(str(run.config.get("model") or "")).parts[-2:])):
        return ""
    rank, objective = train.get("lora_rank"), readable(str(train.get("objective") or ""))
    out = f"LoRA of rank {rank} on {model}" if rank else f"All weights of {model}" if rank == 0 else model
    out += f" ({family})" if family else ""
    goal = " + ".join(f"{w:g} {shown(name)}" if len(weights) > 1 else shown(name) for name, w in weights.items())
    return f"{out}, trained by {objective} on {goal}" if objective and goal else out


def judge_name(run: Run) -> str:
    """Name of the judge, "" if there was none."""
    judge = run.section("judge")
    if "judge/requests" not in run.train and not any("win_judge" in rows for rows in run.evals.values()):
        return ""
    name = "/".join(Path(str(judge.get("model") or "")).parts[-2:]) or "a served model"
    hosts = judge.get("endpoints")
    if judge.get("backend") == "local":
        name += " in this process"
    elif isinstance(hosts, list | tuple) and hosts:
        name += f" at {', '.join(map(str, hosts))}"
    return name + "".join(f", {key} {judge[key]}" for key in ("template", "plan") if judge.get(key))


def facts(run: Run) -> list[tuple[str, str]]:
    """(name, text): the judge, amount of training and comparisons, agreement of judge and independent checks."""
    out = []
    rollout = run.section("rollout")
    naming = namer(run)
    if judge := judge_name(run):
        out.append(("Judge", judge))
    each = [n for key in ("prompts_per_step", "group_size") if isinstance(n := rollout.get(key), int)]
    if steps := len(run.train.steps):
        text = f"{steps:,} steps"
        if len(each) == 2:
            text += f" × {each[0]} prompts × {each[1]} samples = {steps * each[0] * each[1]:,} samples"
        asked = np.nansum(run.train["judge/requests"])
        out.append(("Training", text + (f"; {asked:,.0f} comparisons by the judge" if asked else "")))
    for name, shown in run.images.items():
        if outcomes := shown.outcomes:
            prompts = len({o.prompt for o in outcomes})
            text = f"{prompts} prompts × {len(outcomes) // prompts} = {len(outcomes)} samples"
            lost = Counter(who for o in outcomes for who, win in o.wins.items() if math.isnan(win))
            text += "".join(f"; {naming(who)}: no verdict on {count}" for who, count in lost.items())
            out.append((f"Held out ({name})", text))
    if run.best_set in run.images:
        outcomes = run.images[run.best_set].outcomes
        for check, (both, alike) in agreement(outcomes).items():
            share = f"on {percent(alike / both)} of the {both} samples" if both else "on none of the 0 samples"
            share += f" on which both have a preference ({len(outcomes)} in all)"
            out.append((f"Judge and {naming(check)} agree", share))
    return out


def agreement(outcomes: list[Outcome]) -> dict[str, tuple[int, int]]:
    """Independent check → (samples where judge and check both prefer an image, those where it is the same image)."""
    out = {}
    for check in dict.fromkeys(name for o in outcomes for name in o.wins if not name.startswith("judge")):
        pairs = [(o.wins["judge"] - 0.5, o.wins[check] - 0.5) for o in outcomes if {"judge", check} <= o.wins.keys()]
        decided = [judge * own for judge, own in pairs if judge * own]
        if pairs:
            known = [d for d in decided if not math.isnan(d)]
            out[check] = (len(known), sum(d > 0 for d in known))
    return out


def alarms(run: Run) -> list[str]:
    """Warnings that a reader should see before trusting the result."""
    out = list[str]()
    for name, text in (("judge/missing", "comparisons"), ("reward/missing", "rewards")):
        worst = run.train[name]
        if (many := worst > WARN_MISSING).any():
            out.append(f"In {many.sum()} steps more than {percent(WARN_MISSING)} of the {text} were missing.")
    naming = namer(run)
    for name, rows in run.evals.items():
        for subject, share in _missing(rows).items():
            if (many := share > JudgeConfig.max_missing).any():
                what = f"{'verdicts' if subject.startswith('judge') else 'scores'} by {naming(subject)}"
                text = f"{many.sum()} of {len(many)} evaluations on {name}"
                out.append(f"In {text} more than {percent(JudgeConfig.max_missing)} of the {what} were missing.")
    return out


def _missing(rows: Rows) -> dict[str, Floats]:
    """Judge or reward → largest missing share per evaluation (before, after, in either order). Without the parts of
    rewards: a part need not apply to every prompt."""
    out: dict[str, Floats] = {}
    for column in rows.columns:
        subject = re.sub(r"^win_|(_before|_first|_second)?_missing$", "", column)
        if column.endswith("_missing") and not part_of(subject, measure_names(rows))[1]:
            out[subject] = np.fmax(out.get(subject, np.zeros(len(rows.steps))), rows[column])
    return out


def certainty(run: Run) -> tuple[str, str]:
    """("better", "worse" or "inconclusive", reason) by the best set's first win rate; empty strings without one."""
    if run.best_set is None or not (names := win_names(rows := run.evals[run.best_set])):
        return "", ""
    outcomes = run.images[run.best_set].outcomes if run.best_set in run.images else []
    judged = {o.prompt for o in outcomes if not math.isnan(o.wins.get(names[0][4:], math.nan))}
    prompts = len(judged) if outcomes else 10**9  # older runs did not write outcomes: only the interval decides
    word, _, why = verdict(rows.last(f"{names[0]}_low"), rows.last(f"{names[0]}_high"), prompts).partition(": ")
    return word, why


def _listed(parts: list[str]) -> str:
    """a, b and c."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def sentence(run: Run) -> str:
    """The result in one sentence, or a sentence that there is none yet."""
    if run.best_set is None:
        if run.evals or not run.finished:
            return "No evaluation has finished since training started, so there is no result yet."
        return "This run had no evaluation set (eval.prompts, eval.holdout), so there is no before/after result."
    rows = run.evals[run.best_set]
    shown = namer(run)
    wins = [f"{rate} by {judge}" + (f" ({details[0]})" if details else "") for judge, rate, details in _wins(run, rows)]
    wins[:1] = [win.replace(" by ", " of comparisons by ", 1) for win in wins[:1]]
    result = f"beats the initial model from the same noise in {_listed(wins)}" if wins else "was measured"
    names = [n for n in measure_names(rows) if "." not in n or n.endswith(".all")]
    moves = [f"{shown(n)} {number(rows.last(f'{n}_before'))} → {number(rows.last(n))}" for n in names]
    where = f"After {int(rows.steps[-1])} steps, on the held-out prompts ({run.best_set}), the policy"
    return f"{where} {result}" + (f"; {', '.join(moves)}." if moves else ".")


def table(run: Run) -> list[tuple[str, str, int, str, str, str, str]]:
    """(measure, set, step, before, after, interval, missing) of all numbers of the last evaluation of every set."""
    lines = []
    shown = namer(run)

    def missing(*columns: str) -> str:
        share = max((s for c in columns if (s := rows.last(f"{c}_missing")) > 0), default=0.0)
        return percent(share) if share else ""

    for name, rows in run.evals.items():
        step = int(rows.steps[-1])
        for win in win_names(rows):
            low, high = rows.last(f"{win}_low"), rows.last(f"{win}_high")
            interval = "" if math.isnan(low + high) else f"{low:.3f}–{high:.3f}"
            for label, end in (("", ""), (", shown first", "_first"), (", shown second", "_second")):
                if win + end in rows:
                    rate = f"{rows.last(win + end):.3f}"
                    measure = f"win rate by {shown(win[4:])}{label}"
                    lines.append((measure, name, step, "", rate, interval, missing(win + end)))
                interval = ""
        for measure in measure_names(rows):
            before, after = (number(rows.last(measure + end)) for end in ("_before", ""))
            lost = missing(measure, f"{measure}_before")
            lines.append((shown(measure), name, step, before, after, "", lost))
    return [line for line in lines if line[4] != "nan"]
