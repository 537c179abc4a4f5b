"""`python -m benchmarks [--op sde_logp] [--shape FLUX]`: the ops' speed, printed; --write also into the checkout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import advantage, block_ops, harness, integrations, policy_loss, sde_step
from benchmarks.blocks import replace_block, rounded, write_json

RESULTS = Path(__file__).resolve().parent / "results"
HERE = "benchmarks/results"
PAGE = RESULTS.parent.parent / "docs" / "benchmarks.md"
DEVICES = ("cpu", "cuda")
RIVALS = {"cpu": ("eager", "compile"), "cuda": ("triton", "eager", "compile", "max-autotune")}
ABOUT = """Benchmarks of the ops. Rows are printed as they are measured; nothing is written without --write.

All of it takes about 10 minutes of CPU time on a CPU, half of it for compiling the rivals; --op and --shape choose.
Times are the median of --rounds interleaved rounds with quartiles for ours; "again" is ours a second time, the noise.
"""
NOT_MEASURED = ["Not measured: this table was not run on a GPU yet. `scripts/gpu_check.sh bench` on a GPU writes it."]
Row = dict[str, Any]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def number(values: dict[str, float] | None, name: str) -> str:
    """A variant's number; empty if there is none."""
    return f"{values[name]:.0f}" if values and name in values else ""


def cells(r: Row, device: str, bandwidth: float | None) -> list[str]:
    """A case's cells in the order of `head`."""
    low, ours, high = r["us"]["ours"]
    medians = {name: quartiles[1] for name, quartiles in r["us"].items()}
    rate = r["bytes"] / ours / 1e3
    out = [r["op"], r["shape"], r["dtypes"], f"{ours:.0f} ({low:.0f}-{high:.0f})"]
    out += [number(medians, name) for name in ("again", *RIVALS[device])]
    out += [f"{rate:.0f}", f"{100 * medians['copy'] / ours:.0f} %"] if r["bytes"] else ["", ""]
    if device == "cuda":
        out.append(f"{100 * rate / bandwidth:.0f} %" if bandwidth and r["bytes"] else "")
        out += [number(r["host_us"], name) for name in ("ours", *RIVALS[device])]
        out += [number(r["launches"], name) for name in ("ours", "eager", "compile")]
        peak = {name: size / 2**20 for name, size in (r.get("peak") or {}).items()}
        out += [number(peak, name) for name in ("ours", "eager", "compile")]
    return out


def drop_in(r: Row) -> list[str]:
    """The cells of a case that was timed on the host only."""
    counts = [number(r[what], name) for what in ("host_us", "launches") for name in ("ours", "theirs")]
    return [r["op"], r["shape"], r["dtypes"], *counts]


def head(device: str) -> list[str]:
    """Names of the columns."""
    rivals = RIVALS[device]
    more = ["of card", "host: ours, µs", *rivals, "launches: ours", "eager", "compile"] if device == "cuda" else []
    more += ["peak: ours, MiB", "eager", "compile"] if device == "cuda" else []
    return ["op", "shape", "dtypes", "ours, µs", "again", *rivals, "effective GB/s", "of copy", *more]


def block(device: str, folder: Path = RESULTS) -> list[str]:
    """The generated lines of one device."""
    path = folder / f"{device}.json"
    if not path.exists():
        return NOT_MEASURED
    run = json.loads(path.read_text())
    m = run["machine"]
    bandwidth = harness.BANDWIDTH.get(m["device"]) if device == "cuda" else None
    what = f"{m['device']}, {m['threads']} threads on {m['cores']} cores, load average {m['load']:.0f} at the start"
    what += f", {m['clock']}" if "clock" in m else ""
    lines = [
        f"{m['date']}, {m['commit']}: {what}; backend {m['backend']}, torch {m['torch']}. {m.get('note', '')}".strip()
    ]
    clocks = [r["clocks"] for r in run["results"] if r.get("clocks")]
    if clocks:
        sm, memory, watts = (f"{min(column):.0f}-{max(column):.0f}" for column in zip(*clocks, strict=True))
        lines.append(f"Under load: SM {sm} MHz, memory {memory} MHz, {watts} W.")
    if bandwidth:
        lines.append(f"The card's published bandwidth is {bandwidth} GB/s.")
    rows = [cells(r, device, bandwidth) for r in run["results"] if r["us"]]
    lines += ["", *table(head(device), rows)]
    if dropped_in := [r for r in run["results"] if not r["us"]]:
        names = ["drop-in", "shape", "dtypes", "host: ours, µs", "theirs", "launches: ours", "theirs"]
        lines += ["", *table(names, [drop_in(r) for r in dropped_in])]
    return lines


def chosen(device: str, op: str, shape: str) -> Iterator[harness.Case]:
    """The cases whose op and shape contain these texts, in lower case."""
    modules = [sde_step, policy_loss, advantage, integrations]
    if device == "cuda":  # on a CPU these ops are the formulas that they replace
        modules.append(block_ops)
    for module in modules:
        for case in module.cases(device):
            if op.lower() in case.op.lower() and shape.lower() in case.shape.lower():
                yield case


def main() -> None:
    """Command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=ABOUT, formatter_class=raw)
    parser.add_argument("--device", choices=DEVICES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", default="", help="only ops whose name contains this, such as sde_logp")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this, such as 'FLUX 1024' or Wan")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: 15)")
    parser.add_argument("--write", action="store_true", help=f"write {HERE}/DEVICE.json and docs/benchmarks.md")
    parser.add_argument("--render", action="store_true", help="only write docs/benchmarks.md from the JSON")
    args = parser.parse_args()
    if args.write and (args.op or args.shape):
        parser.error("--write replaces the whole table: expected no --op and no --shape")
    if not args.render:
        harness.keep_freed_memory()
        run: dict[str, Any] = {"machine": harness.machine(args.device), "results": []}
        bandwidth = harness.BANDWIDTH.get(run["machine"]["device"])
        print(*head(args.device), sep=" | ", flush=True)
        for case in chosen(args.device, args.op, args.shape):
            torch._dynamo.reset()
            row = harness.measure(case, args.device, args.rounds)
            run["results"].append(row)
            print(*(cells(row, args.device, bandwidth) if row["us"] else drop_in(row)), sep=" | ", flush=True)
        if not run["results"]:
            parser.error(f"no case has op '{args.op}' and shape '{args.shape}'")
        if args.write:
            write_json(RESULTS / f"{args.device}.json", rounded(run))
    for device in DEVICES if args.write or args.render else ():
        replace_block(PAGE, f"ops-{device}", block(device))


if __name__ == "__main__":
    main()
