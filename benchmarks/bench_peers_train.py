"""`python -m benchmarks.bench_peers_train`: training steps of the peers, and ours.

PREFGRPO_PEERS names the folder of the checkouts. Every trainer runs on the same pipeline folder (benchmarks/peer_runs):
tiny, or wide, where the model takes nearly all of the time. Seconds are each process's own, on one thread, without text
encoders; processes alternate, and a number is the median over all timed steps. For each peer:

- same work: `prefgrpo train` with the peer's samples, steps, trained steps, updates, batch, LoRA, rule and KL, with a
  gradient through both predictions of guidance, as in its checkout.
- as published: the peer with the settings of its launch script and ours with those of our recipe for the same method.
  DanceGRPO and Pref-GRPO recompute activations and train 60 % of the steps, one sample at a time; our batches are the
  recipe's, and Pref-GRPO's recipe recomputes nothing. Flow-Factory trains one of ten steps, in batches of two. For
  Flow-GRPO's SD3, whose settings are those above, ours has a gradient through the conditional prediction alone.

Results, the machine and its load go to results/peers_train.json, replacing earlier results of the same peers and sizes;
`--render` writes the tables of docs/integrations.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.peer_runs import PEERS, Work, make_pipeline

ROOT = Path(__file__).resolve().parent.parent
JSON, PAGE = ROOT / "benchmarks" / "results" / "peers_train.json", ROOT / "docs" / "integrations.md"
SIZES = {"tiny": Work(), "wide": Work("wide", side=64, prompts=1, steps=3, updates=1, kl=0.0)}
WARM = 2
"""Untimed steps at the start of a run."""
FULL = {"dance_grpo_flux"}
"""Peers that train all weights."""
ALONE = {"dance_grpo_flux", "pref_grpo_flux"}
"""Peers whose forwards hold one sample, in rollout and training."""
RECIPES = {
    "dance_grpo_flux": ROOT / "scripts" / "dancegrpo" / "full_flux.yaml",
    "pref_grpo_flux": ROOT / "scripts" / "prefgrpo" / "lora_flux.yaml",
    "flow_factory_flux": ROOT / "scripts" / "flowfactory" / "lora_grpo_flux.yaml",
}
"""Our recipes for the methods of peers whose launch scripts differ from the same work."""
OWN_BATCH = {"dance_grpo_flux": 4, "pref_grpo_flux": 2, "flow_factory_flux": 2}
"""Their batch sizes, at most a group."""
TEXT_TOKENS = {"flow_factory_flux": 512}
"""T5 tokens per prompt where they are not 128; Flow-Factory always pads to 512."""
KINDS = ("same", "own")
"""Kinds of our runs: the peer's work, and our recipe's settings where they differ."""


def kinds(name: str) -> tuple[str, ...]:
    """Kinds of our runs that are timed for a peer."""
    return KINDS if name in RECIPES or name == "flow_grpo_sd3" else KINDS[:1]


def as_published(name: str, work: Work) -> Work:
    """The work of a peer's launch script; six steps where it trains 60 % of them."""
    changes = {"steps": 6} if name in ALONE else {"steps": 10, "batch": 2}
    return replace(work, published=True, **changes) if name in RECIPES else work


def settings(name: str, work: Work, folder: Path, steps: int, kind: str) -> dict[str, Any]:
    """prefgrpo's configuration for the work of a peer's training step."""
    published = kind != "same"
    work = as_published(name, work) if published else work
    family, sde = PEERS[name].family, {"rule": "flow", "eta": 0.7}
    rollout: dict[str, Any] = {
        "height": work.side, "width": work.side, "steps": work.steps, "prompts_per_step": work.prompts,
        "group_size": work.group, "batch_size": work.batch, "guidance": 4.5 if family == "sd3" else 3.5,
    }  # fmt: skip
    train: dict[str, Any] = {
        "steps": steps, "updates_per_rollout": work.updates, "lora_rank": work.lora, "lora_alpha": 2 * work.lora,
        "lr": 1e-5, "clip_range": 1e-4,
    }  # fmt: skip
    if name in ALONE:
        sde = {"rule": "dance", "eta": 0.3} if name in FULL else sde
        rollout |= {"sigmas": "published", "truncate_timesteps": True, "shift": 3.0, "batch_size": 1}
        if published:
            rollout |= {"window_high": work.steps - 1, "window_size": int((work.steps - 1) * 0.6)}
            rollout["sde_everywhere"] = True
    elif name in RECIPES and published:
        rollout |= {"window_low": 1, "window_high": 4, "window_size": 1}
    if name in RECIPES and published:
        rollout |= {"window_policy": "subset", "batch_size": OWN_BATCH[name]}
    if name in FULL:
        train |= {"lora_rank": 0, "gradient_checkpointing": float(published)}
    if name.startswith("flow_grpo"):
        train |= {"kl_coef": work.kl, "kl_form": "flow_grpo"}
    if name == "flow_grpo_sd3" and published:
        train["guidance_gradient"] = "conditional"
    data = {"prompts": str(folder / "train.txt"), "max_length": TEXT_TOKENS.get(name, 128)}
    return {
        "model": str(folder), "family": family, "output": str(folder / "runs"), "name": "ours", "device": "cpu",
        "dtype": "fp32", "data": data,
        "reward": {"spec": "jpeg_compressibility"}, "rollout": rollout | sde, "train": train, "eval": {"every": 0},
        "checkpoint": {"every": 10**6},
    }  # fmt: skip


def train(name: str, work: Work, steps: int, kind: str) -> list[float]:
    """Seconds of each training step of ours, in this process."""
    import torch
    import transformers

    from benchmarks.peer_runs import Recorder
    from prefgrpo.config.loading import from_dict
    from prefgrpo.run.trainer import Callbacks, TrainingLoop

    torch.set_num_threads(1)
    recorder, seconds, start = Recorder("", 1, steps, ""), list[float](), [0.0]
    for cls in (transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection, transformers.T5EncoderModel):
        recorder.leave_out(cls)

    def timed(*_: Any) -> None:
        now = time.process_time()
        seconds.append(now - start[0] - recorder.encoding)
        start[0], recorder.encoding = time.process_time(), 0.0

    with tempfile.TemporaryDirectory() as folder:
        made = make_pipeline(PEERS[name].family, Path(folder), work)
        loop = TrainingLoop(from_dict(settings(name, work, made, steps, kind)), callbacks=Callbacks(timed))
        start[0] = time.process_time()
        loop.run()
    return seconds


def apart(module: str, *arguments: str) -> dict[str, Any]:
    """Result of `python -m MODULE ARGUMENTS --out FILE`. Raises RuntimeError with its last lines if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def measure(name: str, size: str, rounds: int, steps: int) -> dict[str, Any]:
    """One peer on one pipeline."""
    work = SIZES[size]
    timed = {kind: list[float]() for kind in ("peer", *kinds(name))}
    ours = ["--ours", name, "--sizes", size, "--steps", str(steps)]
    if name in RECIPES:
        timed["published"] = []
    for _ in range(rounds):
        if name in RECIPES:
            given = ["--work", json.dumps(asdict(as_published(name, work))), "--steps", str(WARM + steps)]
            rows = apart("benchmarks.peer_runs", name, *given)["steps"]
            timed["published"] += [row["seconds"] for row in rows[WARM:]]
        given = ["--work", json.dumps(asdict(work)), "--steps", str(WARM + steps)]
        timed["peer"] += [row["seconds"] for row in apart("benchmarks.peer_runs", name, *given)["steps"][WARM:]]
        for kind in kinds(name):
            timed[kind] += apart("benchmarks.bench_peers_train", *ours, "--kind", kind)["seconds"][WARM:]
    medians = {kind: statistics.median(values) for kind, values in timed.items()}
    batch = 1 if name in ALONE else work.batch
    return {"peer": name, "size": size, "work": asdict(replace(work, batch=batch)), "seconds": medians}


def tables(found: dict[str, Any]) -> list[str]:
    """The block of docs/integrations.md."""
    heads = "trainer | pipeline | s | same work, s | × | as published, s | ours, s"
    lines = [f"| {heads} | × |", "|---|---|" + "---:|" * 6]
    machines: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        s = run["seconds"]
        cells = [f"{s['peer']:.2f}", f"{s['same']:.2f}", f"{s['peer'] / s['same']:.2f}"]
        theirs = s.get("published", s["peer"])
        cells += [f"{theirs:.2f}", f"{s['own']:.2f}", f"{theirs / s['own']:.2f}"] if "own" in s else [""] * 3
        lines.append(f"| {run['peer']} | {run['size']} | {' | '.join(cells)} |")
        machines.setdefault(run["machine"]["device"], []).append(run)
    state = f"{found['rounds']} × {found['steps']} timed steps of each, on one thread."
    for device, runs in machines.items():
        load = max(run["machine"]["load"] for run in runs)
        names = f" ({', '.join(dict.fromkeys(run['peer'] for run in runs))})" if len(machines) > 1 else ""
        state += f" {device}{names}: torch {runs[0]['machine']['torch']}, load average up to {load:.1f}."
    done = {(run["peer"], run["size"]) for run in found["runs"]}
    absent = [f"{peer} ({size})" for size in SIZES for peer in PEERS if (peer, size) not in done]
    state += f" Not measured: {', '.join(absent)}." if absent else ""
    return [*lines, "", state]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed training steps of each kind in a round")
    parser.add_argument("--out", type=Path, default=JSON)
    parser.add_argument("--render", action="store_true", help="only write the document's tables from the JSON")
    parser.add_argument("--ours", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="same", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.ours:
        seconds = train(given.ours, SIZES[given.sizes[0]], WARM + given.steps, given.kind)
        given.out.write_text(json.dumps({"seconds": seconds}))
        return
    if not given.render:
        from benchmarks.harness import machine

        known = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
        runs = {(run["peer"], run["size"]): run for run in known}
        for size in given.sizes:
            for name in given.peers:
                runs[name, size] = rounded(measure(name, size, given.rounds, given.steps) | {"machine": machine("cpu")})
                print(json.dumps(runs[name, size]), flush=True)
                ordered = [runs[one, at] for at in SIZES for one in PEERS if (one, at) in runs]
                found = {"rounds": given.rounds, "steps": given.steps, "runs": ordered}
                write_json(given.out, rounded(found))
    if given.out == JSON:
        replace_block(PAGE, "peers_train", tables(json.loads(JSON.read_text())))


if __name__ == "__main__":
    main()
