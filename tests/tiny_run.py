"""Tiny real runs for the trainer tests: a random FLUX pipeline with 0.1 M weights, 16×16 pixels, real commands.

`start` runs `prefgrpo …` in a process forked from a server that has everything imported, so that a run that is killed,
resumed or split over ranks starts in a fraction of a second. A test that kills or interrupts a run passes a `Hold`: the
process stops at a named call and waits there, so the signal arrives at the same point on any machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from prefgrpo.config.recipe import merge as merged
from prefgrpo.data.answer import Answer
from prefgrpo.models import blocks
from prefgrpo.objectives.base import Targets
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Question, Reward
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.rollout import Trajectory
from prefgrpo.tiny import pipelines
from prefgrpo.trainer import Trainer

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tiny_warm"])

ALONE = World(0, 1, torch.device("cpu"))
PROMPTS = [f"a red circle number {k}" for k in range(1, 11)]

BASE: dict[str, Any] = {
    "dtype": "fp32",
    "trackers": [],
    "data": {"max_length": 24},
    "rollout": {"height": 16, "width": 16, "steps": 3, "prompts_per_step": 2, "group_size": 4, "batch_size": 4},
    "rewards": "jpeg_compressibility",
    "train": {"steps": 4, "lora_rank": 4, "lora_alpha": 6, "lr": 1e-2, "clip_range": 1e-5},
    "eval": {"every": 2, "rewards": "jpeg_incompressibility"},
    "checkpoint": {"every": 2},
}
"""A run of 4 steps of 2 × 4 images; LoRA alpha differs from its rank."""


def world(folder: Path) -> Path:
    """Writes the tiny pipeline and prompts into `folder` and returns it."""
    pipelines.make("flux", folder / "flux")
    (folder / "train.txt").write_text("\n".join(PROMPTS[:7]) + "\n", encoding="utf-8")
    (folder / "dev.txt").write_text("\n".join(PROMPTS[7:]) + "\n", encoding="utf-8")
    return folder


def settings(place: Path, name: str, **over: Any) -> dict[str, Any]:
    """The configuration of a run over the tiny pipeline in `place`, with absolute paths."""
    paths = {
        "model": str(place / "flux"),
        "name": name,
        "output": str(place / "runs"),
        "data": {"prompts": str(place / "train.txt")},
        "eval": {"prompts": str(place / "dev.txt")},
    }
    return merged(merged(BASE, paths), over)


def recipe(place: Path, name: str, **over: Any) -> Path:
    """Writes `settings` to a YAML file and returns its path."""
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings(place, name, **over), allow_unicode=True), encoding="utf-8")
    return file


class Brightness(Reward):
    """Mean of all pixels."""

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample."""
        samples = [sample for (sample,) in asked]
        return [Answer(float(s.media.pixels.mean())) for s in samples]


BRIGHTNESS = f"{__name__}.Brightness"
"""The name of `Brightness` in `rewards`."""


@dataclass(frozen=True)
class Hold:
    """Where a process stops and waits for the test: after (or before) the n-th call of a function."""

    function: str
    """`module:name` or `module:Class.name`."""
    call: int = 1
    before: bool = False
    about: str = ""
    """Only calls with this text in their arguments are counted."""

    def __post_init__(self) -> None:
        pkgutil.resolve_name(self.function)  # a renamed function fails here, not only in a child process

    def install(self, reached: Any, go: Any) -> None:
        """Patch the function in this process."""
        module, _, path = self.function.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner: Any = pkgutil.resolve_name(f"{module}:{owner_path}")
        original, calls = getattr(owner, name), 0

        def held(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            counted = not self.about or self.about in str(args)
            calls += counted
            here = counted and calls == self.call
            out = None if here and self.before else original(*args, **kwargs)
            if here:
                reached.set()
                while not go.wait(0.1):  # a signal that another thread received is handled between two waits
                    pass
            return original(*args, **kwargs) if here and self.before else out

        setattr(owner, name, held)


class Run:
    """One `prefgrpo` command in its own process."""

    def __init__(
        self, argv: list[str], log: Path, env: dict[str, str], hook: Callable[[], None] | None, hold: Hold | None
    ) -> None:
        self.log, self._hold = log, (hold, _CONTEXT.Event(), _CONTEXT.Event())
        with mock.patch.dict(os.environ, environment()):
            forkserver.ensure_running()
        self.process = _CONTEXT.Process(target=_child, args=(argv, str(log), env, hook, self._hold), daemon=True)
        self.process.start()

    @property
    def output(self) -> str:
        """Everything that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""

    def wait(self, seconds: float = 180.0) -> int:
        """The exit code; fails if the process does not end in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.abort()
            raise AssertionError(f"still running after {seconds} s:\n{self.output}")
        return self.process.exitcode

    def abort(self) -> None:
        """End a process that hangs; its output then tells where every thread stood."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGABRT)  # faulthandler prints the stacks
            self.process.join(10.0)
            self.process.kill()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def until(self, done: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until `done()` is true; fails if the process ends first or `seconds` have passed."""
        limit = time.monotonic() + seconds
        while not done():
            assert self.process.is_alive() and time.monotonic() < limit, f"condition never met:\n{self.output}"
            time.sleep(0.002)

    def until_held(self) -> None:
        """Wait until the process has stopped at its `Hold`."""
        self.until(self._hold[1].is_set)

    def release(self) -> None:
        """Let the held process continue."""
        self._hold[2].set()


def start(
    argv: list[str], log: Path, hook: Callable[[], None] | None = None, hold: Hold | None = None, **env: str
) -> Run:
    """Start `prefgrpo argv`; `hook` (a module-level function) runs first in the new process."""
    return Run(argv, log, env, hook, hold)


def train(recipe_file: Path, *options: str, hook: Callable[[], None] | None = None, **env: str) -> tuple[int, str]:
    """(exit code, output) of `prefgrpo train RECIPE options`."""
    run = start(["train", str(recipe_file), *options], recipe_file.with_suffix(".log"), hook, **env)
    return run.wait(), run.output


def trained(recipe_file: Path, *options: str, **env: Any) -> str:
    """The output of a `train` that succeeds."""
    code, output = train(recipe_file, *options, **env)
    assert code == 0, output
    return output


def attempt(capsys: Any, *argv: Any) -> tuple[int, str]:
    """(exit code, output) of `prefgrpo argv` in this process, for commands that end before a run starts."""
    from prefgrpo.commands.cli import main

    code = main([str(word) for word in argv])
    return code, "".join(capsys.readouterr())


def _child(argv: list[str], log: str, env: dict[str, str], hook: Callable[[], None] | None, hold: Any) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    if hook is not None:
        hook()
    where, reached, go = hold
    if where is not None:
        where.install(reached, go)
    from prefgrpo.__main__ import main

    sys.argv = ["prefgrpo", *argv]
    sys.exit(main())


def environment(**env: str) -> dict[str, str]:
    """This process's environment for another process, with the same import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env}


def collect(loop: Trainer, step: int) -> list[Batch]:
    """The rollouts of a training step, with every sample passed to the scorer as in the loop."""
    plan = loop.groups.plan(step)
    loop.scorer.begin(step, plan.scored)
    return list(loop.groups.batches(plan, loop.scorer.add))


def batches_of(loop: Trainer, step: int) -> list[Batch]:
    """The same, unscored."""
    return list(loop.groups.batches(loop.groups.plan(step), lambda group, member, sample: None))


def computed(loop: Trainer, scores: StepScores) -> tuple[Targets, dict[str, float]]:
    """Targets and metrics of the first step, of groups whose images' distances do not matter."""
    return loop.targets.compute(loop.groups.plan(0), scores, np.zeros(len(scores.samples)))


def targets_of(advantage: Tensor) -> Targets:
    """Targets from advantages alone, without comparisons."""
    none = advantage.new_zeros(*advantage.shape, advantage.shape[1])
    return Targets(advantage, none, none, torch.ones_like(advantage, dtype=torch.bool))


def stored(trajectory: Batch | Trajectory) -> list[Tensor]:
    """The final latents, then x, x_next and logp (and v, if stored) of every step."""
    of_steps = [(s.x, s.x_next, s.logp) + (() if s.v is None else (s.v,)) for s in trajectory.transitions]
    return [trajectory.latents, *(tensor for step in of_steps for tensor in step)]


def rows(folder: Path, timeless: bool = True) -> list[dict[str, Any]]:
    """Every row of metrics.jsonl, by default without its wall-clock times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if not (timeless and k.startswith("time/"))} for line in lines]


def tree(folder: Path) -> dict[str, bytes]:
    """{relative path: content} of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def hidden(folder: Path) -> list[str]:
    """Names of the hidden files and folders below a folder, except the .metadata of finished checkpoints."""
    return [p.name for p in folder.rglob(".*") if p.name != ".metadata"]


def weights(run: Path) -> dict[str, bytes]:
    """{relative path and name of the tensor: bytes} of every safetensors file of a run."""
    return {
        f"{file.relative_to(run)} {name}": tensor.float().numpy().tobytes()
        for file in sorted(run.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def ranks(
    recipe_file: Path,
    size: int,
    *options: str,
    hook: Callable[[], None] | None = None,
    command: str = "train",
    holds: dict[int, Hold] | None = None,
    **env: str,
) -> list[Run]:
    """Start `prefgrpo COMMAND RECIPE options` on `size` ranks as torchrun would; `holds` maps ranks to their `Hold`."""
    return start_ranks([command, str(recipe_file), *options], recipe_file, size, hook, holds, **env)


def start_ranks(
    argv: list[str],
    log: Path,
    size: int,
    hook: Callable[[], None] | None = None,
    holds: dict[int, Hold] | None = None,
    **env: str,
) -> list[Run]:
    """Start `prefgrpo argv` on `size` ranks as torchrun would; rank k prints to `log` with the suffix .rank{k}.log."""
    from judge_server import free_port  # not above: started processes need no aiohttp

    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | env
    own = [shared | {"RANK": str(k), "LOCAL_RANK": str(k)} for k in range(size)]
    logs = [log.with_suffix(f".rank{k}.log") for k in range(size)]
    return [start(argv, file, hook, (holds or {}).get(k), **own[k]) for k, file in enumerate(logs)]


def all_end(runs: list[Run], code: int = 0, seconds: float = 180.0) -> list[str]:
    """The outputs of all ranks, each of which must end with this exit code."""
    for run in runs:
        run.process.join(seconds)
    if any(run.process.exitcode is None for run in runs):
        for run in runs:
            run.abort()
    assert [r.wait() for r in runs] == [code] * len(runs), "\n".join(r.output for r in runs)
    return [r.output for r in runs]


def opened(config, world=ALONE):
    """The adapter of a run, ready to train."""
    from prefgrpo.parallel.parallelize import parallelize
    from prefgrpo.run.opening import open_adapter

    adapter = open_adapter(config, world.device, True, world.layout.fsdp or config.fp8_base)
    parallelize(adapter, config, world)
    return adapter


def fuse_on_cpu():
    """Runs in a new process before the command: blocks are fused without a GPU, where the ops run their references."""
    blocks.FUSED_ON = ("cpu",)
    warnings.filterwarnings("error", message=".*runs as in diffusers")
