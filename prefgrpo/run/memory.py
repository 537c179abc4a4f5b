"""What a run holds in memory and how much it computes, from the model's config alone.

The models are built on the meta device and run on fake tensors, which have shapes and no content, while every storage
that comes into being is weighed until it is freed, and torch counts FLOP; no weights are read. Counted: weights,
gradients, AdamW's moments and the average of what trains, stored latents, images and prompt embeddings (of two steps
with rollout.staleness), and the most that a rollout's forward, the decoder or a trained step holds at once. Invariant:
the counts are those of the run (same adapter, LoRA, checkpointing and code), and on real tensors they are what the
allocator saw (tests/test_plan.py).
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

from prefgrpo.config.schema import Config, ConfigError, ParallelConfig
from prefgrpo.data.prompts import read_prompts
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.folder import ASKED
from prefgrpo.models.parking import KINDS
from prefgrpo.objectives import objective
from prefgrpo.parallel.mesh import Layout, problem
from prefgrpo.parallel.shard import kept_whole
from prefgrpo.rollout.deal import deal_batches
from prefgrpo.rollout.sampling import window_range
from prefgrpo.run.loading import config_errors_as, model_options, trainable

GIB = 2**30
aten = torch.ops.aten
FLOP: dict[Any, Any] = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""torch's formulas, which leave out the CPU's attention (fake tensors are on the CPU)."""
Batch = tuple[Tensor, Tensor, Condition]
"""x [B, ...], σ [B], the condition."""


@dataclass(frozen=True)
class Facts:
    """Sizes of the denoisers."""

    trained: int
    """Parameters that train."""
    gathered: int
    """Bytes of one denoiser's weights in the compute dtype: what split weights are gathered to."""
    hidden: int
    """Bytes of the hidden states that enter the self-attentions of a sample's forward, summed over the blocks."""


@dataclass(frozen=True)
class Estimate:
    """Bytes per process."""

    parts: dict[str, int]
    """By kind; activations are those of the largest phase."""
    phases: dict[str, int]
    """Activations of rollout, decode and update, and what comes to the device for a while only."""
    parameters: dict[str, int]
    """Parameters per component of the pipeline, and of what trains."""
    flop: dict[str, float]
    """FLOP of a sample's forward in the rollout, its decoding and its trained step (forward and backward, as they run:
    with what checkpointing recomputes), and of encoding a text of data.max_length tokens."""
    model: Facts
    """What the traffic between processes depends on."""
    other_meshes: dict[ParallelConfig, int]
    """The sum under each other mesh that was asked for."""

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return sum(self.parts.values())


# ---- the estimate ---------------------------------------------------------------------------------------------------


def estimate(config: Config, meshes: Callable[[Adapter], Iterable[ParallelConfig]] = lambda adapter: ()) -> Estimate:
    """What each of `config.gpus` processes holds; its sum under `meshes` too. Raises ConfigError or ModelError."""
    r, gpus = config.rollout, config.gpus
    if wrong := problem(config.parallel, gpus):
        raise ConfigError([f"gpus: {wrong}"])
    layout = Layout.of(config, gpus)
    adapter, encoders = without_weights(config)
    parts, parameters = known_bytes(config, adapter, gpus), adapter.parameter_counts() | encoders
    before, facts = sum(parts.values()), _facts(config, adapter)
    others = {p: sum(known_bytes(replace(config, parallel=p), adapter, gpus).values()) for p in meshes(adapter)}
    if layout.split > 1:  # gathered in the compute type: autocast then copies no weights
        for module in adapter.modules().values():
            module.to(adapter.dtype)
    mode, known, batch = stand_ins(config, adapter)
    with mode:
        for _, p in adapter.trainable():
            p.grad = torch.empty_like(p)
            known.append(p.grad)
        each = {name: _phase(name, config, adapter, batch, known) for name in ("rollout", "decode", "update")}
    _clear_caches("prefgrpo.models")
    flop = {name: count for name, (_, count) in each.items()}
    flop["text"] = 2.0 * sum(encoders.values()) * config.data.max_length

    def under(context: int) -> dict[str, int]:  # every process has its part of the tokens
        return {name: held // (1 if name == "decode" else context) for name, (held, _) in each.items()}

    phases = under(layout.context)
    samples = (1 + r.staleness) * dealt(config, layout.data)[0]
    parts["embeddings"] = samples * sum(value.nbytes for value in batch[2].all_tensors()) // r.batch_size
    texts = {} if config.data.cache else {"text encoders": DTYPES[config.dtype].itemsize * sum(encoders.values())}
    (phases if "text_encoder" in config.memory.offload else parts).update(texts)
    rest = sum(parts.values()) - before
    others = {p: n + rest + max((phases | under(p.ring * p.ulysses)).values()) for p, n in others.items()}
    return Estimate(parts | {"activations": max(phases.values())}, phases, parameters, flop, facts, others)


def known_bytes(config: Config, adapter: Adapter, world: int) -> dict[str, int]:
    """Bytes per process of `world` before the first step, by kind; activations and text encoders on disk are not in it.

    Split weights count with this process's part, and as `gathered` what a forward has whole: two blocks (one on its
    way), or all with `parallel.keep_gathered`.
    """
    r, layout, goal = config.rollout, Layout.of(config, world), objective(config.train)
    stored = r.window_size or len(window_range(r)) if goal.collector == "trajectory" else 0
    stored *= 2 if r.window_policy == "subset" or goal.keeps_velocity else 1  # neighbours share latents
    made, scored = (count * (1 + r.staleness) for count in dealt(config, layout.data))
    whole_ones = {id(p) for name in adapter.denoisers for p in kept_whole(getattr(adapter.pipe, name), adapter)}
    if layout.split == 1:
        whole_ones |= {id(p) for name in adapter.denoisers for p in getattr(adapter.pipe, name).parameters()}
    part = 0 if config.parallel.offload else 1 / layout.split
    trained = [p for _, p in adapter.trainable()]
    here = sum(p.numel() * (1 if id(p) in whole_ones else part) for p in trained)
    models: list[nn.Module] = [getattr(adapter.pipe, name) for name in adapter.denoisers]
    split = [p for model in models for p in model.parameters() if id(p) not in whole_ones]
    weights = _weights(adapter, "") - _weights(adapter, *(s for k in config.memory.offload for s in KINDS[k]))
    parts = {
        "weights": weights - round(sum(p.numel() * p.element_size() for p in split) * (1 - part)),
        "optimiser": round(here * 4 * (3 + _copies(config))),  # gradient, two moments, averages
        "latents": made * 4 * math.prod(adapter.latent_shape(r)) * (stored + 1),
        "images": scored * r.height * r.width * 3 * (adapter.frames(r) or 1),
    }
    if layout.split > 1:
        low, parted = DTYPES[config.dtype].itemsize, {id(p) for p in split}
        sizes = [sum(p.numel() for p in b.parameters() if id(p) in parted) for m in models for b in adapter.blocks(m)]
        parts["gathered"] = low * (sum(p.numel() for p in split) if config.parallel.keep_gathered else 2 * max(sizes))
    return parts


def graph_bytes(config: Config, indices: int) -> int:
    """Bytes of the autograd graphs that one of so many data-parallel indices keeps with train.reuse_rollout_forward."""
    r, adapter = config.rollout, without_weights(config)[0]
    _, known, (x, sigma, condition) = stand_ins(config, adapter)
    with Weigh(known) as scale, norms_of(config):
        velocity = adapter.cond_uncond(x, sigma, condition, r)
        one = scale.now()
    del velocity
    _clear_caches("prefgrpo.models")
    first = Counter(b.index for b in deal_batches(config, [r] * r.prompts_per_step, indices) if b.update == 0)
    return one * max(first.values()) * (r.window_size or len(window_range(r)))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; of a CPU this process's share of it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here


def dealt(config: Config, indices: int) -> tuple[int, int]:
    """Most samples of a step that one of so many data-parallel indices makes, and that it scores."""
    r, made = config.rollout, Counter[int]()
    for batch in deal_batches(config, [r] * r.prompts_per_step, indices):
        made[batch.index] += len(batch.places)
    return max(made.values()), -(-r.prompts_per_step // indices) * r.group_size


def _copies(config: Config) -> int:
    """Copies of the trained weights that a run keeps beside them."""
    goal, t = objective(config.train), config.train
    old = goal.anchor == "old" or goal.sampled_by_old
    return bool(t.ema_decay) + old + (not t.lora_rank and (goal.anchor == "base" or t.kl_coef > 0))


def _weights(adapter: Adapter, *starts: str) -> int:
    """Bytes of the parameters of the components whose names begin so."""
    parts = [m for n, m in adapter.pipe.components.items() if isinstance(m, nn.Module) and n.startswith(starts)]
    return sum(p.numel() * p.element_size() for m in parts for p in m.parameters())


def _sources(config: Config, adapter: Adapter) -> int:
    """Source images per prompt: as the prompts file says, or one where it is not there and the family takes any."""
    if not adapter.most_sources:
        return 0
    file = Path(config.data.prompts)
    return max(len(p.source) for p in read_prompts(file)) if file.is_file() else 1


def _phase(name: str, config: Config, adapter: Adapter, batch: Batch, known: list[Tensor]) -> tuple[int, float]:
    """(most bytes that one forward of the rollout, one decode, or one trained step holds, FLOP per sample)."""
    x, sigma, condition = batch
    r, parked, count = config.rollout, 0, len(x)
    with Weigh(known) as scale, norms_of(config), torch.set_grad_enabled(name == "update"):
        if name == "decode":
            mine = -(-r.batch_size // (config.parallel.ring * config.parallel.ulysses))
            count = min(config.memory.decode_batch or mine, mine)
            adapter.decode(x[:count], r)
            parked = _weights(adapter, *KINDS["vae"]) if "vae" in config.memory.offload else 0
        else:
            v = adapter.velocity(x, sigma, condition, r)
            if name == "update":
                v.float().square().mean().backward()
    return scale.most + parked, scale.flop / count


def _facts(config: Config, adapter: Adapter) -> Facts:
    """Of the denoisers; blocks whose width the config does not name (a U-Net's) count as none."""
    denoiser: Any = adapter.transformer
    get, itemsize = denoiser.config.get, DTYPES[config.dtype].itemsize
    base = sum(p.numel() for p in denoiser.parameters()) * itemsize
    width = get("num_attention_heads", 0) * (get("attention_head_dim") or 0) if adapter.context_parallel else 0
    divided = [entry for entry in (getattr(denoiser, "_cp_plan", None) or {}).values() if isinstance(entry, dict)]
    text = config.data.max_length * any("encoder_hidden_states" in entry for entry in divided)
    hidden = len(adapter.blocks(denoiser)) * (adapter.sequence(config.rollout) + text) * width * itemsize
    trained, both = sum(p.numel() for _, p in adapter.trainable()), 2 if adapter.guided(config.rollout) else 1
    return Facts(trained, base, hidden * both)


# ---- models and batches without content -----------------------------------------------------------------------------


def without_weights(config: Config) -> tuple[Adapter, dict[str, int]]:
    """(the run's adapter over a pipeline on the meta device, ready to train; parameters per text encoder)."""
    with config_errors_as("family"):
        cls = family(config.family)
    path = cls.find(config.model, configs_only=True)
    diffusers_logging.set_verbosity_error()  # it warns of casts that only matter for weights
    pipe, encoders = meta_pipeline(path, cls.pipeline, DTYPES[config.dtype])
    with config_errors_as("rollout or train"):
        adapter = trainable(config, cls(pipe, **model_options(config)))
    with config_errors_as("memory"):
        adapter.vae_options(config.memory.vae_slicing, config.memory.vae_tiling)
    return adapter, encoders


def stand_ins(config: Config, adapter: Adapter) -> tuple[FakeTensorMode, list[Tensor], Batch]:
    """(mode in which the adapter now runs without content, all its tensors, a batch of the rollout).

    The condition is that of a longest prompt, the negative one as long; only the lengths have content.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = _fake([m for m in adapter.pipe.components.values() if isinstance(m, nn.Module)], mode)
    with mode, Weigh([]):
        x, sigma, batch = blank_batch(config, adapter)
    return mode, [*known, x, *batch.all_tensors()], (x, sigma, batch)


def blank_batch(config: Config, adapter: Adapter) -> Batch:
    """x, σ and the condition of a batch of the rollout, on the CPU, without content but for σ and the lengths."""
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
            with torch.device("meta"):
                parts[name] = cls.from_config(cls.load_config(path / name)).to(dtype)
            parts[name].requires_grad_(False)
        elif library == "transformers" and name.startswith("image_encoder"):
            cls = getattr(transformers, kind)
            with torch.device("meta"):
                parts[name] = cls._from_config(cls.config_class.from_pretrained(path / name)).to(dtype)
        elif library == "transformers" and (path / name / "preprocessor_config.json").is_file():
            parts[name] = getattr(transformers, kind).from_pretrained(path / name)
        elif library == "transformers" and (path / name / "config.json").is_file():
            encoders[name] = _count(getattr(transformers, kind), path / name)
            parts[name] = None
        elif name == "connectors":
            encoders[name] = _count(getattr(getattr(diffusers.pipelines, library), kind), path / name)
            parts[name] = None
        elif kind == ASKED:
            from prefgrpo.models.processors import NoProcessor

            parts[name] = NoProcessor()
        else:
            parts[name] = None if isinstance(entry, list) else entry
    return getattr(diffusers, pipeline)(**parts), encoders


def _count(cls: Any, path: Path) -> int:
    """Parameters of a transformers or diffusers model."""
    with torch.device("meta"):
        if hasattr(cls, "load_config"):
            return sum(p.numel() for p in cls.from_config(cls.load_config(path)).parameters())
        return sum(p.numel() for p in cls._from_config(cls.config_class.from_pretrained(path)).parameters())


def _fake(modules: Iterable[nn.Module], mode: FakeTensorMode) -> list[Tensor]:
    """Replace all tensors of (meta) modules by fake ones on the CPU, in place; returns them."""
    made: list[Tensor] = []

    def like(tensor: Tensor) -> Tensor:
        made.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return made[-1]

    with mode:
        for module in (part for whole in modules for part in whole.modules()):
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(like(p), requires_grad=p.requires_grad)
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = like(b)
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    setattr(module, name, like(value))
                elif isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
                    setattr(module, name, [like(each) for each in value])
    return made


def _clear_caches(package: str) -> None:
    """Empty the caches of a package's functions: a fake tensor in one would make what follows fake too."""
    for module in [m for name, m in sys.modules.items() if name.startswith(package)]:
        for value in vars(module).values():
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """What a mask of known content (or of none) picks, as indices, whose number is known; any other index itself."""
    fake = isinstance(index, FakeTensor)
    if index is None or index.dtype != torch.bool or (fake and index.numel()):
        return (index,)
    with unset_fake_temporarily():
        return (torch.zeros(index.shape, dtype=torch.bool) if fake else index).nonzero().unbind(1)


# ---- weighing -------------------------------------------------------------------------------------------------------


@contextmanager
def norms_of(config: Config) -> Iterator[None]:
    """Inside, norms on the CPU hold what they hold on the run's device; `device: auto` is a GPU.

    There autocast runs them in fp32 (torch's AT_FORALL_FP32; on a CPU it leaves their type), and rms_norm is one
    kernel, which keeps its input and a number per row.
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
    """`norm` as CUDA's autocast calls it."""
    if not torch.is_autocast_enabled("cpu"):
        return norm(*given, **named)
    given, named = tree_map_only(Tensor, Tensor.float, (given, named))
    with torch.autocast("cpu", enabled=False):
        return norm(*given, **named)


class RmsNorm(torch.autograd.Function):
    """The sizes of CUDA's rms_norm and of its gradients; values are left open."""

    @classmethod
    def of(cls, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        """As F.rms_norm."""
        return cls.apply(x, weight, len(shape))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """x [..., D1, ..., D_dims]."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Of x and weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


class Weigh(TorchDispatchMode):
    """Inside, `most` is the largest number of bytes that new tensors held at once, and `now()` what they hold; `flop`
    sums torch's formulas (its FlopCounterMode keeps tensors alive)."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """known: tensors that were there before, and their views, do not count."""
        super().__init__()
        self._known = {StorageWeakRef(t.untyped_storage()) for t in known}
        self._live: dict[StorageWeakRef, int] = {}
        self._total = self.most = self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and weigh what it returns; one on real tensors or a number is really done (lengths, σ)."""
        if func is aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        real = (given or func is aten.scalar_tensor.default) and not any(isinstance(t, FakeTensor) for t in given)
        with unset_fake_temporarily() if real else nullcontext():
            out = func(*args, **(kwargs or {}))
        if func.overloadpacket in FLOP:
            self.flop += FLOP[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = StorageWeakRef(storage)
        if place in self._known or place in self._live:
            return
        self._live[place] = storage.nbytes()
        self._total += storage.nbytes()
        if self._total > self.most:  # it may hold what is freed by now
            self.most = max(self.most, self.now())

    def now(self) -> int:
        """Bytes that are still held."""
        self._live = {place: size for place, size in self._live.items() if not place.expired()}
        self._total = sum(self._live.values())
        return self._total
