"""Whether what a run keeps in GPU memory fits: weights and optimiser, before anything is loaded, then with the samples.

    denoisers: 2 or 4 bytes per parameter, 1 with fp8_base, fully trained 16, over the shards; 16 per LoRA parameter
    text encoders, VAE: in their dtype, unless they are cached or offloaded
    samples: the latents and velocities of a step's trained steps, from the rollout to the update

Only what is certain is counted: copies of the policy, activations and encoded texts come on top. So nothing that could
run is refused; `--dry-run` tells whether the rest fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from prefgrpo.config.schema import Config
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ENCODERS, components_of
from prefgrpo.objectives import make_objective
from prefgrpo.parallel import attention_backend
from prefgrpo.parallel.gradient_checkpointing import budgets
from prefgrpo.parallel.shard import is_sharded, to_local
from prefgrpo.parallel.world import Layout
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.sampling import window_range
from prefgrpo.update.policy import Policy

GIB = 2**30
Shapes = dict[str, list[int]]
"""Tensor → its shape."""


def shapes_of(component: Path) -> Shapes:
    """The tensors in a component's safetensors files; variants such as model.fp16.safetensors do not count."""
    found: Shapes = {}
    for file in component.glob("*.safetensors"):
        if "." not in file.stem:
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return found


def certain_bytes(config: Config, shapes: dict[str, Shapes], encoders: bool) -> dict[str, int]:
    """Bytes per GPU of each component (name → tensors), and of the LoRA; encoders: whether they are loaded."""
    cls = family(config.family)
    t = config.train
    p = config.parallel
    shards = p.shard * p.ring * p.ulysses if config.shards_weights else 1
    out: dict[str, int] = {}
    for name, tensors in shapes.items():
        count = sum(map(math.prod, tensors.values()))
        width = 4 if config.dtype == "fp32" or name in cls.parts_in_fp32 else 2
        kind = "text_encoder" if name.startswith(ENCODERS) else name
        if name in cls.denoisers:
            each = 16 if not t.lora_rank else 1 if config.fp8_base else width
            out[name] = 0 if "weights" in config.offload else count * each // shards
        elif kind not in config.offload and (encoders or kind != "text_encoder"):
            out[name] = count * width
    ends = tuple(f".{target}.weight" for target in t.lora_targets or cls.lora_targets)
    within = "" if t.lora_targets else cls.lora_within
    named = shapes.get(cls.denoisers[0], {}).items()
    trained = [shape for key, shape in named if key.startswith(within) and key.endswith(ends)]
    return out | {"LoRA": 16 * t.lora_rank * sum(map(sum, trained))}


def model_bytes(config: Config, model: Path, encoders: bool) -> dict[str, int]:
    """`certain_bytes` of a pipeline's folder."""
    names = [name for name, part in components_of(model).items() if part != [None, None]]
    shapes = {name: shapes_of(model / name) for name in names if (model / name).is_dir()}
    return certain_bytes(config, shapes, encoders)


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
    """Bytes per kind on the adapter's device, of sharded tensors those of this process's shard. Weights include
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


def refusal(parts: Mapping[str, int], memory: int) -> str:
    """Why these bytes per GPU do not fit into its memory, and which fields make them smaller; '' if they do."""
    needed = sum(parts.values())
    if needed < memory:
        return ""
    listed = " + ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
    return (
        f"the run needs {needed / GIB:.3g} GiB per GPU, of {memory / GIB:.3g}, before activations: {listed}; expected "
        "less: data.cache and `prefgrpo preprocess` leave the text encoders out, offload the encoders and the VAE, "
        "parallel.shard divides the denoisers, fp8_base halves those under a LoRA, parallel.ulysses divides the stored "
        "samples, train.lora_rank trains fewer weights, rollout.window_size and prompts_per_step store fewer latents"
    )
