"""`make science`: four questions about rewards from pairs, answered in the demo's world for docs/science.md.

An arm is a training setup. The arms of an experiment differ only in the factor named in its title: seeds (of prompts,
noise and LoRA), learning rate, number of steps, images and judge calls per step are the same. They use a simulated
judge (simulated_judge.py) with known truth, flaw, noise and position bias. `accuracy` is the share of held-out images
whose colour, shape and position are all right, `truth` a continuous version of it; training sees both only through the
judge. Experiment e, on the demo's own judge, is calls.py.

± is half the 95 % confidence interval of the mean over seeds (Student's t); differences are computed per seed, with the
same prompts, noise and starting weights, so they can be more certain than the two means. A run's JSON is written during
the run; complete runs with the same settings are not repeated, so `--seeds` can split the work over machines.

Budget from scratch, 5 seeds: 10 arms × 5 × about 55 CPU seconds (40 steps of 64 images, 5 evaluations of 144):
46 core minutes, 12 minutes on 4 cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.blocks import replace_block
from benchmarks.experiments.demo_runs import (
    COLOURS,
    ROOT,
    Columns,
    Run,
    Watch,
    band,
    column,
    drawing,
    ended,
    gaps,
    interval,
    measure,
    recipe,
    spread,
)
from benchmarks.experiments.simulated_judge import USUAL, Ratings, SimulatedJudge, WinRates

RESULTS = ROOT / "benchmarks" / "experiments" / "results" / "science"
PAGE = ROOT / "docs" / "science.md"
SEEDS = (0, 1, 2, 3, 4)
STEPS = 40
EVERY = 10
GROUPS = 8
MEMBERS = 8
JUDGE = "benchmarks.experiments.simulated_judge"
MEASURED = Columns(
    {"accuracy": "dev/scenes.all", "truth": f"dev/{JUDGE}:truth", "brightness": f"dev/{JUDGE}:brightness"},
    {"diversity": "diversity/pixels"},
)
FLAWED = {"flaw": 2.0}
BIASED = {"bias": 0.3}
FAIR = dict[str, float]()


@dataclass(frozen=True)
class Arm:
    """A training setup; a simulated judge gives `asks` ratings of every image, or compares `pairs`."""

    label: str
    judge: Mapping[str, float] = field(default_factory=dict)
    """Fields of SimulatedJudge."""
    asks: int = 0
    pairs: Mapping[str, Any] = field(default_factory=dict)
    """Options of WinRates."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Changes to scripts/demo/grpo.yaml."""

    def settings(self) -> Run:
        """The settings that identify a run, in JSON types."""
        judge = asdict(SimulatedJudge(**self.judge))
        del judge["calls"]
        own = {"judge": judge, "asks": self.asks, "pairs": dict(self.pairs), "values": dict(self.values)}
        return own | {"steps": STEPS, "prompts_per_step": GROUPS, "group_size": MEMBERS}


HARD = {"plan": "both_orders", "round_verdicts": True}
SOFT = {"plan": "both_orders", "round_verdicts": False}
SPARSE = {"round_verdicts": True, "rate": "bradley_terry"}
GLOBAL = {"advantage": {"std": "global"}}
ARMS: dict[str, Arm] = {
    "ratings": Arm("7 ratings of every image", FLAWED, asks=7),
    "win_rates": Arm("win rates", FLAWED, pairs=HARD),
    "ratings_global": Arm("7 ratings, divided by the std of all", FLAWED, asks=7, values=GLOBAL),
    "soft": Arm("win rates of probabilities", FLAWED, pairs=SOFT),
    "soft_global": Arm("win rates of probabilities, divided by the std of all", FLAWED, pairs=SOFT, values=GLOBAL),
    "both_orders": Arm("12 pairs in both orders", BIASED, pairs=SPARSE | {"plan": "k_regular(3)", "order": "both"}),
    "one_order": Arm("24 pairs in one order, balanced", BIASED, pairs=SPARSE | {"plan": "budget(24)"}),
    "index_order": Arm(
        "24 pairs, the earlier image first", BIASED, pairs=SPARSE | {"plan": "budget(24)", "order": "index"}
    ),
    "regular": Arm("k_regular(4), Bradley-Terry", FAIR, pairs=SPARSE | {"plan": "k_regular(4)"}),
    "regular_wins": Arm("k_regular(4), win rate", FAIR, pairs={"round_verdicts": True, "plan": "k_regular(4)"}),
}


@dataclass(frozen=True)
class Experiment:
    """Arms to compare; differences are relative to the first."""

    arms: tuple[str, ...]
    shown: tuple[str, ...] = ("accuracy", "truth")
    """Series to draw."""


EXPERIMENTS = {
    "a": Experiment(("ratings", "win_rates"), ("accuracy", "truth", "opinion", "gap")),
    "b": Experiment(
        ("ratings", "ratings_global", "win_rates", "soft", "soft_global"), ("accuracy", "truth", "opinion", "gap")
    ),
    "c": Experiment(("both_orders", "one_order", "index_order")),
    "d": Experiment(("regular", "regular_wins")),
}
TITLES = {
    "accuracy": "held-out accuracy", "truth": "held-out truth", "opinion": "the judge's opinion",
    "gap": "gap: growth of opinion − truth",
}  # fmt: skip


# ---- running --------------------------------------------------------------------------------------------------------


def done(name: str, seed: int, folder: Path = RESULTS) -> Run | None:
    """The run, if it is complete and has the current settings."""
    run = ended(folder / f"{name}_{seed}.json", STEPS)
    return run if run and run["settings"] == ARMS[name].settings() else None


def train(name: str, seed: int, folder: Path = RESULTS, steps: int = STEPS, every: int = EVERY) -> None:
    """Run an arm that uses a simulated judge."""
    arm = ARMS[name]
    judge = SimulatedJudge(**arm.judge)
    reward = Ratings(judge, arm.asks) if arm.asks else WinRates(judge, **arm.pairs)
    measure(
        recipe("grpo"), folder / f"{name}_{seed}.json", {"arm": name, "seed": seed, "settings": arm.settings()},
        Watch(MEASURED, judge.calls_of_a_step), steps, every, seed=seed, rewards=reward,
        rollout={"prompts_per_step": GROUPS, "group_size": MEMBERS, "batch_size": MEMBERS},
        eval={"rewards": f"scenes,{JUDGE}:truth,{JUDGE}:brightness", "samples_per_prompt": 2},
        **arm.values,
    )  # fmt: skip


def run(job: tuple[str, int, Path]) -> str:
    """Run a job with its output suppressed; returns a line on how it ended."""
    name, seed, folder = job
    if done(name, seed, folder):
        return f"{name}, seed {seed}: is there"
    with tempfile.TemporaryFile("w+") as log, redirect_stdout(log), redirect_stderr(log):
        train(name, seed, folder)
    found = done(name, seed, folder)
    assert found
    return f"{name}, seed {seed}: accuracy {column(found, 'accuracy')[-1]:.3f}, {column(found, 'seconds')[-1]:.0f} s"


def jobs(only: Sequence[str], seeds: Sequence[int], folder: Path) -> list[tuple[str, int, Path]]:
    """Jobs of the experiments `only`, seed by seed."""
    names = dict.fromkeys(name for key in only for name in EXPERIMENTS[key].arms)
    return [(name, seed, folder) for seed in seeds for name in names]


# ---- results --------------------------------------------------------------------------------------------------------


def series(name: str, found: Run, what: str) -> list[float]:
    """A column or, for a simulated judge, opinion (without noise) or gap: the growth of opinion minus that of truth."""
    if what not in ("opinion", "gap"):
        return column(found, what)
    flaw = ARMS[name].judge.get("flaw", 0.0)
    extra = flaw * (np.array(column(found, "brightness")) - USUAL)
    return (extra - extra[0] if what == "gap" else extra + column(found, "truth")).tolist()


def values(name: str, seeds: Sequence[int], what: str, folder: Path = RESULTS) -> dict[int, float]:
    """Seed → last value of a series."""
    runs = {seed: done(name, seed, folder) for seed in seeds}
    return {seed: series(name, found, what)[-1] for seed, found in runs.items() if found}


def against(name: str, other: str, seeds: Sequence[int], what: str, folder: Path = RESULTS) -> list[float]:
    """Last value of a series of `name` minus that of `other`, per seed."""
    one, two = (values(arm, seeds, what, folder) for arm in (name, other))
    return [one[seed] - two[seed] for seed in one if seed in two]


def table(key: str, seeds: Sequence[int], folder: Path = RESULTS) -> list[str]:
    """Table rows of an experiment, one per arm with runs; [] if there are none."""
    names = EXPERIMENTS[key].arms
    first = names[0]
    columns = ["accuracy", "truth", *(["opinion", "gap"] if "gap" in EXPERIMENTS[key].shown else [])]
    compared = [what for what in columns if what != "opinion"]
    head = [*columns, *(f"{what} against the first" for what in compared)]
    lines = [f"| {' | '.join(['arm', 'seeds', *head])} |", "|---" * (len(head) + 2) + "|"]
    for name in names:
        runs = [found for seed in seeds if (found := done(name, seed, folder))]
        if not runs:
            continue
        cells = [spread([series(name, run, what)[-1] for run in runs]) for what in columns]
        for what in compared:
            cells.append(spread(against(name, first, seeds, what, folder), sign="+") if name != first else "")
        lines.append(f"| `{name}`: {ARMS[name].label} | {len(runs)} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def missing(key: str, seeds: Sequence[int], folder: Path = RESULTS) -> str:
    """Names the missing runs of an experiment; empty if there are none."""
    absent = gaps(EXPERIMENTS[key].arms, seeds, lambda name, seed: done(name, seed, folder))
    return f"Not measured: {absent}." if absent else ""


def agreement(one: Sequence[int], two: Sequence[int], folder: Path = RESULTS) -> list[str]:
    """Table rows: whether an arm's results from two sets of seeds differ by less than the sum of both error bars."""
    lines = ["| arm | number | first seeds | other seeds | within the error bars |", "|---|---|---|---|---|"]
    for key in EXPERIMENTS:
        for name in EXPERIMENTS[key].arms:
            for what in EXPERIMENTS[key].shown:
                sets = [list(values(name, seeds, what, folder).values()) for seeds in (one, two)]
                if min(map(len, sets)) < 2 or (key == "b" and name in EXPERIMENTS["a"].arms):
                    continue
                (mean, half), (other, own) = map(interval, sets)
                same = "yes" if abs(mean - other) <= sqrt(half**2 + own**2) else "no"
                lines.append(f"| `{name}` | {what} | {spread(sets[0])} | {spread(sets[1])} | {same} |")
    return lines


def draw(key: str, seeds: Sequence[int], path: Path, folder: Path = RESULTS) -> None:
    """Plot an experiment's series over judge calls; bands: from the lowest seed to the highest."""
    what = EXPERIMENTS[key].shown
    with drawing(path, 1, len(what), figsize=(3.2 * len(what) + 0.6, 3.2)) as panels:
        for axes, name in zip(panels[0], what, strict=True):
            for arm, colour in zip(EXPERIMENTS[key].arms, COLOURS, strict=False):
                runs = [found for seed in seeds if (found := done(arm, seed, folder))]
                if runs:
                    x = [[value * 1e-3 for value in column(found, "calls")] for found in runs]
                    band(axes, x, [series(arm, found, name) for found in runs], colour, label=arm)
            axes.set(title=TITLES[name], xlabel="judge calls (thousands)")
        panels[0][0].legend(frameon=False, fontsize=7)


def block(key: str, seeds: Sequence[int] = SEEDS, folder: Path = RESULTS) -> list[str]:
    """An experiment's generated part of docs/science.md."""
    picture = f"![{' and '.join(TITLES[what] for what in EXPERIMENTS[key].shown)} over judge calls](science_{key}.svg)"
    rows = table(key, seeds, folder)
    note = missing(key, seeds, folder)
    shown = [picture, "", *rows] if rows else []
    return [note, *([""] * bool(shown)), *shown] if note else shown


def render() -> None:
    """Write the figures and tables of docs/science.md."""
    for key in EXPERIMENTS:
        if table(key, SEEDS):
            draw(key, SEEDS, PAGE.parent / f"science_{key}.svg")
        replace_block(PAGE, f"science-{key}", block(key))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.science", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=list(EXPERIMENTS), choices=EXPERIMENTS, help="experiments; all by default"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="default: the seeds of the page")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one thread")
    parser.add_argument("--render", action="store_true", help="run nothing: figures and tables of docs/science.md")
    parser.add_argument("--against", nargs="*", type=int, help="run nothing: do --seeds agree with these seeds?")
    args = parser.parse_args(argv)
    if args.against:
        print("\n".join(agreement(args.against, args.seeds)))
        return
    if args.render:
        render()
        return
    os.chdir(ROOT)  # the paths of the demo's recipes are relative to it
    os.environ["OMP_NUM_THREADS"] = "1"  # one summation order everywhere; no CPU seconds of spinning threads
    RESULTS.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for line in pool.map(run, jobs(args.only, args.seeds, RESULTS)):
            print(line, flush=True)
    for key in args.only:
        print("", *block(key, args.seeds), sep="\n")


if __name__ == "__main__":
    main()
