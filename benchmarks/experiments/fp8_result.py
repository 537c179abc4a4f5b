"""What `fp8_base` does to the result: the demo's world trained with and without it.

    python -m benchmarks.experiments.fp8_result --seeds 0 1 2    # writes the table of docs/science.md

Each run is evaluated on the test captions in the base in which its LoRA will be used, fp32, against that base; those
with `fp8_base` also in their own base. A run that has its JSON in results/fp8 is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.experiments.demo_runs import ROOT, spread

RESULTS = ROOT / "benchmarks" / "experiments" / "results" / "fp8"
RECIPES = {"GRPO, `demo`": "prefgrpo/tiny/demo.yaml", "soft DPO, `few_calls`": "scripts/demo/few_calls.yaml"}
TEST = "prefgrpo/tiny/assets/prompts/test.txt"


def result_file(recipe: str, seed: int, fp8: bool) -> Path:
    """Where a run's numbers are."""
    return RESULTS / f"{Path(recipe).stem}_{'fp8' if fp8 else 'fp32'}_{seed}.json"


def prefgrpo(*arguments: str) -> None:
    """Run a command of the product."""
    subprocess.run([sys.executable, "-m", "prefgrpo", *arguments], check=True, cwd=ROOT)


def run(recipe: str, seed: int, fp8: bool) -> None:
    """Train once, and evaluate on the bases."""
    with tempfile.TemporaryDirectory() as output:
        own = ["--seed", str(seed), "--fp8-base", str(fp8), "--output", output, "--name", "run"]
        prefgrpo("train", recipe, *own, "--eval.every", "0", "--eval.final-prompts", "")
        found = {}
        for base in {"fp8": (False, True), "fp32": (False,)}["fp8" if fp8 else "fp32"]:
            out = Path(output, f"evaluated {base}")
            prefgrpo("evaluate", f"{output}/run", "--fp8-base", str(base), "--prompts", TEST, "--out", str(out))
            (written,) = out.rglob("comparison.json")
            result = json.loads(written.read_text())
            accuracy = result["means"]["prompts/scenes.all"]["now"]
            won = result["win_rates"]["prompts/win_judge"]["rate"]
            found["fp8" if base else "fp32"] = {"accuracy": accuracy, "win_rate": won}
    RESULTS.mkdir(exist_ok=True)
    write_json(result_file(recipe, seed, fp8), rounded(found))


def table() -> list[str]:
    """A row per recipe and base, with the mean of all seeds that ran."""
    rows = [
        "| recipe | trained on | evaluated on | seeds | all correct | win rate by the judge |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, recipe in RECIPES.items():
        for trained, evaluated in (("fp32", "fp32"), ("fp8", "fp32"), ("fp8", "fp8")):
            files = sorted(RESULTS.glob(f"{Path(recipe).stem}_{trained}_*.json"))
            runs = [json.loads(file.read_text())[evaluated] for file in files]
            cells = [spread([r[key] for r in runs]) for key in ("accuracy", "win_rate")]
            rows.append(f"| {name} | {trained} | {evaluated} | {len(runs)} | {' | '.join(cells)} |")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.fp8_result", description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=(0, 1, 2))
    for seed in parser.parse_args(argv).seeds:
        for recipe in RECIPES.values():
            for fp8 in (True, False):
                if not result_file(recipe, seed, fp8).exists():
                    run(recipe, seed, fp8)
    replace_block(ROOT / "docs" / "science.md", "fp8 base", table())


if __name__ == "__main__":
    main()
