"""`prefgrpo plan RECIPE --gpus N`: what a run holds in memory, from the model's config alone.

The models are built on the meta device: no weights are read. Counted: weights, gradients, AdamW's moments and the
average of what trains, stored latents, images. Activations come on top: `prefgrpo train RECIPE --dry-run` measures
them. Invariant: the counts are those of the run (same adapter, same LoRA, same formula as at its start).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prefgrpo.config import Config
from prefgrpo.loading import DTYPES, names
from prefgrpo.models import family, folder
from prefgrpo.models.base import Adapter

GIB = 2**30


def plan(config: Config, gpus: int, memory_gib: float) -> int:
    """Print the plan; returns 0 if it fits into `memory_gib` per GPU, else 1. Raises ConfigError or ModelError."""
    with names("family"):
        cls = family(config.family)
    path = folder.resolve(config.model, cls.pipeline, configs_only=True)
    pipe, encoders = meta_pipeline(path, cls.pipeline, DTYPES[config.dtype])
    r, t = config.rollout, config.train
    with names("rollout or train"):
        adapter = cls(pipe, guidance=r.guidance, shift=r.shift, frames=r.frames, guidance_2=r.guidance_2,
                      target_components=t.target_components)  # fmt: skip
        if t.lora_rank:
            adapter.add_lora(t.lora_rank, t.lora_alpha, t.lora_targets or None)
        else:
            adapter.enable_full()
        parts = known_bytes(config, adapter, gpus)
    counts = adapter.parameter_counts() | encoders
    for name, count in counts.items():
        print(f"{name:<20} {count / 1e6:12.2f} M parameters")
    size = {"fp32": 4, "bf16": 2}[config.dtype]
    total, texts = sum(parts.values()), size * sum(encoders.values())
    print(f"per GPU, {gpus} GPU(s), without activations:")
    for name, value in parts.items():
        print(f"  {name:<18} {value / GIB:10.4g} GiB")
    print(f"  {'sum':<18} {total / GIB:10.4g} GiB of {memory_gib:g}")
    print(f"text encoders: {texts / GIB:.4g} GiB more, none after `prefgrpo preprocess` with data.cache")
    fits = total < memory_gib * GIB
    print("fits" if fits else f"does not fit: {max(parts, key=lambda n: parts[n])} is the largest part")
    return 0 if fits else 1


def known_bytes(config: Config, adapter: Adapter, world: int) -> dict[str, int]:
    """Bytes per process before the first step, by kind; activations and text encoders on disk are not in it."""
    r = config.rollout
    modules = [m for m in adapter.pipe.components.values() if isinstance(m, nn.Module)]
    trained = sum(p.numel() for _, p in adapter.trainable())
    window = r.window_size or (r.window_high or r.steps - 1) - r.window_low
    samples = r.prompts_per_step // world * r.group_size
    latent = 4 * math.prod(adapter.latent_shape(r.height, r.width))
    return {
        "weights": sum(p.numel() * p.element_size() for m in modules for p in m.parameters()),
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
