"""`python -m benchmarks.plan_recipes`: hardware needs of every shipped recipe by `prefgrpo plan`, for docs/hardware.md.

The recipes of README's table of families, LoRA and all weights: memory per GPU, seconds per step, GPU-hours of the
whole recipe, judge servers; for two of them the effect of each lever. Nothing is measured: the numbers are the plan's,
with its default assumptions, extrapolated from models of a few blocks as in tests/test_recipes.py (which compares this
with whole models). Written to results/plan_recipes.json and docs/hardware.md; `--render` only writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.blocks import replace_block, rounded, write_json
from prefgrpo.config.loading import load
from prefgrpo.config.schema import Config
from prefgrpo.models import family
from prefgrpo.run.batch_size import FILLED_UNTRIED, chooses_share, estimate_share
from prefgrpo.run.memory import GIB, Estimate
from prefgrpo.run.plan import compare_levers
from prefgrpo.run.speed import HARDWARE, MFU, Machines, judge_servers, reuses_forwards, step_time

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from model_configs import estimate  # noqa: E402

JSON, PAGE = ROOT / "benchmarks" / "results" / "plan_recipes.json", ROOT / "docs" / "hardware.md"
GPU, JUDGE_BILLIONS = "h100", 8.0
WITH_LEVERS = ("prefgrpo/lora_flux", "prefgrpo/lora_wan")
"""Recipes for which each lever is planned too."""


def recipes() -> dict[str, Path]:
    """METHOD/RECIPE → file of the recipes in README's table of families."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Model families\n")[1].split("\n## ")[0]
    return {name: ROOT / "scripts" / f"{name}.yaml" for name in re.findall(r"\]\(scripts/(\w+/\w+)\.yaml\)", section)}


def from_few_blocks(config: Config) -> Estimate:
    """`prefgrpo plan`'s estimate, extrapolated."""
    with tempfile.TemporaryDirectory() as folder:
        return estimate(config, Path(folder))


def planned(config: Config, with_their_levers: bool = False) -> dict[str, Any]:
    """The numbers of `prefgrpo plan` for a recipe on the GPUs it is sized for."""
    memory_gib = HARDWARE[GPU].memory_gib
    if chooses_share(config):
        config, whole = estimate_share(config, FILLED_UNTRIED * memory_gib * GIB, from_few_blocks)
    else:
        whole = from_few_blocks(config)
    machines = Machines(HARDWARE[GPU], config.gpus, math.ceil(config.gpus / 8), MFU[config.compile])
    reuses = reuses_forwards(config, whole, memory_gib)
    taken = step_time(config, whole.flop, whole.model, machines, reuses)
    levers, r = compare_levers(config, whole, machines) if with_their_levers else [], config.rollout
    return ({"levers": list(map(list, levers))} if levers else {}) | {
        "family": config.family,
        "model": config.model,
        "lora": config.train.lora_rank > 0,
        "size": [r.width, r.height, r.frames or family(config.family).default_frames],
        "gpus": config.gpus,
        "gib": whole.total / GIB,
        "step_s": taken.total,
        "samples": taken.samples,
        "steps": config.train.steps,
        "judges": judge_servers(config, taken, machines, JUDGE_BILLIONS)[2],
    }


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/hardware.md."""
    missing = [f"`{name}`" for name in recipes() if name not in found]
    later = [f"Not planned yet: {', '.join(missing)}.", ""] if missing else []
    lines = [
        *later,
        f"On {GPU.upper()} with {HARDWARE[GPU].memory_gib:g} GiB, at {MFU[False]:g} of the peak FLOP/s, for "
        "the number of GPUs in each recipe:",
        "",
        "| family | model | recipe | makes | GPUs | GiB per GPU | s per step | samples per step | steps | GPU-hours "
        "| judges |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, r in found.items():
        width, height, frames = r["size"]
        hours = r["step_s"] * r["steps"] * r["gpus"] / 3600
        size = f"{width}×{height}" + f"×{frames}" * bool(frames)
        link = f"[{'LoRA' if r['lora'] else 'all weights'}](../scripts/{name}.yaml)"
        lines.append(
            f"| `{r['family']}` | {r['model'].split('/')[-1]} | {link} | {size} "
            f"| {r['gpus']} | {r['gib']:.0f} | {r['step_s']:.0f} | {r['samples']} | {r['steps']} | {hours:,.0f} "
            f"| {r['judges'] or '–'} |"
        )
    return lines


def levers_table(found: dict[str, Any]) -> list[str]:
    """Images or clips per GPU and second with each single lever, by recipe."""
    known = [name for name in WITH_LEVERS if "levers" in found.get(name, {})]
    rows = {name: {lever: (rate, gib) for lever, rate, gib in found[name]["levers"]} for name in known}
    lines = ["| option | " + " | ".join(f"`{name}` | × | GiB" for name in known) + " |"]
    lines.append("|---" + "|---:" * 3 * len(known) + "|")
    for lever in dict.fromkeys(lever for own in rows.values() for lever in own):
        cells = []
        for own in rows.values():
            rate, gib = own.get(lever, (0.0, 0.0))
            ratio = f"×{rate / own['none of them'][0]:.2f}"
            too_much = " (does not fit)" * (gib > HARDWARE[GPU].memory_gib)
            cells += [f"{rate:.3g}", ratio, f"{gib:.0f}{too_much}"] if rate else [""] * 3
        lines.append(f"| {lever} | {' | '.join(cells)} |")
    return lines if known else []


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the document's table from the JSON")
    paths = recipes()
    parser.add_argument("--only", nargs="+", choices=paths, default=list(paths), metavar="METHOD/RECIPE")
    given = parser.parse_args(argv)
    known: dict[str, Any] = json.loads(JSON.read_text())
    for name in [] if given.render else given.only:
        known[name] = rounded(planned(load(paths[name]), name in WITH_LEVERS))
        print(name, known[name], flush=True)
        write_json(JSON, {name: known[name] for name in paths if name in known})
    found = {name: known[name] for name in paths if name in known}
    replace_block(PAGE, "plan_recipes", table(found))
    replace_block(PAGE, "plan_levers", levers_table(found))


if __name__ == "__main__":
    main()
