"""What a run keeps in GPU memory: weights and optimiser, before anything is loaded, the samples of a step, and what the
rest of the memory is used for.

    denoisers: 2 or 4 bytes per parameter, 1 with fp8_base, fully trained 16, over the shards
    text encoders, VAE: in their dtype, unless they are cached or offloaded
    samples: the latents and velocities of a step's trained steps, from the rollout to the update

`certain_bytes` is a lower bound: LoRA, copies of the policy and activations come on top, so a run that would fit is
never rejected; `--dry-run` tells whether the rest fits. `memory_line` counts the loaded model of this process.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ENCODERS, components_of
from prefgrpo.objectives import make_objective
from prefgrpo.parallel import attention_backend
from prefgrpo.parallel.gradient_checkpointing import budgets
from prefgrpo.parallel.shard import is_sharded, to_local
from prefgrpo.parallel.world import Layout, World
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.sampling import window_range
from prefgrpo.update.gradients import Gradients
from prefgrpo.update.policy import Policy

GIB = 2**30
MIB = 2**20


def certain_bytes(config: Config, model: Path, encoders: bool) -> dict[str, int]:
    """Bytes per GPU of each component of a pipeline's folder, read from the headers of its safetensors files; encoders:
    whether they are loaded."""
    cls = family(config.family)
    p = config.parallel
    shards = p.shard * p.ring * p.ulysses if config.shards_weights else 1
    out: dict[str, int] = {}
    for name, (library, _) in components_of(model).items():
        if library is None:
            continue
        width = 4 if config.dtype == "fp32" or name in cls.parts_in_fp32 else 2
        kind = "text_encoder" if name.startswith(ENCODERS) else name
        if name in cls.denoisers:
            each = 16 if not config.train.lora_rank else 1 if config.fp8_base else width
            out[name] = 0 if "weights" in config.offload else _parameters(model / name) * each // shards
        elif kind not in config.offload and (encoders or kind != "text_encoder"):
            out[name] = width * _parameters(model / name)
    return out


def _parameters(component: Path) -> int:
    """Number of parameters in a component's files; variants such as model.fp16.safetensors do not count."""
    count = 0
    for file in component.glob("*.safetensors"):
        if "." not in file.stem:
            with safe_open(file, "pt") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def check_memory(parts: Mapping[str, int], device: torch.device) -> None:
    """Raise ConfigError, which names the fields that help, if this many bytes do not fit on a GPU."""
    if device.type != "cuda":
        return
    needed = sum(parts.values())
    memory = torch.cuda.get_device_properties(device).total_memory
    if needed < memory:
        return
    listed = " + ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
    raise ConfigError(
        [
            f"the run needs {needed / GIB:.3g} GiB per GPU, of {memory / GIB:.3g}, before activations: {listed}; "
            "expected less: data.cache and `prefgrpo preprocess` leave the text encoders out, offload the encoders and "
            "the VAE, parallel.shard divides the denoisers, fp8_base halves those under a LoRA, parallel.ulysses "
            "divides the stored samples, train.lora_rank trains fewer weights, rollout.window_size and "
            "prompts_per_step store fewer latents"
        ]
    )


def stored_bytes(config: Config, latent_shape: Sequence[int], layout: Layout, processes: int) -> int:
    """Bytes of a step's samples that a process keeps at most, with staleness of two steps, and of one step's reference
    velocities."""
    batches = Counter(batch.dp_rank for batch in assign_batches(config, processes // layout.context))
    samples = max(batches.values()) * config.rollout.batch_size
    kept = (1 + config.rollout.staleness) * sample_bytes(config, latent_shape, layout)
    return samples * (kept + reference_bytes(config, latent_shape, layout))


def reference_bytes(config: Config, latent_shape: Sequence[int], layout: Layout) -> int:
    """Bytes of a sample's reference velocities, for the KL, that a process keeps: its share of the tokens."""
    if not config.train.kl_coef or make_objective(config.train).inputs == "endpoint":
        return 0
    elements = -(-math.prod(latent_shape) // layout.context)
    trained = config.rollout.window_size or len(window_range(config.rollout))
    return elements * trained * velocity_bytes(config)


def velocity_bytes(config: Config) -> int:
    """Bytes per element of a velocity: in the denoiser's dtype, with guidance in fp32."""
    cfg = family(config.family).cfg
    guided = cfg is not None and cfg.active(config.rollout.guidance)
    return 4 if guided else DTYPES[config.dtype].itemsize


def sample_bytes(config: Config, latent_shape: Sequence[int], layout: Layout) -> int:
    """Bytes of a sample that a process keeps at most: x before and after every trained step in fp32, v if the objective
    reads it, and the final latents; its share of the tokens of each."""
    r = config.rollout
    objective = make_objective(config.train)
    elements = -(-math.prod(latent_shape) // layout.context)
    if objective.inputs == "endpoint":
        return elements * 4
    span = len(window_range(r))
    trained = r.window_size or span
    states = trained + 1 if r.window_policy == "random" else min(2 * trained, span + 1)
    velocities = trained * velocity_bytes(config) * objective.keeps_velocity
    return elements * (4 * (states + 1) + velocities)


def static_bytes(adapter: Adapter, policy: Policy) -> dict[str, int]:
    """Bytes per kind on the adapter's device; for sharded tensors, those of this process's shard. Weights include
    buffers and the parts of the pipeline that are not trained; all other kinds exist for trained weights only."""
    kind_of_device = adapter.device.type

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(t.nbytes for t in to_local(tensors) if t.device.type == kind_of_device)

    modules = [part for part in adapter.pipe.components.values() if isinstance(part, nn.Module)]
    trained = held(policy.params)
    return {
        "weights": sum(held(module.parameters()) + held(module.buffers()) for module in modules),
        "gradients": trained,
        "AdamW": 2 * trained,
        "EMA": held(policy.ema.values()),
        "old policy": held(policy.old.values()),
        "initial policy": held(policy.reference.values()),
    }


def whole_gradients(policy: Policy) -> int:
    """Bytes of the gradients of all sharded weights, whole and in fp32."""
    return sum(4 * p.numel() for p in policy.params if is_sharded(p))


def kept_attention(config: Config, adapter: Adapter, layout: Layout) -> int:
    """Bytes of attention outputs and fp32 log-sum-exps that recomputed blocks keep at most (`keep_attention`) of one
    batch, of both predictions of a guidance pair if both have gradients. Source images, and the second attention in
    some blocks of SD3.5-medium, are not counted."""
    nets = [budgets(adapter.blocks(net)) for net in adapter.modules().values()]  # an update's forward runs one of them
    blocks = max(nets, key=len)
    if not blocks:
        return 0
    case = attention_backend.cases(adapter, config, config.attention, layout)[0]  # the blocks' first, in the rollout
    pair = adapter.guided(config.rollout) and config.train.guidance_gradient == "both"
    rows = config.rollout.batch_size * (1 + pair) * case.queries * layout.ring * case.heads
    each = rows * (case.width * adapter.dtype.itemsize + torch.float32.itemsize)
    return int(min(len(blocks) * each, blocks[0].limit))


def reduces_once(config: Config, adapter: Adapter, policy: Policy, world: World) -> bool:
    """Whether an update sums the gradients of sharded weights only once, because half of every GPU's memory can hold
    whole gradients too (`whole_gradients`); the other half is for activations. A resumed run decides alike.

    Never with several denoisers, one of which an update's last backward does not run.
    """
    whole = whole_gradients(policy)
    if not whole or not world.equal_forwards or len(adapter.denoisers) > 1:
        return False
    needed = held_bytes(config, adapter, policy, world) + whole
    full = world.device.type == "cuda" and needed > torch.cuda.get_device_properties(world.device).total_memory / 2
    return not world.any(full)


def held_bytes(config: Config, adapter: Adapter, policy: Policy, world: World) -> int:
    """Bytes that a process holds during an update, without activations and unsharded gradients (`whole_gradients`)."""
    stored = stored_bytes(config, adapter.latent_shape(config.rollout), world.layout, world.size)
    return sum(static_bytes(adapter, policy).values()) + stored


def attention_limit(config: Config, adapter: Adapter, policy: Policy, world: World, once: bool) -> float:
    """Bytes of attention outputs that recomputed blocks may keep: a quarter of the GPU memory that is left, times their
    share of the blocks, as the others keep everything. Their inputs take another quarter; half remains for the running
    block's activations and for what is not counted. Changes no result."""
    if world.device.type != "cuda":
        return math.inf
    memory = torch.cuda.get_device_properties(world.device).total_memory
    held = held_bytes(config, adapter, policy, world) + once * whole_gradients(policy)
    return max(memory - held, 0) / 4 * config.train.gradient_checkpointing


def step_bytes(config: Config, gradients: Gradients, policy: Policy, world: World) -> dict[str, int]:
    """Bytes per kind that a step holds besides, before activations: its stored samples, and whole gradients."""
    stored = stored_bytes(config, gradients.adapter.latent_shape(config.rollout), world.layout, world.size)
    return {"stored samples": stored, "whole gradients": whole_gradients(policy) if gradients.reduce_once else 0}


def memory_line(adapter: Adapter, policy: Policy, step: dict[str, int], kept: int = 0) -> str:
    """`static_bytes`, the bytes of a step and `kept_attention` as one line of text."""
    parts = static_bytes(adapter, policy) | step
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    listed = " + ".join(f"{kind} {size / unit:.3g}" for kind, size in parts.items() if size)
    of_blocks = f"; activations include {kept / unit:.3g} {name} of kept attention" if kept else ""
    return f"memory per process before activations: {listed} = {total / unit:.3g} {name}{of_blocks}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
