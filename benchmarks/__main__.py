"""`python -m benchmarks [--device cpu|cuda] [--quick] [--render]`: measure, print, write JSON, render the document."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cases import cases
from benchmarks.harness import keep_freed_memory, machine, measure
from benchmarks.overhead import overhead

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of the ops.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quick", action="store_true", help="headline shape only, without torch.compile, nothing written"
    )
    parser.add_argument("--render", action="store_true", help="only write docs/benchmarks.md from the JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if not args.render:
        keep_freed_memory()
        run = {"machine": machine(args.device), "rounds": args.rounds, "results": []}
        for case in cases(args.device, args.quick):
            us = (result := measure(case, args.device, args.rounds))["us"]
            run["results"].append(result)
            times = ", ".join(f"{name} {t:.1f}" for name, t in us.items())
            rate = f", {case.bytes / us['ours'] / 1e3:.1f} GB/s, copy {result['copy_us']:.1f} ({case.formula})"
            print(f"{case.op} · {case.shape} · {case.dtypes}: {times} µs{rate if case.bytes else ''}", flush=True)
        if args.quick:
            return
        run["overhead"] = overhead(args.device, args.rounds)
        if args.device == "cuda":
            from benchmarks import gpu

            run["checks"] = gpu.checks()
            print(json.dumps(run["checks"], indent=1))
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{args.device}.json").write_text(json.dumps(run, indent=1) + "\n")
    if args.out == ROOT / "benchmarks" / "results":
        report.render(args.out, ROOT / "docs")
        print("wrote docs/benchmarks.md")


if __name__ == "__main__":
    main()
