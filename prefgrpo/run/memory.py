"""Estimates a run's memory and FLOP from the model's config alone, without reading weights.

The models are built on the meta device and run with fake tensors (shapes without data), while the bytes of every live
storage are tracked and torch counts FLOP. Included: weights; gradients, AdamW moments and EMA of the trained weights;
stored latents, images and prompt embeddings (of two steps with rollout.staleness); and the peak activations of a
rollout forward, the decoder or a trained step. Invariant: the estimate runs the code of the real run (same adapter,
LoRA, checkpointing), and with real tensors the byte counts agree with the allocator's (tests/test_plan.py).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, ParallelConfig, TrainConfig
from prefgrpo.data.prompts import read_prompts
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.folder import REQUIRED_PROCESSOR
from prefgrpo.models.offload import KINDS
from prefgrpo.objectives import objective
from prefgrpo.objectives.base import Objective
from prefgrpo.parallel.context import context_errors
from prefgrpo.parallel.mesh import Layout, problem
from prefgrpo.parallel.shard import replicated_parameters
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.sampling import window_range
from prefgrpo.run.loading import config_errors_as, model_options, trainable

GIB = 2**30
aten = torch.ops.aten
FLOP: dict[Any, Any] = flop_registry | {
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""torch's formulas plus those it lacks: of the LoRA layers and of CPU attention (the fake tensors are on the CPU)."""
Batch = tuple[Tensor, Tensor, Condition]
"""x [B, ...], σ [B], the condition."""


@dataclass(frozen=True)
class DenoiserSizes:
    """Sizes of the denoisers."""

    trained: int
    """Number of trained parameters."""
    gathered: int
    """Bytes of one denoiser's full weights in the compute dtype, as all-gathered from shards."""
    hidden: int
    """Bytes of the hidden states that enter self-attention in one sample's forward, summed over the blocks."""


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes per process, and FLOP."""

    parts: dict[str, int]
    """Bytes by kind; activations are those of the largest phase."""
    phases: dict[str, int]
    """Bytes of activations in rollout, decode and update, including offloaded modules that are then on the device."""
    parameters: dict[str, int]
    """Number of parameters per component of the pipeline, and of trained parameters."""
    flop: dict[str, float]
    """FLOP per sample of a rollout forward (of an untrained step), of decoding and of a trained step (forward and
    backward, including recomputation by checkpointing), and of encoding a text of data.max_length tokens."""
    model: DenoiserSizes
    """Sizes that the traffic between processes depends on."""
    other_meshes: dict[ParallelConfig, int]
    """Total bytes per process under each of the other meshes requested."""

    @property
    def total(self) -> int:
        """Peak bytes per process."""
        return sum(self.parts.values())


# ---- the estimate ---------------------------------------------------------------------------------------------------


def estimate(config: Config, meshes: Callable[[Adapter], Iterable[ParallelConfig]] = lambda adapter: ()) -> Estimate:
    """The estimate for `config.gpus` processes, and totals under `meshes`. Raises ConfigError or ModelError."""
    r, gpus = config.rollout, config.gpus
    if wrong := problem(config.parallel, gpus):
        raise ConfigError([f"gpus: {wrong}"])
    layout = Layout.of(config, gpus)
    adapter, encoders = build_meta_adapter(config)
    if errors := context_errors(adapter, r, config.data.max_length, layout):
        raise ConfigError(errors)
    parts, parameters = static_bytes(config, adapter, gpus), adapter.parameter_counts() | encoders
    before, facts = sum(parts.values()), _denoiser_sizes(config, adapter)
    others = {p: sum(static_bytes(replace(config, parallel=p), adapter, gpus).values()) for p in meshes(adapter)}
    if layout.split > 1:  # gathered in the compute dtype, so autocast makes no copies of weights
        for module in adapter.modules().values():
            module.to(adapter.dtype)
    mode, known, batch = fake_tensors(config, adapter)
    with mode:
        for _, p in adapter.trainable():
            p.grad = torch.empty_like(p)
            known.append(p.grad)
        each = {name: _phase(name, config, adapter, batch, known) for name in ("rollout", "decode", "update")}
    _clear_caches("prefgrpo.models")
    flop = {name: count for name, (_, count) in each.items()}
    flop["text"] = 2.0 * sum(encoders.values()) * config.data.max_length

    def under(context: int) -> dict[str, int]:  # every process holds its part of the tokens
        return {name: held // (1 if name == "decode" else context) for name, (held, _) in each.items()}

    phases = under(layout.context)
    samples = (1 + r.staleness) * samples_per_index(config, layout.data)[0]
    parts["embeddings"] = samples * sum(value.nbytes for value in batch[2].all_tensors()) // r.batch_size
    texts = {} if config.data.cache else {"text encoders": DTYPES[config.dtype].itemsize * sum(encoders.values())}
    (phases if "text_encoder" in config.memory.offload else parts).update(texts)
    rest = sum(parts.values()) - before
    others = {p: n + rest + max((phases | under(p.ring * p.ulysses)).values()) for p, n in others.items()}
    return Estimate(parts | {"activations": max(phases.values())}, phases, parameters, flop, facts, others)


def static_bytes(config: Config, adapter: Adapter, world: int) -> dict[str, int]:
    """Bytes by kind for each of `world` processes before the first step, without activations and text encoders on disk.

    Sharded weights count as this process's shard, plus `gathered` for the blocks that a forward holds in full: two (one
    being prefetched).
    """
    r, layout, goal = config.rollout, Layout.of(config, world), objective(config.train)
    stored = trained_steps(config) if goal.collector == "trajectory" else 0
    stored *= 2 if r.window_policy == "subset" or goal.keeps_velocity else 1  # consecutive steps share latents
    made, scored = (count * (1 + r.staleness) for count in samples_per_index(config, layout.data))
    whole_ones = {
        id(p) for name in adapter.denoisers for p in replicated_parameters(getattr(adapter.pipe, name), adapter)
    }
    if layout.split == 1:
        whole_ones |= {id(p) for name in adapter.denoisers for p in getattr(adapter.pipe, name).parameters()}
    part = 0 if config.parallel.offload else 1 / layout.split
    copies = bool(config.train.ema_decay) + sum(weight_copies(config.train, goal))
    trained = [p for _, p in adapter.trainable()]
    here = sum(p.numel() * (1 if id(p) in whole_ones else part) for p in trained)
    models: list[nn.Module] = [getattr(adapter.pipe, name) for name in adapter.denoisers]
    split = [p for model in models for p in model.parameters() if id(p) not in whole_ones]
    weights = _weights(adapter, "") - _weights(adapter, *(s for k in config.memory.offload for s in KINDS[k]))
    parts = {
        "weights": weights - round(sum(p.numel() * p.element_size() for p in split) * (1 - part)),
        "optimiser": round(here * 4 * (3 + copies)),  # gradient, two moments, averages
        "latents": made * 4 * math.prod(adapter.latent_shape(r)) * (stored + 1),
        "images": scored * r.height * r.width * 3 * (adapter.frames(r) or 1),
    }
    if layout.split > 1:
        low, parted = DTYPES[config.dtype].itemsize, {id(p) for p in split}
        sizes = [sum(p.numel() for p in b.parameters() if id(p) in parted) for m in models for b in adapter.blocks(m)]
        parts["gathered"] = low * 2 * max(sizes)
    return parts


def graph_bytes(config: Config, indices: int) -> int:
    """Bytes of the autograd graphs that a data-parallel index (of `indices`) keeps for train.reuse_rollout_forward."""
    r, adapter = config.rollout, build_meta_adapter(config)[0]
    _, known, (x, sigma, condition) = fake_tensors(config, adapter)
    with MemoryTracker(known) as tracker, norms_of(config):
        velocity = adapter.cond_uncond(x, sigma, condition, r)
        one = tracker.current()
    del velocity
    _clear_caches("prefgrpo.models")
    return one * kept_graphs(config, indices)


def kept_graphs(config: Config, indices: int) -> int:
    """Number of autograd graphs of the first update that one data-parallel index (of `indices`) keeps at most: its
    batches times the trained steps."""
    r = config.rollout
    first = Counter(b.index for b in assign_batches(config, [r] * r.prompts_per_step, indices) if b.update == 0)
    return max(first.values()) * trained_steps(config)


def trained_steps(config: Config) -> int:
    """Number of stored steps per sample."""
    return config.rollout.window_size or len(window_range(config.rollout))


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device; on a CPU, this process's share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here


def samples_per_index(config: Config, indices: int) -> tuple[int, int]:
    """Maximum number of samples per step that one data-parallel index (of `indices`) generates, and that it scores."""
    r, made = config.rollout, Counter[int]()
    for batch in assign_batches(config, [r] * r.prompts_per_step, indices):
        made[batch.index] += len(batch.places)
    return max(made.values()), -(-r.prompts_per_step // indices) * r.group_size


def weight_copies(train: TrainConfig, goal: Objective) -> tuple[bool, bool]:
    """Whether a run keeps an old policy's weights, and the initial weights (not needed with a LoRA)."""
    old = goal.anchor == "old" or goal.sampled_by_old
    return old, not train.lora_rank and (goal.anchor == "base" or train.kl_coef > 0)


def _weights(adapter: Adapter, *starts: str) -> int:
    """Parameter bytes of the components whose names start with one of `starts`."""
    parts = [m for n, m in adapter.pipe.components.items() if isinstance(m, nn.Module) and n.startswith(starts)]
    return sum(p.numel() * p.element_size() for m in parts for p in m.parameters())


def _sources(config: Config, adapter: Adapter) -> int:
    """Source images per prompt, from the prompts file; without the file, one if the family accepts sources."""
    if not adapter.most_sources:
        return 0
    file = Path(config.data.prompts)
    return max(len(p.source) for p in read_prompts(file)) if file.is_file() else 1


def _phase(name: str, config: Config, adapter: Adapter, batch: Batch, known: list[Tensor]) -> tuple[int, float]:
    """(peak bytes, FLOP per sample) of one phase: a rollout forward, a decode, or a trained step."""
    x, sigma, condition = batch
    r, offloaded, count = config.rollout, 0, len(x)
    with MemoryTracker(known) as tracker, norms_of(config), torch.set_grad_enabled(name == "update"):
        if name == "decode":
            mine = -(-r.batch_size // (config.parallel.ring * config.parallel.ulysses))
            count = min(config.memory.decode_batch or mine, mine)
            adapter.decode(x[:count], r)
            offloaded = _weights(adapter, *KINDS["vae"]) if "vae" in config.memory.offload else 0
        else:
            with adapter.merged_lora() if name == "rollout" else nullcontext():
                v = adapter.velocity(x, sigma, condition, r)
            if name == "update":
                v.float().square().mean().backward()
    return tracker.peak + offloaded, tracker.flop / count


def _denoiser_sizes(config: Config, adapter: Adapter) -> DenoiserSizes:
    """The denoisers' `DenoiserSizes`; `hidden` is 0 if the config does not give the width of the blocks (U-Net)."""
    denoiser: Any = adapter.transformer
    get, itemsize = denoiser.config.get, DTYPES[config.dtype].itemsize
    base = _count(denoiser) * itemsize
    width = get("num_attention_heads", 0) * (get("attention_head_dim") or 0) if adapter.context_parallel else 0
    divided = [entry for entry in (getattr(denoiser, "_cp_plan", None) or {}).values() if isinstance(entry, dict)]
    text = config.data.max_length * any("encoder_hidden_states" in entry for entry in divided)
    hidden = len(adapter.blocks(denoiser)) * (adapter.sequence(config.rollout) + text) * width * itemsize
    trained, both = sum(p.numel() for _, p in adapter.trainable()), 2 if adapter.guided(config.rollout) else 1
    return DenoiserSizes(trained, base, hidden * both)


# ---- models and batches without data --------------------------------------------------------------------------------


def build_meta_adapter(config: Config) -> tuple[Adapter, dict[str, int]]:
    """(the run's adapter over a pipeline on the meta device, ready to train; parameters per text encoder)."""
    with config_errors_as("family"):
        cls = family(config.family)
    path = cls.find(config.model, configs_only=True)
    diffusers_logging.set_verbosity_error()  # its warnings about casts only matter for real weights
    pipe, encoders = meta_pipeline(path, cls.pipeline, DTYPES[config.dtype])
    with config_errors_as("rollout or train"):
        adapter = trainable(config, cls(pipe, **model_options(config)))
    with config_errors_as("rollout.height/width/frames"):
        adapter.latent_shape(config.rollout)
    with config_errors_as("memory"):
        adapter.vae_options(config.memory.vae_slicing, config.memory.vae_tiling)
    return adapter, encoders


def fake_tensors(config: Config, adapter: Adapter) -> tuple[FakeTensorMode, list[Tensor], Batch]:
    """(fake-tensor mode in which the adapter now runs, all its tensors, a batch of the rollout).

    Prompt and negative prompt have the maximum length; only the length tensors hold real data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = _fake([m for m in adapter.pipe.components.values() if isinstance(m, nn.Module)], mode)
    with mode, MemoryTracker([]):
        x, sigma, batch = empty_batch(config, adapter)
    return mode, [*known, x, *batch.all_tensors()], (x, sigma, batch)


def empty_batch(config: Config, adapter: Adapter) -> Batch:
    """x, σ and the condition of a rollout batch, on the CPU, uninitialised except for σ and the text lengths."""
    r, shapes, sources = config.rollout, adapter.condition_shapes(config.data.max_length), _sources(config, adapter)
    with unset_fake_temporarily():
        sigma = torch.full((r.batch_size,), 0.9)
        counted = [key for key in shapes if key.startswith("text_length")]
        lengths = {key: torch.tensor(shapes[key.replace("text_length", "prompt_embeds")][0]) for key in counted}
    empty = {key: torch.empty(shape, dtype=adapter.dtype) for key, shape in shapes.items()}
    image, text = Image.new("RGB", (r.width, r.height)), Condition.of_text(empty | lengths)
    latents = adapter.encode_sources((image,) * sources, r.frames) if sources else ()
    one = replace(text, sources=latents, negative=text if adapter.guided(r) else None)
    batch = one.map(lambda value: value.expand(r.batch_size, *value.shape).contiguous())
    return torch.empty(r.batch_size, *adapter.latent_shape(r)), sigma, batch


def meta_pipeline(path: Path, pipeline: str, dtype: torch.dtype) -> tuple[Any, dict[str, int]]:
    """(the stock pipeline on the meta device without text encoders, parameters per text encoder)."""
    import diffusers
    import transformers

    parts: dict[str, Any] = {}
    encoders: dict[str, int] = {}
    for name, entry in json.loads((path / "model_index.json").read_text(encoding="utf-8")).items():
        if name.startswith("_"):
            continue
        library, kind = entry if isinstance(entry, list) else ("", "")
        if library == "diffusers" and not issubclass(cls := getattr(diffusers, kind), nn.Module):
            parts[name] = cls.from_pretrained(path / name)  # a scheduler, a guider
        elif library == "diffusers":
            parts[name] = _on_meta(cls, path / name).to(dtype).requires_grad_(False)
        elif library == "transformers" and name.startswith("image_encoder"):
            parts[name] = _on_meta(getattr(transformers, kind), path / name).to(dtype)
        elif library == "transformers" and (path / name / "preprocessor_config.json").is_file():
            parts[name] = getattr(transformers, kind).from_pretrained(path / name)
        elif name == "connectors" or (library == "transformers" and (path / name / "config.json").is_file()):
            source = transformers if library == "transformers" else getattr(diffusers.pipelines, library)
            encoders[name] = _count(_on_meta(getattr(source, kind), path / name))
            parts[name] = None
        elif kind == REQUIRED_PROCESSOR:
            from prefgrpo.models.processors import NoProcessor

            parts[name] = NoProcessor()
        else:
            parts[name] = None if isinstance(entry, list) else entry
    return getattr(diffusers, pipeline)(**parts), encoders


def _on_meta(cls: Any, path: Path) -> nn.Module:
    """A transformers or diffusers model on the meta device, from its config."""
    with torch.device("meta"):
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(path))
        return cls._from_config(cls.config_class.from_pretrained(path))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _fake(modules: Iterable[nn.Module], mode: FakeTensorMode) -> list[Tensor]:
    """Replace all tensors of (meta) modules by fake CPU tensors, in place; returns the fake tensors."""
    made: list[Tensor] = []

    def like(tensor: Tensor) -> Tensor:
        made.append(torch.empty_like(tensor, device="cpu"))
        return made[-1]

    with mode:
        for whole in modules:
            whole.to_empty(device="cpu")
            made += [*whole.parameters(), *whole.buffers()]
            for module in whole.modules():  # tensors that are neither parameters nor buffers
                for name, value in list(vars(module).items()):
                    if isinstance(value, Tensor):
                        setattr(module, name, like(value))
                    elif isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
                        setattr(module, name, [like(each) for each in value])
    return made


def _clear_caches(package: str) -> None:
    """Clear the caches of a package's functions, so that no cached fake tensor reaches later computations."""
    for module in [m for name, m in sys.modules.items() if name.startswith(package)]:
        for value in vars(module).values():
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def _mask_to_indices(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """A real or empty boolean mask as index tensors, so that the result's shape is known; any other index unchanged."""
    fake = isinstance(index, FakeTensor)
    if index is None or index.dtype != torch.bool or (fake and index.numel()):
        return (index,)
    with unset_fake_temporarily():
        return (torch.zeros(index.shape, dtype=torch.bool) if fake else index).nonzero().unbind(1)


# ---- tracking bytes -------------------------------------------------------------------------------------------------


@contextmanager
def norms_of(config: Config) -> Iterator[None]:
    """Context in which CPU norms save the same tensors as on the run's device; `device: auto` counts as a GPU.

    On CUDA, autocast runs norms in fp32 (torch's AT_FORALL_FP32; CPU autocast keeps their dtype), and rms_norm is one
    kernel, which saves its input and one number per row.
    """
    names = () if config.device == "cpu" else ("layer_norm", "group_norm", "rms_norm")
    before = {name: getattr(F, name) for name in names}
    for name, norm in before.items():
        setattr(F, name, partial(_in_fp32, RmsNorm.of if name == "rms_norm" else norm))
    try:
        yield
    finally:
        for name, norm in before.items():
            setattr(F, name, norm)


def _in_fp32(norm: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
    """`norm` as called under CUDA autocast."""
    if not torch.is_autocast_enabled("cpu"):
        return norm(*given, **named)
    given, named = tree_map_only(Tensor, Tensor.float, (given, named))
    with torch.autocast("cpu", enabled=False):
        return norm(*given, **named)


class RmsNorm(torch.autograd.Function):
    """Allocates the same tensors as CUDA's rms_norm and its backward; their values are undefined."""

    @classmethod
    def of(cls, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        """Signature of F.rms_norm."""
        return cls.apply(x, weight, len(shape))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """x [..., D1, ..., D_dims]."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of x and weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


class MemoryTracker(TorchDispatchMode):
    """Tracks the bytes of tensors created inside: `peak` and `current()`; `flop` sums torch's formulas
    (torch's FlopCounterMode would keep tensors alive)."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """known: tensors that existed before; they and their views do not count."""
        super().__init__()
        self._known = {StorageWeakRef(t.untyped_storage()) for t in known}
        self._live: dict[StorageWeakRef, int] = {}
        self._total = self.peak = self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and track its outputs; outside the fake mode if its inputs are real (lengths, σ)."""
        if func is aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _mask_to_indices(index)]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        real = (given or func is aten.scalar_tensor.default) and not any(isinstance(t, FakeTensor) for t in given)
        with unset_fake_temporarily() if real else nullcontext():
            out = func(*args, **(kwargs or {}))
        if func.overloadpacket in FLOP:
            self.flop += FLOP[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        place = StorageWeakRef(storage)
        if place in self._known or place in self._live:
            return
        self._live[place] = storage.nbytes()
        self._total += storage.nbytes()
        if self._total > self.peak:  # the sum may include storages freed since
            self.peak = max(self.peak, self.current())

    def current(self) -> int:
        """Bytes of the tensors still alive."""
        self._live = {place: size for place, size in self._live.items() if not place.expired()}
        self._total = sum(self._live.values())
        return self._total
