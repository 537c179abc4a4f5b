"""Estimates the time of a training step and the traffic between GPUs, from FLOP, bytes and the hardware's peaks.

    seconds = FLOP / (peak · mfu) + exposed traffic / bandwidth of the link

A single factor, mfu, covers everything that keeps kernels from the peak; docs/scale.md says where published runs differ
from it. All-gathers of sharded weights are prefetched, so only the time beyond a phase's compute counts; all-to-alls
and the all-reduce of a LoRA's gradients are exposed. Judging overlaps the rollout. Invariant: the work is that of the
real run (`assign_batches`, same windows, forwards and passes), its FLOP counted by torch (`memory.estimate`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from prefgrpo.config.schema import Config, ParallelConfig, recomputed_share, splits
from prefgrpo.judge.plans import get_plan
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.objectives.base import EndpointObjective, GroupObjective
from prefgrpo.parallel.context import context_errors, unsupported
from prefgrpo.parallel.mesh import Layout, problem
from prefgrpo.rewards import parse_reward_spec
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.sampling import window
from prefgrpo.run.judging import PAIRWISE
from prefgrpo.run.memory import DenoiserSizes, Estimate, kept_graphs, trained_steps

MFU = {False: 0.3, True: 0.45}
"""Default model FLOP utilisation, as a share of the bf16 peak, without and with `compile`."""
JUDGE_MFU = 0.3
PIXELS_PER_TOKEN = 28 * 28
"""Pixels per image token of a Qwen2-VL judge."""
FRAMES_SHOWN = 8
"""Frames of a clip that the judge sees."""
TEXT_TOKENS = 200
"""Text tokens of a comparison: template and prompt."""


@dataclass(frozen=True)
class Hardware:
    """Vendor figures of a GPU and its links; link bandwidths in bytes per second and direction."""

    flops: float
    """Dense bf16 FLOP/s."""
    flops_fp32: float
    """fp32 FLOP/s without TF32."""
    memory_gib: float
    nvlink: float
    """Bandwidth to the other GPUs of the node."""
    network: float
    """Bandwidth to other nodes, per GPU: 400 Gbit/s (A100: 200)."""


HARDWARE = {
    "h100": Hardware(989e12, 67e12, 80, 450e9, 50e9),
    "h200": Hardware(989e12, 67e12, 141, 450e9, 50e9),
    "a100": Hardware(312e12, 19.5e12, 80, 300e9, 25e9),
}


@dataclass(frozen=True)
class Machines:
    """The hardware that a run is planned for."""

    gpu: Hardware
    gpus: int
    nodes: int
    mfu: float

    def rate(self, config: Config) -> float:
        """Effective FLOP/s of one GPU."""
        return self.mfu * (self.gpu.flops if config.dtype == "bf16" else self.gpu.flops_fp32)


@dataclass(frozen=True)
class StepTime:
    """Time and traffic of one training step, per GPU."""

    seconds: dict[str, float]
    """Seconds by phase; `gather`, `all-to-all` and `reduce` count only what compute does not hide."""
    traffic: dict[str, float]
    """Bytes that a GPU sends, by kind of traffic."""
    links: dict[str, str]
    """Kind of traffic → nvlink or network."""
    samples: int

    @property
    def total(self) -> float:
        """Seconds of the whole step, assuming that judging is fully overlapped."""
        return sum(self.seconds.values())

    def rate(self, machines: Machines) -> float:
        """Samples per second and GPU."""
        return self.samples / self.total / machines.gpus


@dataclass(frozen=True)
class Work:
    """Model calls in the step of the busiest data-parallel index, in samples times passes."""

    samples: int
    """Samples that it generates."""
    batches: int
    rollout: float
    """Forwards of the rollout."""
    trained: float
    """Forwards with backward."""
    forward_only: float
    """Forwards without backward: of references, anchors and first passes."""
    reused: float
    """The part of `trained` whose forward is reused from the rollout."""


def work(config: Config, data: int, reuses: bool) -> Work:
    """The work of the busiest of `data` data-parallel indices; reuses: the first update reuses the rollout's graphs."""
    r, t, goal = config.rollout, config.train, objective(config.train)
    samples, batches, first = Counter[int](), Counter[int](), Counter[int]()
    forwards, shared = defaultdict[int, float](float), shared_steps(config)
    for batch in assign_batches(config, [r] * r.prompts_per_step, data, goal.whole_groups):
        samples[batch.index] += len(batch.places)
        batches[batch.index] += 1
        first[batch.index] += len(batch.places) * (batch.update == 0)
        forwards[batch.index] += len(batch.places) * (r.steps - shared) + len({p for p, _ in batch.places}) * shared
    made = max(samples.values())
    share = goal.samples_per_group(r.group_size) / r.group_size * kept_share(config)
    if isinstance(goal, EndpointObjective):
        passes = goal.draws
        two = isinstance(goal, GroupObjective) and r.batch_size % r.group_size != 0
        forward_only = passes * ((1 + two) * bool(goal.anchor) + two + bool(t.kl_coef))
    else:
        passes = trained_steps(config)
        forward_only = max(1, round(t.kl_fraction * passes)) if t.kl_coef else 0
    reused = max(first.values()) * passes * share if reuses else 0.0
    trained, most = made * share, max(forwards.values())
    return Work(made, max(batches.values()), most, trained * passes, trained * forward_only, reused)


def shared_steps(config: Config) -> float:
    """Mean number of denoising steps before the window, which a group's samples with equal initial noise share."""
    r = config.rollout
    if not r.same_noise or r.sde_everywhere:
        return 0.0
    return statistics.fmean(window(r, config.seed, step)[0] for step in range(max(config.train.steps, 1)))


def kept_share(config: Config, groups: int = 2000) -> float:
    """Share of the samples that train.min_advantage keeps, assuming normally distributed rewards."""
    if not config.train.min_advantage:
        return 1.0
    r = config.rollout
    values = torch.randn(groups, r.prompts_per_step, r.group_size, generator=torch.Generator().manual_seed(0))
    a = (values - values.mean(2, keepdim=True)) / values.std(2, correction=0, keepdim=True)
    a = a.abs().clamp(max=config.train.adv_clip_max)
    return float((a >= config.train.min_advantage * a.amax((1, 2), keepdim=True)).float().mean())


def reuse_obstacles(config: Config, split: bool) -> list[str]:
    """Why the first update cannot reuse the rollout's forwards. split: whether processes share weights or tokens."""
    t, goal = config.train, objective(config.train)
    obstacles = {
        f"{t.objective} replays no steps": goal.collector != "trajectory",
        "an old policy generates the rollouts": goal.sampled_by_old,
        "parallel splits weights or tokens": split,
        "rollout.staleness is 1, so the weights change in between": bool(config.rollout.staleness),
        "with train.lora_rank 0, the KL's reference weights are swapped in": bool(t.kl_coef and not t.lora_rank),
    }
    return [reason for reason, there in obstacles.items() if there]


def reuse_takes_effect(config: Config, split: bool, fits: Callable[[], bool]) -> bool:
    """Whether the first update reuses the rollout's forwards; fits: whether the graphs may be kept if it is auto."""
    t, size = config.train, config.rollout.group_size
    if reuse_obstacles(config, split):
        return False
    if t.reuse_rollout_forward == "auto":
        whole_batches = size % config.rollout.batch_size == 0 and not t.min_advantage
        return whole_batches and objective(t).samples_per_group(size) == size and fits()
    return t.reuse_rollout_forward


def reuses_forwards(config: Config, whole: Estimate, memory_gib: float) -> bool:
    """Whether train.reuse_rollout_forward takes effect, by the estimated bytes."""
    layout, free = Layout.of(config, config.gpus), memory_gib * 2**30 - whole.total
    split = layout.shard * layout.context > 1
    return reuse_takes_effect(config, split, lambda: estimated_graph_bytes(config, whole) <= free / 2)


def estimated_graph_bytes(config: Config, whole: Estimate) -> float:
    """Upper bound of the bytes of the first update's autograd graphs: activations times the number of trained steps."""
    return whole.phases["update"] * kept_graphs(config, Layout.of(config, config.gpus).data)


def step_time(
    config: Config, flop: Mapping[str, float], model: DenoiserSizes, machines: Machines, reuses: bool
) -> StepTime:
    """Time and traffic of one training step. Raises ConfigError if the mesh does not fit the number of GPUs.

    flop, model: from an `Estimate`; they are the same for any mesh.
    """
    layout, rate = Layout.of(config, machines.gpus), machines.rate(config)
    done, r, t = work(config, layout.data, reuses), config.rollout, config.train
    texts = 0 if config.data.cache else math.ceil(r.prompts_per_step / layout.data)
    compute = {
        "text": texts * flop["text"] / rate,
        "rollout": done.rollout * flop["rollout"] / layout.context / rate,
        "decode": math.ceil(done.samples / layout.context) * flop["decode"] / rate,
        "update": (done.trained * flop["update"] + (done.forward_only - done.reused) * flop["rollout"])
        / layout.context
        / rate,
    }
    traffic, per_node = dict[str, float](), math.ceil(machines.gpus / machines.nodes)
    backward = 2 + recomputed_share(t)
    attended = (done.rollout + done.forward_only + backward * done.trained) * model.hidden / layout.context
    if (u := layout.ulysses) > 1:
        traffic["all-to-all"] = 4 * attended * (u - 1) / u
    if layout.ring > 1:
        traffic["ring"] = 2 * attended * (layout.ring - 1)
    links = {"all-to-all": u <= per_node, "ring": layout.context <= per_node}
    inner, batch = layout.shard * layout.context, done.samples / done.batches
    links |= {"gather in rollout": inner <= per_node, "gather in update": inner <= per_node}
    if (n := layout.split) > 1:
        part = (n - 1) / n * model.gathered
        made = 1 if config.parallel.keep_gathered else done.batches * r.steps
        traffic["gather in rollout"] = part * made
        traffic["gather in update"] = part * (2 * done.trained + done.forward_only) / batch
        if not t.lora_rank:  # gradients are reduce-scattered in fp32 after every backward
            traffic["gather in update"] += (n - 1) / n * 4 * model.trained * done.trained / batch
    copies = layout.replicate if n > 1 and not t.lora_rank else machines.gpus
    if copies > 1:
        whole = 4 * model.trained / (n if n > 1 and not t.lora_rank else 1)
        times = done.trained / batch if n > 1 and not t.lora_rank else t.updates_per_rollout
        traffic["reduce"] = 2 * (copies - 1) / copies * whole * times
    links["reduce"] = machines.nodes == 1
    named = {kind: "nvlink" if links[kind] else "network" for kind in traffic}
    moved = {kind: size / getattr(machines.gpu, named[kind]) for kind, size in traffic.items()}
    hidden = [max(0.0, moved.get(f"gather in {k}", 0.0) - compute[k]) for k in ("rollout", "update")]
    waits = {
        "gather": sum(hidden),
        "all-to-all": moved.get("all-to-all", 0.0) + max(0.0, moved.get("ring", 0.0) - compute["rollout"]),
        "reduce": moved.get("reduce", 0.0),
    }
    seconds = compute | {kind: value for kind, value in waits.items() if value}
    return StepTime(seconds, traffic, named, r.prompts_per_step * r.group_size)


# ---- judges ---------------------------------------------------------------------------------------------------------


def judge_servers(config: Config, step: StepTime, machines: Machines, judge_billions: float) -> tuple[int, float, int]:
    """(comparisons per step, seconds per comparison on one GPU, number of one-GPU servers needed to hide judging behind
    the rollout, or with rollout.staleness behind the step). For one-token verdicts; (0, 0, 0) without a pairwise judge.
    """
    if PAIRWISE not in parse_reward_spec(config.reward.spec):
        return 0, 0.0, 0
    r = config.rollout
    asked = r.prompts_per_step * len(get_plan(config.judge.plan)(r.group_size, 0))
    pixels = min(r.height * r.width, config.judge.max_pixels or math.inf)
    tokens = 2 * pixels / PIXELS_PER_TOKEN * (FRAMES_SHOWN if (r.frames or 1) > 1 else 1) + TEXT_TOKENS
    each = 2e9 * judge_billions * tokens / (machines.gpu.flops * JUDGE_MFU)
    available_s = step.total if r.staleness else step.seconds["rollout"] + step.seconds["decode"]
    return asked, each, math.ceil(asked * each / available_s)


# ---- the mesh -------------------------------------------------------------------------------------------------------


def meshes(config: Config, adapter: Adapter, machines: Machines) -> list[ParallelConfig]:
    """The meshes that this model can run on, whose sizes divide its tokens and heads; ring stays as configured."""
    p, found = config.parallel, list[ParallelConfig]()
    per_node = math.ceil(machines.gpus / machines.nodes)
    sizes = [k for k in range(1, machines.gpus + 1) if machines.gpus % k == 0]
    for ulysses in [k for k in sizes if k == 1 or k * p.ring <= per_node]:
        for shard in [
            k for k in sizes if not problem(replace(p, replicate=0, shard=k, ulysses=ulysses), machines.gpus)
        ]:
            one = replace(p, replicate=0, shard=shard, ulysses=ulysses)
            if not splits(replace(config, parallel=one)):
                one = replace(one, keep_gathered=False, offload=False)
            layout = Layout.of(replace(config, parallel=one), machines.gpus)
            wrong = unsupported(type(adapter), config.family, layout)
            if not wrong and not context_errors(adapter, config.rollout, config.data.max_length, layout):
                found.append(one)
    return found
