"""`python -m benchmarks.bench_objectives`: every objective in the demo's world, from the same start, with the same number of
judge calls; for docs/objectives.md.

Each runs its recipe `scripts/demo/NAME.yaml` for as many steps as the others, with three seeds (of prompts, noise and LoRA).
A stopping rule of the recipe does not end it here: where it would have ended is read from the rows, so that a decline
after it is seen too. Held-out accuracy: share of the dev captions' 288 images whose colour, shape and position are all right,
which neither objective nor judge ever sees. Seconds are the process's CPU seconds on one thread, without evaluations, so
other load on the machine counts little. A finished run is a JSON file in results/objectives; what is there is not run again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_judge import machine
from benchmarks.blocks import replace_block, rounded, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "objectives", "objectives_demo.svg"
BASELINE = "grpo"
FAMILIES = {
    "replayed steps": ("grpo", "grpo_guard", "flow_dppo"),
    "noised x0, single samples": ("nft", "awm", "rwr", "sft"),
    "noised x0, members compared": ("soft_dpo", "dpo", "plackett_luce", "dgpo", "crd"),
}
FIRST = ("grpo", "nft", "soft_dpo", "awm")
SEEDS, STEPS, EVERY, GOAL = (0, 1, 2), 80, 10, 0.70
ACCURACY = "dev/scenes.all"
ROW = ("step", "calls", "seconds", "accuracy", "win_judge", "diversity", "order_inconsistency")
"""Columns of `evaluations`; the last two are means of the training steps since the evaluation before."""


class Watch:
    """Callbacks of a run: calls and CPU seconds of its training so far, and a row per evaluation."""

    def __init__(self) -> None:
        self.evaluations: list[list[float | None]] = []
        self.calls, self.seconds, self._mark = 0.0, 0.0, 0.0
        self._since: list[tuple[float, float]] = []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """After a training step."""
        now = time.process_time()
        self.seconds, self._mark = self.seconds + now - self._mark, now
        self.calls += metrics["judge/requests"]
        self._since.append((metrics["diversity/pixels"], metrics["judge/order_inconsistency"]))

    def evaluation(self, step: int, name: str, metrics: dict[str, float]) -> None:
        """After an evaluation, whose seconds do not count."""
        signs = np.mean(self._since, axis=0).tolist() if self._since else [None, None]
        measured = [metrics[ACCURACY], metrics["dev/win_judge"]]
        self.evaluations.append(rounded([step, self.calls, self.seconds, *measured, *signs]))
        self._since, self._mark = [], time.process_time()


def train(name: str, seed: int, steps: int = STEPS, every: int = EVERY) -> dict[str, Any]:
    """One run's evaluations and the steps at which signs of reward hacking appeared."""
    from prefgrpo import Trainer
    from prefgrpo.run.log import read_metrics
    from prefgrpo.run.signs import Signs

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer.from_recipe(
            ROOT / "scripts" / "demo" / f"{name}.yaml", output=folder, seed=seed, steps=steps, tensorboard=False,
            train={"stop_when": []}, judge={"cache": False}, eval={"every": every, "final_prompts": ""},
            checkpoint={"every": steps}, on_step=watch.step, on_evaluation=watch.evaluation,
        )  # fmt: skip
        rows = read_metrics(run.train().folder / "metrics.jsonl")
    signs, seen = Signs(["vlm_pairwise"]), dict[str, int]()
    for row in rows:
        for sign in signs.add(row["kind"], row):
            seen.setdefault(sign, row["step"])
    own = run.config.train
    return {
        "objective": name, "seed": seed, "lr": own.lr, "options": own.objective_options, "machine": machine(),
        "signs": seen, "columns": ROW, "evaluations": watch.evaluations,
    }  # fmt: skip


def jobs() -> list[tuple[str, int]]:
    """(objective, seed), the most telling ones first."""
    names = [*FIRST, *(n for family in FAMILIES.values() for n in family if n not in FIRST)]
    return [(name, seed) for seed in SEEDS for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_objectives", description=__doc__)
    parser.add_argument("--only", nargs="*", help="objectives to run; all by default")
    parser.add_argument("--render", action="store_true", help="only picture and table, from the JSON")
    args = parser.parse_args(argv)
    os.chdir(ROOT)  # the paths of the demo's recipes are relative to it
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, seed in jobs():
        file = RESULTS / f"{name}_{seed}.json"
        if args.render or file.exists() or (args.only and name not in args.only):
            continue
        write_json(file, train(name, seed))
        print(file.name, flush=True)


if __name__ == "__main__":
    main()
