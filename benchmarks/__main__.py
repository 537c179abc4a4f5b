"""`python -m benchmarks [--device cpu|cuda] [--render]`: the ops' benchmarks; writes JSON and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, test_advantage, test_policy_loss, test_sde_step
from benchmarks.blocks import rounded, write_json

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parent.parent / "docs" / "benchmarks.md"
TEXT = """# Benchmarks of the ops

Written by `python -m benchmarks` (`make bench`) from `benchmarks/results`; do not edit. `pytest benchmarks
--benchmark-only` times the same cases one by one, to save and compare (`--benchmark-autosave`, `--benchmark-compare`).

Each number is the median of interleaved rounds, with quartiles for ours, on random inputs that rotate through more
memory than the last cache holds; the variants' results were compared before. *Eager* and *compile* are the published
formula of Flow-GRPO in torch, without and with torch.compile; a replay includes its backward. *Of copy* is the time
of a copy of as many random bytes divided by ours. On a GPU, times are the device's, from a CUDA graph; *host* is what
an eager call costs.

What the kernels are for is exactness, few launches and no host synchronisation. Next to the forward of a model with
billions of parameters their time is negligible, and no training run gets faster by these factors.
"""
NOT_MEASURED = """Not measured: the kernels were compiled for sm_80, 90, 100 and 120, and ran on a CPU, in tests, only.
`scripts/gpu_check.sh` on a GPU writes this table.
"""


def line(r: dict[str, Any]) -> str:
    """A row of the table."""
    us = {name: quartiles[1] for name, quartiles in r["us"].items()}
    low, ours, high = r["us"]["ours"]
    others = [f"{us[name]:.0f}" if name in us else "" for name in ("triton", "eager", "compile")]
    rate = [f"{r['bytes'] / ours / 1e3:.0f}", f"{100 * us['copy'] / ours:.0f} %"] if r["bytes"] else ["", ""]
    host = f"{r['host_us']:.0f}" if r["host_us"] else ""
    cells = [r["op"], r["shape"], r["dtypes"], f"{ours:.0f} ({low:.0f}-{high:.0f})", *others, *rate, host]
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """docs/benchmarks.md from the committed results."""
    lines = [*TEXT.splitlines(), ""]
    for device, title in (("cpu", "CPU"), ("cuda", "GPU")):
        lines += [f"## {title}", ""]
        if not (RESULTS / f"{device}.json").exists():
            lines += NOT_MEASURED.splitlines()
            continue
        run = json.loads((RESULTS / f"{device}.json").read_text())
        m = run["machine"]
        where = (
            f"{m['device']}, {m['threads']} threads on {m['cores']} cores, load average {m['load']:.0f} at the start"
        )
        lines += [f"{where}; backend {m['backend']}, torch {m['torch']}."]
        if run["clocks"][0]:
            lines += [f"Clocks and power before and after: {' → '.join(run['clocks'])}."]
        lines += ["", "| op | shape | dtypes | ours, µs | Triton | eager | compile | GB/s | of copy | host |"]
        lines += ["|---" * 10 + "|", *map(line, run["results"]), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of the ops.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=harness.DEVICE)
    parser.add_argument("--render", action="store_true", help="only write docs/benchmarks.md from the JSON")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not args.render:
        harness.keep_freed_memory()
        run: dict[str, Any] = {"machine": harness.machine(args.device), "clocks": [harness.clocks()], "results": []}
        for module in (test_sde_step, test_policy_loss, test_advantage):
            for case in module.cases(args.device):
                torch._dynamo.reset()
                run["results"].append(harness.measure(case, args.device, args.rounds))
                print(line(run["results"][-1]), flush=True)
        run["clocks"].append(harness.clocks())
        write_json(RESULTS / f"{args.device}.json", rounded(run))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
