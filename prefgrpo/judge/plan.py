"""`prefgrpo judge plan`: calls against rank correlation for every pair plan, and the best plan for a budget.

The numbers come from `judge.simulate`; this chooses the plans and prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.rate import Bias, VerdictKind
from prefgrpo.judge.simulate import (
    FULL,
    Groups,
    JudgeModel,
    Row,
    best,
    cheapest,
    measure,
    replayed,
    resembling,
    simulated,
)
from prefgrpo.judge.verdict import JudgeError

GOAL = 0.95
"""Rank correlation with the full plan that counts as the same order."""
SHARE = 0.4
"""Budget where none is given, as a share of round_robin's calls."""
_NUMBERS = (2, 3, 4, 5, 6, 8, 9, 12)


def usual_plans(size: int, budget: int) -> list[str]:
    """Plans that fit a group of `size`, with the budget's own."""
    numbered = [f"{name}({n})" for name in ("k_regular", "swiss") for n in _NUMBERS if n < size]
    names = ["tournament", *numbered, f"budget({budget})", "round_robin", FULL]
    return [name for name in names if _fits(name, size)]


def _fits(name: str, size: int) -> bool:
    try:
        get_plan(name)(size, 0, ())
    except ValueError:
        return False
    return True


def table(rows: Sequence[Row], size: int) -> str:
    """The rows by calls; a star where the whole interval is above the goal."""
    every = size * (size - 1) // 2
    known = rows[0].true_spearman is not None
    head = f"{'plan':<14}{'rate':<15}{'calls':>5} {'of round_robin':>14} {'rounds':>6}   "
    told = f"{'Spearman':<15}  {'Kendall':<15}"
    lines = [f"{'':<58} with {FULL:<28} " + ("with the true qualities" if known else "")]
    lines.append(f"{head}  {told}" + (f"  {told}" if known else ""))
    for row in sorted(rows, key=lambda r: (r.calls, r.plan, r.rate)):
        cells = f"{row.plan:<14}{row.rate:<15}{row.calls:>5} {row.calls / every:>13.0%} {row.rounds:>7}   "
        found = [row.spearman, row.kendall, *(c for c in (row.true_spearman, row.true_kendall) if c is not None)]
        star = "*" if row.spearman.low >= GOAL else " "
        lines.append(f"{cells}{star} " + "  ".join(f"{c!s:<15}" for c in found))
    return "\n".join(line.rstrip() for line in lines)


def verdict_on(rows: Sequence[Row], budget: int, size: int) -> str:
    """Which plan to take."""
    every, chosen, least = size * (size - 1) // 2, best(rows, budget), cheapest(rows, GOAL)
    if all(np.isnan(row.spearman.mean) for row in rows):
        return f"{FULL} puts the members of no group in an order (its verdicts are ties), so no plan can be compared"
    lines = [f"no plan fits {budget} calls" if chosen is None else f"best for {budget} calls: {_named(chosen, every)}"]
    lines.append(
        f"fewest calls for {GOAL} with {FULL}: {_named(least, every)}"
        if least
        else f"no plan reaches {GOAL} with {FULL}"
    )
    return "\n".join(lines)


def _named(row: Row, every: int) -> str:
    return f"{row.plan} with {row.rate}, {row.calls} calls ({row.calls / every:.0%} of round_robin): {row.spearman}"


def _described(groups: Groups, judge: JudgeModel) -> str:
    return (
        f"{len(groups.verdicts)} groups of {groups.size}, as with --judge-noise {judge.noise:.2f} --spread "
        f"{judge.spread:.2f} --position-bias {judge.bias:.2f} --ties {judge.ties:.2f} --missing {judge.missing:.3f}"
    )


def plan(
    groups: int = 24,
    judge_noise: float = 1.0,
    spread: float = 2.0,
    position_bias: float = 0.5,
    ties: float = 0.0,
    missing: float = 0.0,
    verdict: VerdictKind = "soft",
    bias: Bias = 0.0,
    budget: int = 0,
    plans: Sequence[str] = (),
    repeats: int = 200,
    seed: int = 0,
    judgements: Path | None = None,
    out: Path | None = None,
) -> int:
    """Calls against rank correlation of every pair plan, and the best one for a budget.

    Args:
        groups: Members of a group (G).
        judge_noise: Noise of one verdict, in logits (simulation: see docs/judging.md).
        spread: Spread of the members' qualities, in logits.
        position_bias: What being shown first adds, in logits.
        ties: Verdicts nearer to even than this, in logits, are ties.
        missing: Share of verdicts that fail.
        verdict: soft: probabilities; hard: each verdict rounded, as of a judge that writes its answer.
        bias: Position bias that the rates take out, in logits, or fit.
        budget: Calls that may be spent on a group; 0: 40 % of round_robin's.
        plans: Plans to compare; none: all that fit the group.
        repeats: Simulated groups.
        seed: Seed of the groups and the plans.
        judgements: A run's judgements.jsonl with plan both_orders: compare on its verdicts and simulate nothing.
        out: JSON file of the rows.
    """
    if budget < 0:
        raise JudgeError(f"--budget: expected 0 (40 % of round_robin's calls) or more calls, got {budget}")
    if judgements is None:
        judge = JudgeModel(judge_noise, spread, position_bias, ties, missing)
        data, kind = simulated(judge, groups, repeats, seed), "simulated "
    else:
        data, kind = replayed(judgements), ""
        judge = resembling(data)
    budget = budget or max(round(SHARE * data.size * (data.size - 1) / 2), data.size // 2)
    try:
        rows = measure(data, plans or usual_plans(data.size, budget), verdict, bias, seed)
    except ValueError as error:
        raise JudgeError(str(error)) from error
    print(f"{kind}{_described(data, judge)}; {verdict} verdicts; rank correlations ± half of their 95 % interval")
    print(table(rows, data.size), verdict_on(rows, budget, data.size), sep="\n")
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0
