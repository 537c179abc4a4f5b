"""`python -m benchmarks.bench_objectives`: every objective in the demo's world, for docs/science.md.

All start from the same weights and make the same number of judge calls: each trains with its recipe
`scripts/demo/NAME.yaml` for the same number of steps, with three seeds (of prompts, noise and LoRA). An uninformative
judge does not end a run, so that a later decline is visible. Held-out accuracy: share of the dev captions' 288 images
whose colour, shape and position are all correct; neither objective nor judge uses it. Seconds are the process's CPU
seconds without evaluations, so that other load hardly counts; run it with OMP_NUM_THREADS=1. A run's JSON in
results/objectives grows with its evaluations; complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.blocks import replace_block
from benchmarks.demo_runs import COLOURS, ROOT, Columns, Run, Watch, band, column, drawing, ended, gaps, measure, recipe

RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "objectives", "objectives_demo.svg"
BASELINE = "grpo"
FAMILIES = {
    "replayed steps": ("grpo", "grpo_guard"),
    "noised x0, single samples": ("nft", "awm", "sft"),
    "noised x0, members compared": ("soft_dpo", "dpo"),
}
SLOW, SLOW_STEPS = "grpo_5e-4", 110
"""The baseline at half its learning rate, which takes longer; a separate row."""
NAMES = [name for family in FAMILIES.values() for name in family]
FIRST = ("grpo", "soft_dpo", "nft", "awm")
SEEDS, STEPS, EVERY, GOAL = (0, 1, 2), 80, 10, 0.70
MEASURED = Columns(
    {"accuracy": "dev/scenes.all", "win_judge": "dev/win_judge"},
    {"diversity": "diversity/pixels", "order_inconsistency": "judge/order_inconsistency"},
)


def train(name: str, seed: int, file: Path, steps: int = STEPS, every: int = EVERY) -> None:
    """Run one training; `file` receives its evaluations."""
    values = {"train": {"lr": 5e-4}} if name == SLOW else {}
    watch = Watch(MEASURED, lambda metrics: metrics["judge/requests"])
    measure(recipe_of(name), file, {"objective": name, "seed": seed}, watch, steps, every, seed=seed, **values)


def recipe_of(name: str) -> Path:
    """The recipe of a row."""
    return recipe(BASELINE if name == SLOW else name)


def read(folder: Path) -> dict[str, list[Run]]:
    """Objective → its runs with SEEDS that reached the last step."""
    files = {name: [folder / f"{name}_{seed}.json" for seed in SEEDS] for name in (SLOW, *NAMES)}
    runs = {name: [run for file in own if (run := ended(file, STEPS))] for name, own in files.items()}
    return {name: own for name, own in runs.items() if own}


# ---- what a run's rows say ------------------------------------------------------------------------------------------


def reached(run: Run, name: str, goal: float = GOAL) -> float | None:
    """Value of a column where the accuracy first reaches the goal, interpolated between evaluations.

    None if it never does; NaN if the run is not complete.
    """
    x, y = column(run, name), column(run, "accuracy")
    for k in range(1, len(y)):
        if y[k] >= goal:
            return x[k - 1] + (x[k] - x[k - 1]) * (goal - y[k - 1]) / (y[k] - y[k - 1])
    return None if run["evaluations"][-1][0] >= STEPS else np.nan


def fall(run: Run) -> float | None:
    """Largest drop below the best accuracy so far, from reaching the goal to twice that step.

    None if the goal was not reached, or the run is too short to tell.
    """
    at = reached(run, "step")
    if at is None or np.isnan(at):
        return None
    end = 2 * at
    steps, y = column(run, "step"), column(run, "accuracy")
    if steps[-1] < end:
        return None
    inside = [v for s, v in zip(steps, y, strict=True) if s < end] + [float(np.interp(end, steps, y))]
    return max(max(inside[: k + 1]) - inside[k] for k in range(len(inside)))


def over_seeds(values: Sequence[float | None], digits: int = 0, factor: float = 1.0) -> str:
    """Mean of the known values, with their range if there are several, and the number of None."""
    known = [v for v in values if v is None or not np.isnan(v)]
    there = [v * factor for v in known if v is not None]
    if not there:
        return "never" if known else "–"
    text = f"{np.mean(there):.{digits}f}"
    if len(there) > 1:
        text += f" ({min(there):.{digits}f}–{max(there):.{digits}f})"
    return text + (f", {len(known) - len(there)} never" if len(there) < len(known) else "")


def table(found: dict[str, list[Run]]) -> list[str]:
    """A row per objective."""
    lines = [
        f"| objective | seeds | steps | calls to {GOAL:.2f} (thousands) | CPU seconds to {GOAL:.2f} | best | last | "
        "largest fall up to twice the steps to the goal |",
        "|---" * 8 + "|",
    ]
    for name, runs in found.items():
        lines.append(
            f"| `{name}` | {', '.join(str(run['seed']) for run in runs)} "
            f"| {', '.join(str(int(column(run, 'step')[-1])) for run in runs)} "
            f"| {over_seeds([reached(run, 'calls') for run in runs], 1, 1e-3)} "
            f"| {over_seeds([reached(run, 'seconds') for run in runs])} "
            f"| {over_seeds([max(column(run, 'accuracy')) for run in runs], 3)} "
            f"| {over_seeds([column(run, 'accuracy')[-1] for run in runs], 3)} "
            f"| {over_seeds([np.nan if (f := fall(run)) is None else f for run in runs], 3)} |"
        )
    return lines


def missing(found: dict[str, list[Run]]) -> str:
    """Names the runs that are missing or incomplete."""
    done = {(run["objective"], run["seed"]) for runs in found.values() for run in runs if complete(run)}
    absent = gaps(NAMES, SEEDS, lambda name, seed: (name, seed) in done)
    return f"Not measured, or not completely: {absent}." if absent else "All runs are complete."


def complete(run: Run) -> bool:
    """Whether a run reached its end and has all columns."""
    return bool(rows := run["evaluations"]) and rows[-1][0] >= STEPS and None not in rows[-1]


def draw(found: dict[str, list[Run]], path: Path) -> None:
    """Held-out accuracy over calls (above) and seconds (below), a column per kind of objective; bands: all seeds."""
    with drawing(path, 2, len(FAMILIES), figsize=(11, 6), sharey=True, sharex="row") as panels:
        for k, (title, names) in enumerate(FAMILIES.items()):
            own = [n for n in names if n in found and n != BASELINE]
            for name, colour in [*zip(own, COLOURS, strict=False), *([(BASELINE, "black")] * (BASELINE in found))]:
                y = [column(run, "accuracy") for run in found[name]]
                for axes, unit, factor in zip(panels[:, k], ("calls", "seconds"), (1e-3, 1.0), strict=True):
                    x = [[value * factor for value in column(run, unit)] for run in found[name]]
                    band(axes, x, y, colour, label=name, linewidth=1.6 if name == BASELINE else 1.2)
            for axes in panels[:, k]:
                axes.axhline(GOAL, color="grey", linewidth=0.6, linestyle="--")
            panels[0, k].set(title=title, xlabel="judge calls (thousands)")
            panels[1, k].set(xlabel="CPU seconds of training")
            panels[0, k].legend(frameon=False, fontsize=8, loc="lower right")
        for axes in panels[:, 0]:
            axes.set_ylabel("held-out accuracy")


def block(found: dict[str, list[Run]]) -> list[str]:
    """The generated part of docs/science.md."""
    cpu = next(iter(found.values()))[0]["machine"]["cpu"]
    where = f"{cpu}, one thread, shared with other work. {missing(found)}"
    return [where, "", f"![held-out accuracy over judge calls and over CPU seconds]({PICTURE})", "", *table(found)]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_objectives", description=__doc__)
    choices = [SLOW, *NAMES]
    parser.add_argument("--only", nargs="*", default=choices, choices=choices, help="recipes to run; all by default")
    parser.add_argument("--render", action="store_true", help="only write figure and table from the JSON")
    args = parser.parse_args(argv)
    os.chdir(ROOT)  # the paths of the demo's recipes are relative to it
    RESULTS.mkdir(parents=True, exist_ok=True)
    order = [*FIRST, *(name for name in NAMES if name not in FIRST), SLOW]
    for name, seed in [] if args.render else [(n, s) for s in SEEDS for n in order if n in args.only]:
        file = RESULTS / f"{name}_{seed}.json"
        steps = SLOW_STEPS if name == SLOW else STEPS
        if not ((run := ended(file, steps)) and complete(run)):
            train(name, seed, file, steps)
    found = read(RESULTS)
    draw(found, ROOT / "docs" / PICTURE)
    replace_block(ROOT / "docs" / "science.md", "objectives", block(found))
    print("\n".join(block(found)))


if __name__ == "__main__":
    main()
