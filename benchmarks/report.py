"""Renders docs/benchmarks.md from the JSON of a run; no number in it is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks` (`make bench`) from `benchmarks/results`; do not edit. Times are medians of
interleaved rounds, after the variants' results were compared; *of copy* is the time of a copy of the same bytes divided
by our time; bytes are the minimum traffic per element. *Eager* and *compile* are the published formula of Flow-GRPO and
others in torch, without and with torch.compile. *Noise given*: the step reads ε from memory; *noise addressed*: it
computes ε from (seed, sample, step, element). The benefits of the kernels are exactness, few launches and no host
synchronisation: their time is negligible next to the forward of a model with billions of parameters, and no training
run gets faster by these factors.
"""
NOT_MEASURED = """## GPU

Not measured yet: the CUDA and Triton kernels were compiled for sm_80, sm_90, sm_100 and sm_120 and ran on the CPU only
(`tests/test_cuda_on_cpu.py`, Triton's interpreter). `scripts/gpu_check.sh` on a GPU adds this section.
"""


def section(run: dict[str, Any]) -> list[str]:
    """One machine's table."""
    m = run["machine"]
    lines = [
        f"## {m['device']}",
        "",
        f"{m['threads']} threads on {m['cores']} cores, load average {m['load']:.1f} at the start, backend "
        f"`{m['backend']}`, torch {m['torch']}, Python {m['python']}, {run['rounds']} rounds.",
        "",
        "| op | shape | dtypes | ours µs | eager | compile | GB/s | of copy | bytes per element |",
        "|---" * 9 + "|",
    ]
    for r in run["results"]:
        ours = r["us"]["ours"]
        us = r["us"]
        times = [f"{us[k]:.0f} µs, {us[k] / ours:.1f}×" if k in us else "" for k in ("eager", "compile")]
        rate = [f"{r['bytes'] / ours / 1e3:.1f}", f"{100 * r['copy_us'] / ours:.0f} %"] if r["bytes"] else ["", ""]
        cells = [r["op"], r["shape"], r["dtypes"], f"{ours:.0f}", *times, *rate, r["formula"]]
        lines.append("| " + " | ".join(cells) + " |")
    calls = ", ".join(f"{name} {us:.1f} µs" for name, us in run["overhead"]["call_us"].items())
    lines += ["", f"Calls on 64 elements: {calls}.", ""]
    if "checks" in run:
        lines += ["Checked on this GPU (launches per call, host waits, graph of a ten-step loop, largest tensor):", ""]
        lines += ["```json", json.dumps(run["checks"], indent=1), "```", ""]
    return lines


def render(results: Path, docs: Path) -> None:
    """Write docs/benchmarks.md: one table per device."""
    lines = [*INTRODUCTION.splitlines(), ""]
    for name in ("cpu", "cuda"):
        if (results / f"{name}.json").exists():
            lines += section(json.loads((results / f"{name}.json").read_text()))
    if not (results / "cuda.json").exists():
        lines += NOT_MEASURED.splitlines()
    (docs / "benchmarks.md").write_text("\n".join(lines).rstrip("\n") + "\n")
