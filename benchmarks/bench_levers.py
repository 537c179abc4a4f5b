"""`python -m benchmarks.bench_levers`: every option that makes training steps cheaper, off and on in the same run.

Each option ("lever") is measured with `prefgrpo`'s own training loop and fixed advantages, without a judge, on a small
pipeline: tiny, or wide (six blocks of width 256, 256 image tokens), where the model takes nearly all of the time.
One prompt, four samples, three of four steps trained. Results go to results/levers_cpu.json and docs/training.md:

- step, update: time with the lever divided by time without; medians of alternating steps, in CPU seconds of this
  process on one thread, so that other load does not count.
- memory: peak bytes of a step's tensors, with the lever divided by without.
- gradient: bitwise equal, or its relative error and cosine to the gradient without it, at the same weights and samples.

All other options have their defaults, except that `train.reuse_rollout_forward` and oneDNN's linear layers are off in
all rows but their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from benchmarks.blocks import replace_block, rounded, write_json
from benchmarks.harness import machine
from benchmarks.layer_bytes import peft_layers
from benchmarks.peer_runs import Work, make_pipeline
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import merge
from prefgrpo.integrations.rotary import stock_rotary
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import linear
from prefgrpo.rollout import rollout
from prefgrpo.run.memory import MemoryTracker
from prefgrpo.run.session import Clock
from prefgrpo.run.trainer import TrainingLoop
from prefgrpo.sde.noise import initial_latents

ROOT = Path(__file__).resolve().parent.parent
JSON, PAGE = ROOT / "benchmarks" / "results" / "levers_cpu.json", ROOT / "docs" / "training.md"
SIZES = {"tiny": Work(), "wide": Work("wide", side=64)}
GROUP, STEPS, TRAINED = 4, 4, 3
TARGETS = Targets.of(torch.tensor([[1.5, -0.2, -1.4, 0.1]]))


@dataclass(frozen=True)
class Lever:
    """An option and its baseline."""

    on: dict[str, Any]
    """Settings with the lever."""
    default: str
    """The option's default, and the reason for it."""
    off: dict[str, Any] = field(default_factory=dict)
    """Settings without the lever."""
    family: str = "flux"
    baseline: Callable[[nn.Module], AbstractContextManager[None]] = nullcontext
    """Context of the baseline's steps, given the transformer."""
    onednn: bool = False
    """Whether linear layers use oneDNN, on any CPU."""


def same_noise(_: nn.Module) -> AbstractContextManager[None]:
    """All samples of a group start from its first sample's noise, but each is denoised on its own."""
    return patch.object(  # type: ignore[return-value]
        rollout, "initial_latents", lambda seed, ids, shape: initial_latents(seed, ids // GROUP * GROUP, shape)
    )


LATE = {"window_low": 2}
ONE = {"window_size": 1}
LEVERS = {
    "`train.reuse_rollout_forward`": Lever(
        {"train": {"reuse_rollout_forward": True}}, "auto: on if no bit changes and the graphs fit"
    ),
    "the same, SD3 with guidance": Lever({"train": {"reuse_rollout_forward": True}}, "auto", family="sd3"),
    "`train.guidance_gradient: conditional`, SD3": Lever(
        {"train": {"guidance_gradient": "conditional"}}, "both, because this changes the gradient", family="sd3"
    ),
    "`rollout.batch_size: 4`, without it 1": Lever({}, "8", {"rollout": {"batch_size": 1}}),
    "`rollout.window_size: 1`": Lever({"rollout": ONE}, "all steps; most recipes set it"),
    "`rollout.merge_lora`, one of four steps trained": Lever(
        {"rollout": ONE},
        "auto: on in fp32, where it only rounds (here the LoRA is still 0)",
        {"rollout": ONE | {"merge_lora": False}},
    ),
    "`rollout.same_noise`: two steps before the window": Lever(
        {"rollout": LATE | {"same_noise": True}}, "always with this option", {"rollout": LATE}, baseline=same_noise
    ),
    "`train.objective: awm`": Lever({"train": {"objective": "awm"}}, "grpo, because this is another objective"),
    "no `train.gradient_checkpointing`": Lever(
        {}, "off; `prefgrpo plan` says where it is needed", {"train": {"gradient_checkpointing": True}}
    ),
    "our LoRA layers instead of peft's": Lever({}, "always", baseline=peft_layers),
    "our rotary embedding instead of diffusers'": Lever({}, "always", baseline=lambda _: stock_rotary()),
    "oneDNN's linear layers instead of MKL's": Lever(
        {}, "on AMD CPUs from Zen 5 on", baseline=lambda _: patch.object(linear, "FASTER", False), onednn=True
    ),
    "`compile`": Lever({"compile": True}, "off, because the first steps compile for minutes"),
}


def settings(family: str, folder: Path, work: Work, name: str) -> dict[str, Any]:
    """Settings common to both sides."""
    rollout = {
        "height": work.side, "width": work.side, "steps": STEPS, "window_high": TRAINED, "prompts_per_step": 1,
        "group_size": GROUP, "batch_size": GROUP, "guidance": 4.5 if family == "sd3" else 3.5,
    }  # fmt: skip
    train = {"lora_rank": 32, "lora_alpha": 64, "lr": 1e-8, "reuse_rollout_forward": False}
    return {
        "model": str(folder), "family": family, "output": str(folder / "runs"), "name": name,
        "device": "cpu", "dtype": "fp32", "data": {"prompts": str(folder / "train.txt"), "max_length": 128},
        "reward": {"spec": "jpeg_compressibility"}, "rollout": rollout, "train": train, "eval": {"every": 0},
    }  # fmt: skip


class Side:
    """A training loop that repeats its first step."""

    def __init__(self, lever: Lever, changes: dict[str, Any], folder: Path, work: Work, name: str) -> None:
        self.loop = TrainingLoop(from_dict(merge(settings(lever.family, folder, work, name), changes)))
        self.loop.targets = lambda step, scores: (TARGETS, {})  # type: ignore[method-assign]
        baseline = lever.baseline if name == "off" else nullcontext
        self.context = partial(baseline, self.loop.adapter.transformer)
        self.gradient = torch.empty(0)
        self.seconds: list[dict[str, float]] = []
        update = self.loop.policy.update

        def seen(world: Any) -> float:
            self.gradient = torch.cat(
                [p.grad.double().flatten() for p in self.loop.policy.params if p.grad is not None]
            )
            return update(world)

        self.loop.policy.update = seen  # type: ignore[method-assign]

    def step(self) -> dict[str, float]:
        """CPU seconds of one step and of its update."""
        with self.context():
            clock, begin = Clock(now=time.process_time), time.process_time()
            self.loop.step(0, clock)
            return {"step": time.process_time() - begin, "update": clock.seconds["update"]}

    def most(self) -> int:
        """Peak bytes of a step's tensors."""
        policy = self.loop.policy
        held = [t for module in self.loop.adapter.modules().values() for t in [*module.parameters(), *module.buffers()]]
        held += [t for t in policy.state_dict().values() if isinstance(t, Tensor)]
        with MemoryTracker(held) as tracker:
            self.step()
        return tracker.peak


def compared(gradient: Tensor, truth: Tensor) -> dict[str, Any]:
    """How close a gradient is to a reference gradient."""
    cosine = float(gradient @ truth / (gradient.norm() * truth.norm()))
    error = float((gradient - truth).norm() / truth.norm())
    return {"bitwise": torch.equal(gradient, truth), "error": error, "cosine": cosine}


def measure(name: str, size: str, rounds: int) -> dict[str, Any]:
    """Measure one lever on one pipeline."""
    lever, work = LEVERS[name], SIZES[size]
    torch.compiler.reset()  # else blocks compiled for many shapes would run uncompiled
    with tempfile.TemporaryDirectory() as folder, patch.object(linear, "FASTER", lever.onednn):
        made = make_pipeline(lever.family, Path(folder), work)
        sides = [Side(lever, changes, made, work, kind) for kind, changes in (("off", lever.off), ("on", lever.on))]
        for side in sides:
            side.step()
        gradient = compared(sides[1].gradient, sides[0].gradient)
        for _ in range(rounds):
            for side in sides:
                side.seconds.append(side.step())
        memory = [side.most() for side in sides]
        off, on = ({k: statistics.median(s[k] for s in side.seconds) for k in ("step", "update")} for side in sides)
        for side in reversed(sides):
            side.loop.close()
    ratios = {k: on[k] / off[k] for k in off}
    mib = {"memory_mib": [m / 2**20 for m in memory]}
    return {"lever": name, "size": size, "seconds": off, "ratio": ratios, **mib, "gradient": gradient}


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/training.md."""
    lines = [
        "| option | pipeline | step | update | memory | gradient | default |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for run in found["runs"]:
        g, (off, on) = run["gradient"], run["memory_mib"]
        same = "bitwise" if g["bitwise"] else f"to rounding ({g['error']:.0e})" if g["error"] < 1e-4 else ""
        cells = [f"×{run['ratio']['step']:.2f}", f"×{run['ratio']['update']:.2f}", f"×{on / off:.2f}"]
        cells += [same or f"cosine {g['cosine']:.2f}", LEVERS[run["lever"]].default]
        lines.append(f"| {run['lever']} | {run['size']} | {' | '.join(cells)} |")
    m = found["machine"]
    state = f"One thread of an {m['device']}, load average {m['load']:.1f}, torch {m['torch']}; CPU seconds, "
    return [*lines, "", f"{state}medians of {found['rounds']} steps with and without the option, alternating."]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS), metavar="LEVER")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=JSON)
    parser.add_argument("--render", action="store_true", help="only write the document's table from the JSON")
    given = parser.parse_args(argv)
    if not given.render:
        torch.set_num_threads(1)
        runs = list[dict[str, Any]]()
        for name in given.levers:
            for size in given.sizes:
                runs.append(rounded(measure(name, size, given.rounds)))
                print(json.dumps(runs[-1]), flush=True)
                write_json(given.out, {"machine": machine("cpu"), "rounds": given.rounds, "runs": runs})
    if given.out == JSON:
        replace_block(PAGE, "levers", table(json.loads(JSON.read_text())))


if __name__ == "__main__":
    main()
