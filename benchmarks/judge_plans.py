"""`python -m benchmarks.judge_plans`: pair plans on simulated and real groups, for docs/judging.md.

Real: 24 images of the shipped tiny pipeline for every dev caption; the shipped tiny judge judges each ordered pair in
this process. Takes a minute on one core. Writes results/judge_plans.json, docs/judging_plans.svg and the table.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.demo_runs import ROOT, drawing
from prefgrpo.data.media import Media
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.simulate import GOAL, SHARE, Groups, JudgeModel, default_plans, fit_judge, measure, simulate_groups

RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "judge_plans.json", "judging_plans.svg"
SIZE = 24
SHOWN = ("tournament", "k_regular(4)", "swiss(4)", "swiss(5)", "k_regular(8)", "swiss(8)", "k_regular(9)", "swiss(9)")
TITLES = {"simulated": "Simulated judge", "text": "Simulated, rounded verdicts", "tiny": "Tiny judge"}


def tiny_groups(captions: int, seed: int = 0) -> Groups:
    """The tiny judge's verdicts on all ordered pairs of 24 images per dev caption; truth: right attributes."""
    from diffusers import FluxPipeline

    from prefgrpo.judge.local import LocalJudge
    from prefgrpo.tiny import scenes

    assets = ROOT / "prefgrpo" / "tiny" / "assets"
    pipe = FluxPipeline.from_pretrained(assets / "base")
    pipe.set_progress_bar_config(disable=True)
    judge = LocalJudge(str(assets / "judge"), template="caption_match")
    pairs = both_orders(SIZE, 0)
    verdicts, truth = np.full((captions, SIZE, SIZE), np.nan), np.zeros((captions, SIZE))
    for k, combo in enumerate(scenes.SPLITS["dev"][:captions]):
        text = scenes.caption(combo)
        noise = [torch.Generator().manual_seed(10_000 * seed + SIZE * k + g) for g in range(SIZE)]
        options = {"height": 32, "width": 32, "max_sequence_length": 12, "output_type": "pt"}
        images = pipe([text] * SIZE, generator=noise, num_inference_steps=8, guidance_scale=3.5, **options).images
        truth[k] = scenes.hits(images, [text] * SIZE).sum(1).numpy()
        pixels = images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
        for (i, j), verdict in zip(pairs, judge.judge_group(text, [Media(p) for p in pixels], pairs), strict=True):
            verdicts[k, i, j] = np.nan if verdict.first is None else verdict.first
    return Groups(verdicts, truth)


def run(captions: int, repeats: int) -> dict[str, Any]:
    """Rows of every case, and the machine of the measurement."""
    model = JudgeModel(noise=1.0, spread=2.0, bias=0.5)
    made, real = simulate_groups(model, SIZE, repeats, seed=0), tiny_groups(captions)
    plans = default_plans(SIZE, round(SHARE * SIZE * (SIZE - 1) / 2))
    cases = {}
    for name, groups, verdict in (("simulated", made, "soft"), ("text", made, "hard"), ("tiny", real, "soft")):
        like = model if groups is made else fit_judge(groups)
        rows = [rounded(asdict(row)) for row in measure(groups, plans, verdict)]
        cases[name] = {"groups": len(groups.verdicts), "judge": rounded(asdict(like)), "verdict": verdict, "rows": rows}
    return {"size": SIZE, "versions": {"torch": torch.__version__, "python": platform.python_version()}, "cases": cases}


def _find(rows: Sequence[dict[str, Any]], plan: str, rate: str) -> dict[str, Any]:
    return next(row for row in rows if (row["plan"], row["rate"]) == (plan, rate))


def _cell(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['half']:.3f}"


def table(found: dict[str, Any]) -> list[str]:
    """Spearman correlation with both_orders, of the most instructive plans, per case."""
    names = list(found["cases"])
    every = found["size"] * (found["size"] - 1) // 2
    lines = ["| plan | rate | calls | " + " | ".join(TITLES[n].lower() for n in names) + " |", "|---" * 6 + "|"]
    rows = found["cases"][names[0]]["rows"]
    for plan in [*SHOWN, "round_robin"]:
        for rate in ("win_rate", "bradley_terry"):
            calls = _find(rows, plan, rate)["calls"]
            cells = [_cell(_find(found["cases"][n]["rows"], plan, rate)["spearman"]) for n in names]
            lines.append(f"| `{plan}` | {rate} | {calls} ({calls / every:.0%}) | " + " | ".join(cells) + " |")
    return lines


def summary(found: dict[str, Any]) -> list[str]:
    """Per case: what was judged, the fewest calls that reach the goal, and the quality of the full plans."""
    every, lines = found["size"] * (found["size"] - 1) // 2, []
    for name, case in found["cases"].items():
        judge, rows = case["judge"], case["rows"]
        sure = [r for r in rows if r["spearman"]["mean"] - r["spearman"]["half"] >= GOAL]
        good = min(sure, key=lambda r: (r["calls"], -r["spearman"]["mean"]))
        truth = {p: _find(rows, p, "win_rate")["true_spearman"] for p in ("round_robin", "both_orders")}
        lines.append(
            f"- {TITLES[name]} ({case['groups']} groups; noise {judge['noise']:.2f}, spread {judge['spread']:.2f}, "
            f"position bias {judge['bias']:.2f} logits): {GOAL} is reached with `{good['plan']}` and {good['rate']}, "
            f"{good['calls']} calls, {good['calls'] / every:.0%} of round_robin's ({_cell(good['spearman'])}). "
            f"Correlation with the truth: round_robin {_cell(truth['round_robin'])}, both_orders "
            f"{_cell(truth['both_orders'])}."
        )
    return lines


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot rank correlation against calls, one panel per case."""
    every = found["size"] * (found["size"] - 1) // 2
    styles = {("swiss", "bradley_terry"): ("#2a6f97", "-"), ("swiss", "win_rate"): ("#2a6f97", ":")}
    styles |= {("k_regular", "bradley_terry"): ("#c1121f", "-"), ("k_regular", "win_rate"): ("#c1121f", ":")}
    with drawing(path, 1, len(found["cases"]), figsize=(11, 4), sharey=True) as panels:
        for axes, (name, case) in zip(panels[0], found["cases"].items(), strict=True):
            for (family, rate), (colour, dash) in styles.items():
                rows = [r for r in case["rows"] if r["plan"].startswith(f"{family}(") and r["rate"] == rate]
                x, y = [r["calls"] for r in rows], [r["spearman"]["mean"] for r in rows]
                half = [r["spearman"]["half"] for r in rows]
                style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 3}
                axes.errorbar(x, y, half, label=f"{family}, {rate}", **style)
            once = _find(case["rows"], "round_robin", "win_rate")
            axes.plot(once["calls"], once["spearman"]["mean"], "ks", markersize=4, label="round_robin")
            axes.axhline(GOAL, color="black", linewidth=0.6)
            axes.axvline(SHARE * every, color="black", linewidth=0.6, linestyle="--")
            axes.set(title=TITLES[name], xlabel="calls per group of 24", xscale="log", ylim=(0.7, 1.005))
            axes.set_xticks([24, 48, 96, 192, 276], ["24", "48", "96", "192", "276"])
            axes.minorticks_off()
        panels[0][0].set_ylabel("Spearman with both_orders (552 calls)")
        panels[0][-1].legend(frameon=False, fontsize=8, loc="lower right")


def block(found: dict[str, Any]) -> list[str]:
    """The generated part of docs/judging.md."""
    return [*summary(found), "", f"![calls against rank correlation]({PICTURE})", "", *table(found)]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_plans", description=__doc__)
    parser.add_argument("--captions", type=int, default=24, help="groups of the tiny judge, at most 24")
    parser.add_argument("--repeats", type=int, default=300, help="simulated groups")
    parser.add_argument("--render", action="store_true", help="only write figure and table from the JSON")
    args = parser.parse_args(argv)
    if not args.render:
        write_json(RESULTS, run(args.captions, args.repeats))
    found = json.loads(RESULTS.read_text())
    draw(found, ROOT / "docs" / PICTURE)
    replace_block(ROOT / "docs" / "judging.md", "plans", block(found))
    print("\n".join(summary(found)), *table(found), sep="\n")


if __name__ == "__main__":
    main()
