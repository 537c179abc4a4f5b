"""`prefgrpo plan RECIPE [--gpus N] [--nodes M]`: estimated memory, time, traffic and judges of a run, and best mesh.

Prints the estimates of `run.memory` and `run.speed`, which need only the model's config. Invariant: the effect printed
for a hint or a mesh was computed by the same estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prefgrpo.config.loading import from_dict, to_dict
from prefgrpo.config.recipe import ConfigError, merge
from prefgrpo.config.schema import AUTO, Config, ParallelConfig, recomputed_share
from prefgrpo.models import family
from prefgrpo.objectives import objective
from prefgrpo.parallel.mesh import Layout, problem
from prefgrpo.run.batch_size import (
    FILLED,
    FILLED_UNTRIED,
    auto_notes,
    chooses_share,
    estimate_batch_sizes,
    estimate_share,
)
from prefgrpo.run.loading import merges_lora
from prefgrpo.run.memory import GIB, Estimate, estimate, samples_per_index, trained_steps
from prefgrpo.run.speed import (
    HARDWARE,
    MFU,
    Machines,
    StepTime,
    estimated_graph_bytes,
    judge_servers,
    meshes,
    reuse_obstacles,
    reuses_forwards,
    step_time,
)


def plan(
    config: Config,
    memory_gib: float | None,
    gpu: str = "h100",
    nodes: int = 0,
    mfu: float | None = None,
    judge_billions: float = 8.0,
    levers: bool = False,
) -> int:
    """Print the plan; returns 0 if it fits into `memory_gib` per GPU, else 1. Raises ConfigError or ModelError."""
    hardware = HARDWARE[gpu]
    memory_gib = hardware.memory_gib if memory_gib is None else memory_gib
    machines = Machines(hardware, config.gpus, nodes or math.ceil(config.gpus / 8), mfu or MFU[config.compile])
    if config.gpus % machines.nodes:
        raise ConfigError([f"gpus: expected a multiple of {machines.nodes} nodes, got {config.gpus}"])
    given = config
    if config.rollout.batch_size == AUTO:
        config = estimate_batch_sizes(config, FILLED * memory_gib * GIB)
    trace = partial(estimate, meshes=partial(meshes, config, machines=machines))
    if chooses_share(config):
        config, whole = estimate_share(config, FILLED_UNTRIED * memory_gib * GIB, trace)
    else:
        whole = trace(config)
    for line in auto_notes(given, config):
        print(line)
    for name, count in whole.parameters.items():
        print(f"{name:<20} {count / 1e6:12.2f} M parameters")
    print(f"per GPU, {config.gpus} GPU(s):")
    for name, value in whole.parts.items():
        print(f"  {name:<18} {value / GIB:10.4g} GiB")
    print(f"  {'sum':<18} {whole.total / GIB:10.4g} GiB of {memory_gib:g}")
    if config.data.cache:
        print(f"  text encoders      on disk, once `prefgrpo preprocess` has filled {config.data.cache}")
    shown = ", ".join(f"{name} {value / GIB:.4g}" for name, value in whole.phases.items())
    print(f"activations of {config.rollout.batch_size} samples at once: {shown} GiB; the largest is part of the sum")
    fits = whole.total < memory_gib * GIB
    print("fits" if fits else f"does not fit: {_hint(config, whole)}")
    taken = _step(config, whole, machines, memory_gib)
    for line in (*_speed(config, taken, machines, gpu, judge_billions), *_mesh(config, whole, machines, memory_gib)):
        print(line)
    if levers:
        print("samples per second and GPU, and peak memory, with each option alone:")
        first = None
        for name, rate, gib in compare_levers(config, whole, machines):
            first, ratio = first or rate, f"×{rate / first:.2f}" if first else "     "
            print(f"  {name:<38} {rate:10.4g} {ratio} {gib:.4g} GiB{'' if gib < memory_gib else ', does not fit'}")
    return 0 if fits else 1


# ---- speed ----------------------------------------------------------------------------------------------------------


def _step(config: Config, whole: Estimate, machines: Machines, memory_gib: float) -> StepTime:
    return step_time(config, whole.flop, whole.model, machines, reuses_forwards(config, whole, memory_gib))


def _speed(config: Config, taken: StepTime, machines: Machines, gpu: str, judge_billions: float) -> Iterator[str]:
    """Lines on the time, traffic and judges of a step."""
    unit = "clips" if family(config.family).default_frames else "images"
    yield (
        f"a step of {taken.samples} {unit} on {machines.gpus} × {gpu}, {machines.nodes} node(s), at "
        f"{machines.mfu:g} of the peak:"
    )
    for name, seconds in taken.seconds.items():
        yield f"  {name:<18} {seconds:10.4g} s"
    yield f"  {'total':<18} {taken.total:10.4g} s, {taken.rate(machines):.4g} {unit} per GPU and second"
    for kind, size in taken.traffic.items():
        yield f"  {kind:<18} {size / GIB:10.4g} GiB per GPU over {taken.links[kind]}"
    asked, each, servers = judge_servers(config, taken, machines, judge_billions)
    if asked:
        yield (
            f"judging: {asked} comparisons of {each:.2g} s ({judge_billions:g} B parameters on one {gpu}, one token): "
            f"{servers} such server(s) keep up with the {'step' if config.rollout.staleness else 'rollout'}"
        )


def _mesh(config: Config, whole: Estimate, machines: Machines, memory_gib: float) -> Iterator[str]:
    """The line on the fastest mesh that fits."""
    times = {
        p: _step(replace(config, parallel=p), whole, machines, memory_gib).total
        for p, held in whole.other_meshes.items()
        if held < memory_gib * GIB
    }
    if not times:
        yield "this run fits on no mesh of these GPUs"
        return
    inner: Mapping[ParallelConfig, int] = {p: p.shard * p.ring * p.ulysses for p in times}
    best = min(times, key=lambda p: (round(times[p], 3), inner[p]))
    layout = Layout.of(replace(config, parallel=best), machines.gpus)
    sizes = f"replicate {layout.replicate} × shard {best.shard} × ring {best.ring} × ulysses {best.ulysses}"
    now = (config.parallel.shard, config.parallel.ulysses) == (best.shard, best.ulysses)
    held = whole.other_meshes[best] / GIB
    options = f"--parallel.shard {best.shard} --parallel.ulysses {best.ulysses}"
    yield (
        f"fastest mesh that fits: {sizes}, {times[best]:.4g} s and {held:.4g} GiB ("
        f"{'as configured' if now else options})"
    )


def compare_levers(config: Config, whole: Estimate, machines: Machines) -> Iterator[tuple[str, float, float]]:
    """(name, samples per second and GPU, GiB per GPU) without any of these options, then with each alone."""
    train = {"reuse_rollout_forward": False, "guidance_gradient": "both"}
    base = from_dict(merge(to_dict(config), {"rollout": {"merge_lora": False}, "train": train, "compile": False}))
    same = config.train.guidance_gradient == "both" and not merges_lora(config)
    plain = whole if same else estimate(base)
    reached = {False: MFU[False] if config.compile else machines.mfu, True: MFU[True]}

    def found(name: str, changed: Config, held: Estimate) -> tuple[str, float, float]:
        at, reuses = replace(machines, mfu=reached[changed.compile]), changed.train.reuse_rollout_forward is True
        taken = step_time(changed, held.flop, held.model, at, reuses)
        return name, taken.rate(at), (held.total + (estimated_graph_bytes(changed, held) if reuses else 0.0)) / GIB

    yield found("none of them", base, plain)
    for name, changes, applies, new_flop in _levers(base):
        if applies:
            changed = from_dict(merge(to_dict(base), changes))
            yield found(name, changed, estimate(changed) if new_flop else plain)


def _levers(config: Config) -> list[tuple[str, dict[str, Any], bool, bool]]:
    """Options that make steps cheaper: (name, changes of the configuration, whether it applies to this run, whether it
    changes the FLOP of a forward or backward, which needs a new estimate)."""
    t, goal, steps = config.train, objective(config.train), trained_steps(config)
    layout = Layout.of(config, config.gpus)
    trajectory, recomputes = goal.collector == "trajectory", recomputed_share(t) > 0
    reusable = not reuse_obstacles(config, layout.shard * layout.context > 1)
    guided = (cfg := family(config.family).cfg) is not None and cfg.active(config.rollout.guidance)
    awm = {"objective": "awm", "objective_options": {}, "kl_coef": 0.0}
    return [
        ("train.reuse_rollout_forward", {"train": {"reuse_rollout_forward": True}}, reusable, False),
        ("rollout.merge_lora", {"rollout": {"merge_lora": True}}, bool(t.lora_rank) and layout.split == 1, True),
        ("train.guidance_gradient: conditional", {"train": {"guidance_gradient": "conditional"}}, guided, True),
        ("no train.gradient_checkpointing", {"train": {"gradient_checkpointing": False}}, recomputes, True),
        ("compile", {"compile": True}, True, False),
        ("rollout.window_size: halved", {"rollout": {"window_size": steps // 2}}, trajectory and steps > 1, False),
        ("train.objective: awm", {"train": awm}, trajectory, False),
    ]


# ---- memory ---------------------------------------------------------------------------------------------------------


def _hint(config: Config, whole: Estimate) -> str:
    """A field that reduces the total, with its new and current value, verified; tries the largest part first."""
    phase = max(whole.phases, key=lambda name: whole.phases[name])
    sizes = {name: size for name, size in whole.parts.items() if name != "activations"} | {phase: whole.phases[phase]}
    for part in sorted(sizes, key=lambda name: -sizes[name]):
        for name, value in _memory_reductions(config, part):
            section, _, key = name.rpartition(".")
            owner: Any = getattr(config, section) if section else config
            changed: dict[str, Any] = {key: value}
            less = estimate(replace(config, **({section: replace(owner, **changed)} if section else changed))).total
            if less < whole.total:
                words = value if isinstance(value, tuple) else () if value is True else (value,)
                option = " ".join([f"--{name.replace('_', '-')}", *map(str, words)])
                now = getattr(owner, key) or "none"
                return f"try {option} (now {now}): less for {part}, {less / GIB:.4g} GiB in total"
    return "no field reduces it; use more GPUs with a larger parallel.shard (or ulysses): docs/scale.md"


def _memory_reductions(config: Config, part: str) -> list[tuple[str, Any]]:
    """(field, next value) of the fields that may still reduce this part or phase of an `Estimate`."""
    r, t, m, p = config.rollout, config.train, config.memory, config.parallel
    larger = range(config.gpus + 1, r.prompts_per_step * r.group_size * p.ring * p.ulysses + 1)
    fits = (n for n in larger if not problem(p, n))
    now = samples_per_index(config, Layout.of(config, config.gpus).data)
    more = [n for n in fits if samples_per_index(config, Layout.of(config, n).data) < now]
    batch = [("rollout.batch_size", r.batch_size // 2)] if r.batch_size > 1 else []
    trained = [("train.lora_rank", t.lora_rank // 2 if t.lora_rank else 64)] if t.lora_rank != 1 else []
    if part in ("rollout", "update"):
        recomputed = [("train.checkpointing_share", 1.0)] if recomputed_share(t) < 1 else []
        switched = recomputed if t.gradient_checkpointing else [("train.gradient_checkpointing", True)]
        return (switched if part == "update" else []) + batch
    if part == "decode":
        fewer = [("memory.decode_batch", 1)] if (m.decode_batch or r.batch_size) > 1 else []
        return fewer + ([] if m.vae_tiling else [("memory.vae_tiling", True)])
    if part == "optimiser":
        return ([("train.ema_decay", 0.0)] if t.ema_decay and t.lora_rank else []) + trained
    if part == "weights":
        waiting = [("memory.offload", (*m.offload, "vae"))] if "vae" not in m.offload else []
        return ([] if t.lora_rank else trained) + waiting
    return [("data.cache", "FOLDER")] if part == "text encoders" else [("gpus", more[0])] if more else []
