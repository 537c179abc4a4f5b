"""`python -m benchmarks.bench_rollouts`: cheaper, lossy rollouts, and their effect on the reward.

Objectives without an importance ratio need only final latents, however they were sampled. Soft DPO trains in the demo's
world with scripts/demo/soft_dpo.yaml: with its full rollout (the runs of bench_objectives), with diffusers' caches, and
with fewer steps. Evaluations use no cache, but the rollout's number of steps. Rollout: CPU seconds of the phase divided
by those of the full rollout, from alternating steps in one process. Written to results/rollouts and docs/objectives.md;
complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.bench_objectives import GOAL, ROOT, SEEDS, STEPS, complete, over_seeds, reached, train
from benchmarks.bench_objectives import RESULTS as FULL
from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.demo_runs import Run, column, ended, recipe

RESULTS, OBJECTIVE = ROOT / "benchmarks" / "results" / "rollouts", "soft_dpo"
ARMS: dict[str, dict[str, Any]] = {
    "full": {},
    "cache_first_block": {"cache": "first_block", "cache_threshold": 0.1},
    "cache_taylorseer": {"cache": "taylorseer"},
    "steps_4": {"steps": 4, "window_high": 2},
}
"""Arm → what differs in `rollout`."""


def rollout_seconds(rounds: int = 5) -> dict[str, float]:
    """Median CPU seconds of a step's rollout, by arm."""
    import torch

    from prefgrpo.config.loading import from_dict, load, to_dict
    from prefgrpo.config.recipe import merge
    from prefgrpo.run.session import Clock
    from prefgrpo.run.trainer import TrainingLoop

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = merge(to_dict(load(recipe(OBJECTIVE))), {"output": folder, "tensorboard": False, "eval": {"every": 0}})
        configs = {arm: from_dict(merge(base, {"name": arm, "rollout": values})) for arm, values in ARMS.items()}
        loops = {arm: TrainingLoop(config) for arm, config in configs.items()}
        taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for step in range(rounds + 1):
            for arm, loop in loops.items():
                clock = Clock(now=time.process_time)
                loop.step(step, clock)
                taken[arm].append(clock.seconds["rollout"])
        for loop in loops.values():
            loop.close()
    return {arm: statistics.median(seconds[1:]) for arm, seconds in taken.items()}


def runs(arm: str) -> list[Run]:
    """The complete runs of an arm by seed."""
    files = [(FULL if arm == "full" else RESULTS) / f"{name(arm)}_{seed}.json" for seed in SEEDS]
    return [run for file in files if (run := ended(file, STEPS))]


def name(arm: str) -> str:
    """File name prefix of an arm's runs."""
    return OBJECTIVE if arm == "full" else arm


def table(seconds: dict[str, float]) -> list[str]:
    """The block of docs/objectives.md."""
    lines = [
        f"| rollout | time | seeds | accuracy after {STEPS} steps | best | calls to {GOAL:.2f} (thousands) "
        f"| CPU seconds to {GOAL:.2f} |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for arm, values in ARMS.items():
        found = runs(arm)
        shown = ", ".join(f"`rollout.{key}: {value}`" for key, value in values.items()) or "in full"
        if not found:
            lines.append(f"| {shown} | ×{seconds[arm] / seconds['full']:.2f} | not measured | | | | |")
            continue
        lines.append(
            f"| {shown} | ×{seconds[arm] / seconds['full']:.2f} | {', '.join(str(run['seed']) for run in found)} "
            f"| {over_seeds([column(run, 'accuracy')[-1] for run in found], 3)} "
            f"| {over_seeds([max(column(run, 'accuracy')) for run in found], 3)} "
            f"| {over_seeds([reached(run, 'calls') for run in found], 1, 1e-3)} "
            f"| {over_seeds([reached(run, 'seconds') for run in found])} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--render", action="store_true", help="only write the table from the JSON")
    given = parser.parse_args(argv)
    os.chdir(ROOT)  # the paths of the demo's recipes are relative to it
    RESULTS.mkdir(parents=True, exist_ok=True)
    timing = RESULTS / "seconds.json"
    if not given.render and not timing.exists():
        write_json(timing, rounded(rollout_seconds()))
    for seed in [] if given.render else given.seeds:
        for arm in [arm for arm in ARMS if arm != "full"]:
            file = RESULTS / f"{arm}_{seed}.json"
            if not ((run := ended(file, STEPS)) and complete(run)):
                train(OBJECTIVE, seed, file, rollout=ARMS[arm])
    lines = table(json.loads(timing.read_text()))
    replace_block(ROOT / "docs" / "objectives.md", "rollouts", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
