"""Renders docs/benchmarks.md and its figures from the JSON of a run; no number in it is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGE = ("FLUX 1024² ×32", "Wan 480p 81f ×4")
TARGETS = [  # (name, op, baseline, least speed-up)
    ("affine_step ≥ 6× eager", "affine_step, noise given", "eager", 6.0),
    ("affine_step ≥ 1.2× torch.compile", "affine_step, noise given", "compile", 1.2),
    ("replay forward + backward ≥ 6× eager", "affine_logp, forward + backward", "eager", 6.0),
    ("replay forward + backward ≥ 1.2× torch.compile", "affine_logp, forward + backward", "compile", 1.2),
    ("addressed step faster than torch.randn alone", "affine_step, noise addressed", "randn alone", 1.0),
    ("policy_loss ≥ 15× the loop over groups", "policy_loss, forward + backward", "eager", 15.0),
    ("winrate_advantage ≥ 15× the loop over groups", "winrate_advantage", "eager", 15.0),
]

WHY = {
    "of copy bandwidth": "At this size all tensors lie in the last-level cache, where a copy is not bound by memory; "
    "with 16-bit latents a step needs the same arithmetic per element, and conversions, for half the bytes.",
    "replay": "In fp32, each of the two passes reads three operands and is bound by memory bandwidth, as the compiled "
    "baseline is; two cores of this machine have little of it.",
    "torch.compile": "Both are one pass over the same bytes; ours also keeps a fixed order of summation.",
    "": "The machine was shared while this was measured; see the load average.",
}
"""Part of a target's name → reason why it was missed."""


def _headline(results: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    shapes = ("FLUX 1024² ×4", "48")
    return [r for r in results if r["op"] == op and r["shape"].startswith(shapes) and "ours" in r["us"]]


def verdicts(run: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(target, dtypes, reached, wanted): a CPU at FLUX 1024² batch 4 and 48 groups of 24, a GPU from 8M elements up."""
    rows = []
    if run["machine"]["backend"] in ("cuda", "triton"):
        for r in (r for r in run["results"] if r["shape"] in LARGE and "addressed" not in r["op"]):
            name = f"{r['op']}, {r['shape']}:"
            rows.append((f"{name} ≥ 85 % of copy bandwidth", r["dtypes"], r["copy_us"] / r["us"]["ours"], 0.85))
            rows.append((f"{name} ≥ 10× eager", r["dtypes"], r["us"]["eager"] / r["us"]["ours"], 10.0))
            rows.append((f"{name} ≥ 1.1× torch.compile", r["dtypes"], r["us"]["compile"] / r["us"]["ours"], 1.1))
        return rows
    for name, op, rival, least in TARGETS:
        for r in _headline(run["results"], op):
            if rival in r["us"]:
                rows.append((name, r["dtypes"], r["us"][rival] / r["us"]["ours"], least))
    for r in _headline(run["results"], "affine_step, noise given"):
        rows.append(("affine_step ≥ 60 % of copy bandwidth", r["dtypes"], r["copy_us"] / r["us"]["ours"], 0.6))
    return rows


def _ranges(runs: list[dict[str, Any]]) -> list[str]:
    """Summary over the CPUs: the headline of affine_step against eager torch and torch.compile."""
    ratios: dict[str, dict[str, list[float]]] = {"eager": {}, "compile": {}}
    for r in (r for run in runs for r in _headline(run["results"], "affine_step, noise given")):
        for rival, by_dtype in ratios.items():
            by_dtype.setdefault(r["dtypes"], []).append(r["us"][rival] / r["us"]["ours"])
    shown = [f"{min(each):.1f}-{max(each):.1f} ({dtypes})" for dtypes, each in ratios["eager"].items()]
    compiled = [ratio for each in ratios["compile"].values() for ratio in each]
    return [
        f"On the CPUs below, affine_step with noise given is, at FLUX 1024² ×4, {', '.join(shown)}",
        f"times as fast as eager torch, and {min(compiled):.1f}-{max(compiled):.1f} times as fast as torch.compile. "
        'The variant "ours, out=" writes x\'',
        "into preallocated memory.",
        "",
    ]


def _table(run: dict[str, Any]) -> list[str]:
    lines = [
        "| op | shape | dtypes | ours µs | eager | compile | other | GB/s | of copy | bytes per element |",
        "|---" * 10 + "|",
    ]
    for r in run["results"]:
        ours, us = r["us"]["ours"], r["us"]
        times = {k: f"{us[k]:.0f} µs, {us[k] / ours:.1f}×" if k in us else "" for k in ("eager", "compile")}
        others = "; ".join(f"{k} {t:.0f} µs" for k, t in us.items() if k not in ("ours", "eager", "compile"))
        rate = [f"{r['bytes'] / ours / 1e3:.1f}", f"{100 * r['copy_us'] / ours:.0f} %"] if r["bytes"] else ["", ""]
        cells = [r["op"], r["shape"], r["dtypes"], f"{ours:.0f}", times["eager"], times["compile"], others, *rate]
        cells.append(r["formula"])
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _section(run: dict[str, Any], picture: str) -> list[str]:
    m, o = run["machine"], run["overhead"]
    lines = [
        f"## {m['device']}",
        "",
        f"{m['threads']} threads on {m['cores']} cores, load average {m['load']:.1f} at the start, backend "
        f"`{m['backend']}` {m['isa']}, torch {m['torch']}, Python {m['python']}, {run['rounds']} interleaved rounds.",
        "",
        f"![speed-up over eager torch]({picture})",
        "",
        "| target | dtypes | reached | |",
        "|---|---|---|---|",
    ]
    for name, dtypes, reached, least in verdicts(run):
        missed = "met" if reached >= least else f"**missed by {100 * (1 - reached / least):.0f} %**"
        lines.append(f"| {name} | {dtypes} | {reached:.2f} | {missed} |")
    lost = {next(key for key in WHY if key in name) for name, _, reached, least in verdicts(run) if reached < least}
    lines += ["", *(f"Missed ({key or 'others'}): {WHY[key]}" for key in sorted(lost))]
    lines += [
        "",
        *_table(run),
        "",
        "| call at 64 elements | µs | torch ops besides ours | host reads |",
        "|---|---|---|---|",
    ]
    for name, us in o["call_us"].items():
        lines.append(f"| {name} | {us:.1f} | {o['ops'][name]['torch_ops']} | {o['ops'][name]['host_reads']} |")
    lines += [
        "",
        f"`import prefgrpo.ops` takes {o['import_s']:.2f} s after torch; the first call of the compiled baseline "
        f"{o['torch_compile_first_call_s']:.1f} s.",
        "",
    ]
    if "checks" in run:
        lines += ["Checked on this GPU (launches per call, host waits, graph of a ten-step loop, largest tensor):", ""]
        lines += ["```json", json.dumps(run["checks"], indent=1), "```", ""]
    return lines


def plot(run: dict[str, Any], path: Path) -> None:
    """Plot the speed-up over eager for every case."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefgrpo"  # equal numbers give an identical file
    from matplotlib import pyplot

    rows = [r for r in run["results"] if r["bytes"] and r["dtypes"] == "x fp32, v bf16"]
    rows.sort(key=lambda r: (r["op"], r["bytes"]))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1))
    labels = [f"{r['op']} · {r['shape']}" for r in rows]
    axes.barh(labels, [r["us"]["eager"] / r["us"]["ours"] for r in rows], color="#2a6f97")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("times faster than the peers' formula in eager torch (x fp32, v bf16)")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


COMPILED = ("registers", "spills", "wide_loads", "wide_stores", "instructions", "ceiling")


def _stores(kernel: dict[str, Any]) -> str:
    return str(kernel["wide_stores"]) + (f"+{kernel['narrow_stores']}" if kernel["narrow_stores"] else "")


def _compiled(report: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The section on nvcc's code for the CUDA kernels: scripts/sass_report.py's rows before and after a change."""
    before, after = ({(k["name"], k["arch"]): k for k in report[when]} for when in ("before", "after"))
    archs = list(dict.fromkeys(k["arch"] for k in report["after"]))
    kinds = [("step", " addressed"), ("step", " given"), ("logp", ""), ("grad", "")]
    pairs = ("x fp32 v fp32", "x fp32 v bf16", "x bf16 v bf16", "x fp16 v fp16")
    lines = [
        "## CUDA, by its compiled code",
        "",
        "Counted in the disassembly, not measured (method: `scripts/sass_report.py`). Before → after, each on",
        f"{', '.join(f'sm_{arch}' for arch in archs)}. *Loads* and *stores* are 128-bit accesses per full, aligned",
        "tile of 8 elements; narrower accesses follow a +. *Ceiling* is the memory throughput in TB/s at which",
        "instruction issue alone becomes the bottleneck of an A100, an H100 and a B200, whose memory bandwidths are",
        "2.04, 3.35 and 8. *Before* is the generic kernel with this row's dtypes as constants, so that its run-time",
        "branches do not count.",
        "",
        "| kernel | registers | spills | loads | stores | instructions per element | ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, noise in kinds:
        for pair in pairs:
            chosen = [[rows[f"{kind} {pair}{noise}", arch] for arch in archs] for rows in (before, after)]
            cells = [[[str(k[column]) for k in rows] for rows in chosen] for column in COMPILED]
            cells[3] = [[_stores(k) for k in rows] for rows in chosen]
            shown = (" → ".join(", ".join(each) for each in cell) for cell in cells)
            lines.append(f"| {kind} {pair}{noise} | " + " | ".join(shown) + " |")
    return [*lines, ""]


def render(results: Path, docs: Path) -> None:
    """Write docs/benchmarks.md and one figure per result file."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks` (`make bench`) from `benchmarks/results/*.json`; do not edit. Times are",
        "medians of interleaved rounds; *of copy* is the time of a copy of the same bytes divided by our time; bytes",
        "are the minimum traffic per element. *Eager* and *compile* are the published formula of Flow-GRPO and",
        "others in torch, without and with torch.compile. *Noise given*: the step reads ε from memory; *noise",
        "addressed*: it computes ε from (seed, sample, step, element). The benefits of the kernels are exactness, few",
        "launches and no host synchronisation: their time is negligible next to the forward of a model with billions",
        "of parameters, and no training run gets faster by the factors below. On the CPU, freed memory is cached for",
        "every variant, so that none pays for page faults.",
        "",
    ]
    files = [results / "cpu.json", *sorted(results.glob("cpu_*.json")), results / "cuda.json"]
    runs = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    lines += _ranges([run for run in runs.values() if run["machine"]["backend"] == "cpu"])
    for stem, run in runs.items():
        picture = f"benchmarks_{stem}.svg"
        plot(run, docs / picture)
        lines += _section(run, picture)
    if (results / "sass.json").exists():
        lines += _compiled(json.loads((results / "sass.json").read_text()))
    if not (results / "cuda.json").exists():
        lines += [
            "## GPU",
            "",
            "Not measured yet: the CUDA and Triton kernels were compiled for sm_80, sm_90a and sm_100a and ran on the",
            "CPU only (`tests/test_cuda_on_cpu.py`, Triton's interpreter). `scripts/gpu_check.sh` on a GPU adds this",
            "section.",
            "",
        ]
    (docs / "benchmarks.md").write_text("\n".join(lines))
