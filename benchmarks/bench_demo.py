"""`python -m benchmarks.bench_demo CHECKOUT`: seconds until the demo reaches an accuracy of .70 on held-out captions.

Compared with an earlier checkout of this repository, whose extension was built in place (`setup.py build_ext
--inplace`). It trains in one process of two threads, as its `make demo` did; this one as `make demo` does now. Both use
this one's learning rate. Runs of both alternate, one of each per seed. Seconds are wall-clock seconds of the training
steps without evaluations, interpolated between evaluations, so the machine needs two free cores.
Results go to results/demo_cpu.json and docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.blocks import replace_block, rounded, write_json

ROOT = Path(__file__).resolve().parent.parent
JSON, PAGE = ROOT / "benchmarks" / "results" / "demo_cpu.json", ROOT / "docs" / "training.md"
GOAL, ACCURACY = 0.7, "dev/scenes.all"
PHASES = ("time/rollout", "time/judge_wait", "time/update")
NOW = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "prefgrpo", "train", "scripts/demo/demo.yaml",
       "--rollout.batch-size", "24", "--train.reuse-rollout-forward", "true")  # fmt: skip
"""The command of `make demo`, without --resume."""


def run(checkout: Path, command: Sequence[str], threads: int, seed: int, steps: int, every: int) -> dict[str, Any]:
    """Train; returns the median seconds of a step and of its phases, and the seconds to GOAL (None: not reached)."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000", "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "seed": seed, "train.lr": 1e-3, "train.steps": steps, "checkpoint.every": steps, "eval.every": every,
            "eval.final-prompts": "", "output": folder, "name": "run",
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        subprocess.run([sys.executable, "-m", *command, *words], cwd=checkout, env=env, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    phases = np.array([[row[name] for name in PHASES] for row in rows if PHASES[0] in row])
    spent = np.concatenate([[0.0], phases.sum(1).cumsum()])
    seen = [(spent[row["step"]], row[ACCURACY]) for row in rows if ACCURACY in row]
    reached = next((k for k, (_, value) in enumerate(seen) if value >= GOAL), None)
    to_goal = None
    if reached:
        (before, low), (after, high) = seen[reached - 1 : reached + 1]
        to_goal = before + (after - before) * (GOAL - low) / (high - low)
    median = dict(zip(PHASES, np.median(phases, axis=0).tolist(), strict=True))
    return {"seed": seed, "step_s": float(np.median(phases.sum(1))), "phases": median, "to_goal_s": to_goal}


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/training.md."""
    lines = ["| seed | s per step | now | × | s to .70 | now | × |", "|---|" + "---:|" * 6]
    for old, new in zip(found["earlier"], found["now"], strict=True):
        step = f"{old['step_s']:.2f} | {new['step_s']:.2f} | {new['step_s'] / old['step_s']:.2f}"
        goal = f"{old['to_goal_s']:.0f} | {new['to_goal_s']:.0f} | {new['to_goal_s'] / old['to_goal_s']:.2f}"
        lines.append(f"| {old['seed']} | {step} | {goal} |")
    ratios = [
        [new[key] / old[key] for old, new in zip(found["earlier"], found["now"], strict=True)]
        for key in ("step_s", "to_goal_s")
    ]
    step, goal = (f"{statistics.median(values):.2f}" for values in ratios)
    lines.append(f"| median | | | {step} | | | {goal} |")
    m = found["machine"]
    state = f"{m['device']}, {m['cores']} cores, load average {m['load']:.1f}, torch {m['torch']}; wall-clock seconds."
    return [*lines, "", f"{state} Earlier: commit {found['commit']}."]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="the earlier checkout; none: only write the table")
    parser.add_argument("--recipe", default="recipes/demo.yaml", help="the demo's recipe in it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--out", type=Path, default=JSON)
    given = parser.parse_args(argv)
    if given.checkout:
        from benchmarks.harness import machine

        place, found = given.checkout.resolve(), dict[str, Any](machine=machine("cpu"), earlier=[], now=[])
        head = ["git", "-C", str(place), "rev-parse", "--short", "HEAD"]
        found["commit"] = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
        for seed in given.seeds:
            size = (seed, given.steps, given.every)
            found["earlier"].append(rounded(run(place, ["prefgrpo", "train", given.recipe], 2, *size)))
            found["now"].append(rounded(run(ROOT, NOW, 1, *size)))
            print(json.dumps([found["earlier"][-1], found["now"][-1]]), flush=True)
            write_json(given.out, found)
    if given.out == JSON:
        replace_block(PAGE, "demo", table(json.loads(JSON.read_text())))


if __name__ == "__main__":
    main()
