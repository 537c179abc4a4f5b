"""`prefgrpo plan RECIPE [--gpus N]`: what a run holds in memory, from the model's config alone.

The models are built on the meta device and run on tensors without content: no weights are read. Counted: weights,
gradients, AdamW's moments and the average of what trains, stored latents, images, prompt embeddings, and the most that
a rollout's forward, the decoder or a trained step (forward and backward) holds at once. Invariant: the counts are those
of the run (same adapter, same LoRA, same checkpointing, same code).
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prefgrpo.config.schema import Config, ConfigError
from prefgrpo.data.prompts import read_prompts
from prefgrpo.models import family
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.guidance import attach
from prefgrpo.models.parking import KINDS
from prefgrpo.run.activations import Weigh, fake, forget
from prefgrpo.run.loading import DTYPES, config_errors_as, model_options, trainable

GIB = 2**30
Batch = tuple[Tensor, Tensor, Condition]
"""x [B, ...], σ [B], the condition."""


@dataclass(frozen=True)
class Estimate:
    """Bytes per process."""

    parts: dict[str, int]
    """By kind; activations are those of the largest phase."""
    phases: dict[str, int]
    """Activations of rollout, decode and update, and what comes to the device for a while only."""
    parameters: dict[str, int]
    """Parameters per component of the pipeline, and of what trains."""

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return sum(self.parts.values())


def plan(config: Config, memory_gib: float) -> int:
    """Print the plan; returns 0 if it fits into `memory_gib` per GPU, else 1. Raises ConfigError or ModelError."""
    found = estimate(config)
    for name, count in found.parameters.items():
        print(f"{name:<20} {count / 1e6:12.2f} M parameters")
    print(f"per GPU, {config.gpus} GPU(s):")
    for name, value in found.parts.items():
        print(f"  {name:<18} {value / GIB:10.4g} GiB")
    print(f"  {'sum':<18} {found.total / GIB:10.4g} GiB of {memory_gib:g}")
    if config.data.cache:
        print(f"  text encoders      on disk, once `prefgrpo preprocess` has filled {config.data.cache}")
    shown = ", ".join(f"{name} {value / GIB:.4g}" for name, value in found.phases.items())
    print(f"activations of {config.rollout.batch_size} samples at once: {shown} GiB; the largest counts")
    fits = found.total < memory_gib * GIB
    print("fits" if fits else f"does not fit: {_hint(config, found)}")
    return 0 if fits else 1


def estimate(config: Config) -> Estimate:
    """What each of `config.gpus` processes holds. Raises ConfigError or ModelError."""
    if config.rollout.prompts_per_step % config.gpus:
        expected = f"expected a divisor of rollout.prompts_per_step = {config.rollout.prompts_per_step}"
        raise ConfigError([f"gpus: {expected}, got {config.gpus}"])
    adapter, encoders = without_weights(config)
    parts, parameters = known_bytes(config, adapter, config.gpus), adapter.parameter_counts() | encoders
    texts = {} if config.data.cache else {"text encoders": DTYPES[config.dtype].itemsize * sum(encoders.values())}
    sources = source_count(config, type(adapter))
    parts["embeddings"], phases = traced_bytes(config, adapter, config.gpus, sources)
    (phases if "text_encoder" in config.memory.offload else parts).update(texts)
    return Estimate(parts | {"activations": max(phases.values())}, phases, parameters)


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


def _hint(config: Config, found: Estimate) -> str:
    """A field that makes the sum smaller, its value now and then, tried: first for what is largest."""
    phase = max(found.phases, key=lambda name: found.phases[name])
    sizes = {name: size for name, size in found.parts.items() if name != "activations"} | {phase: found.phases[phase]}
    for part in sorted(sizes, key=lambda name: -sizes[name]):
        for name, value in knobs(config, part):
            section, _, field = name.rpartition(".")
            now = getattr(getattr(config, section) if section else config, field)
            less = estimate(turned(config, name, value)).total
            if less < found.total:
                words = value if isinstance(value, tuple) else () if value is True else (value,)
                option = " ".join([f"--{name.replace('_', '-')}", *map(str, words)])
                return f"{part} is large; {option} (now {now or 'none'}) makes the sum {less / GIB:.4g} GiB"
    return "no field makes it smaller; a model that is larger than one GPU needs sharding, which prefgrpo has not yet"


def turned(config: Config, name: str, value: Any) -> Config:
    """The configuration with another value of a (dotted) field."""
    section, _, field = name.rpartition(".")
    return replace(
        config, **{section: replace(getattr(config, section), **{field: value})} if section else {field: value}
    )


def knobs(config: Config, part: str) -> list[tuple[str, Any]]:
    """(field, next value) for what is not yet at its end and may make this part or phase of an `Estimate` smaller."""
    r, t, m = config.rollout, config.train, config.memory
    more = [n for n in range(config.gpus + 1, r.prompts_per_step + 1) if r.prompts_per_step % n == 0]
    batch = [("rollout.batch_size", r.batch_size // 2)] if r.batch_size > 1 else []
    trained = [("train.lora_rank", t.lora_rank // 2 if t.lora_rank else 64)] if t.lora_rank != 1 else []
    if part in ("rollout", "update"):
        recomputed = [("train.checkpointing_share", 1.0)] if t.checkpointing_share < 1 else []
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


def source_count(config: Config, cls: type[Adapter]) -> int:
    """Source images per prompt: as the prompts file says, or one where it is not there and the family takes any."""
    if not cls.most_sources:
        return 0
    file = Path(config.data.prompts)
    return max(len(p.source) for p in read_prompts(file)) if file.is_file() else 1


def traced_bytes(config: Config, adapter: Adapter, world: int, sources: int = 0) -> tuple[int, dict[str, int]]:
    """(bytes of a process's conditions of one step; the most that each phase holds at once).

    The adapter's modules (on the meta device) lose what they have: they become fake.
    """
    r = config.rollout
    mode, known, batch = stand_ins(config, adapter, sources)
    with mode:
        for _, p in adapter.trainable():
            p.grad = torch.empty_like(p)
            known.append(p.grad)
        phases = {n: _phase(n, config, adapter, batch, known) for n in ("rollout", "decode", "update")}
    forget("prefgrpo.models")
    samples = r.prompts_per_step // world * r.group_size
    held = sum(value.nbytes for value in batch[2].values())
    return samples * held // r.batch_size, phases


def stand_ins(config: Config, adapter: Adapter, sources: int = 0) -> tuple[FakeTensorMode, list[Tensor], Batch]:
    """(mode in which the adapter now runs without content, all its tensors, a batch of the rollout)."""
    r = config.rollout
    modules = [m for m in adapter.pipe.components.values() if isinstance(m, nn.Module)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known, sigma = fake(modules, mode), torch.full((r.batch_size,), 0.9)
    shapes = adapter.condition_shapes(config.data.max_length)
    lengths = {key: torch.tensor(shapes["prompt_embeds"][0]) for key in shapes if key.endswith("length")}
    with mode:
        with Weigh([]):
            one = _condition(config, adapter, lengths, sources)
            batch = {key: _batched(value, r.batch_size) for key, value in one.items()}
        x = torch.empty(r.batch_size, *adapter.latent_shape(r.height, r.width))
    return mode, [*known, x, *batch.values()], (x, sigma, batch)


def _phase(name: str, config: Config, adapter: Adapter, batch: Batch, known: list[Tensor]) -> int:
    """Most bytes that one forward of the rollout, one decode, or one trained step holds."""
    x, sigma, condition = batch
    r, size = config.rollout, (config.rollout.height, config.rollout.width)
    parked = 0
    with ExitStack() as stack:
        scale = stack.enter_context(Weigh(known))
        stack.enter_context(torch.set_grad_enabled(name == "update"))
        if name == "decode":
            adapter.decode(x[: config.memory.decode_batch or r.batch_size], *size)
            parked = _weights(adapter, "vae") if "vae" in config.memory.offload else 0
        else:
            v = adapter.velocity(x, sigma, condition, *size)
            if name == "update":
                v.float().square().mean().backward()
    return scale.most + parked


def _condition(config: Config, adapter: Adapter, lengths: Condition, sources: int) -> Condition:
    """The condition of a longest prompt, the negative one as long, without content but for its lengths."""
    r, shapes = config.rollout, adapter.condition_shapes(config.data.max_length)
    text = {key: lengths.get(key, torch.empty(shape, dtype=adapter.dtype)) for key, shape in shapes.items()}
    image = Image.new("RGB", (r.width, r.height))
    condition = text | (adapter.encode_sources((image,) * sources) if sources else {})
    return attach(condition, dict(text)) if adapter.guided else condition


def _batched(value: Tensor, size: int) -> Tensor:
    """`size` equal rows; numbers keep their content."""
    return value.expand(size, *value.shape).contiguous()


def _weights(adapter: Adapter, *kinds: str) -> int:
    """Bytes of the parameters of some kinds of parts."""
    starts = tuple(start for kind in kinds for start in KINDS[kind])
    parts = [m for n, m in adapter.pipe.components.items() if isinstance(m, nn.Module) and n.startswith(starts)]
    return sum(p.numel() * p.element_size() for m in parts for p in m.parameters())


def known_bytes(config: Config, adapter: Adapter, world: int) -> dict[str, int]:
    """Bytes per process before the first step, by kind; activations and text encoders on disk are not in it."""
    r = config.rollout
    modules = [m for m in adapter.pipe.components.values() if isinstance(m, nn.Module)]
    waiting = _weights(adapter, *config.memory.offload)
    trained = sum(p.numel() for _, p in adapter.trainable())
    window = r.window_size or (r.window_high or r.steps - 1) - r.window_low
    samples = r.prompts_per_step // world * r.group_size
    latent = 4 * math.prod(adapter.latent_shape(r.height, r.width))
    return {
        "weights": sum(p.numel() * p.element_size() for m in modules for p in m.parameters()) - waiting,
        "optimiser": trained * 4 * (3 + bool(config.train.ema_decay)),  # gradient, two moments, average
        "latents": samples * latent * (window + 1),
        "images": samples * r.height * r.width * 3 * (adapter.frames or 1),
    }


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
        if library == "diffusers" and kind.endswith("Scheduler"):
            parts[name] = getattr(diffusers, kind).from_pretrained(path / name)
        elif library == "diffusers":
            cls = getattr(diffusers, kind)
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
        else:
            parts[name] = None if isinstance(entry, list) else entry
    return getattr(diffusers, pipeline)(**parts), encoders


def _count(cls: Any, path: Path) -> int:
    """Parameters of a transformers model."""
    with torch.device("meta"):
        return sum(p.numel() for p in cls._from_config(cls.config_class.from_pretrained(path)).parameters())
