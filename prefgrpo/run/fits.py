"""Whether what a run keeps in GPU memory fits, from the headers of the model's files, before anything is loaded.

    denoisers: 2 or 4 bytes per parameter, fully trained 16, over the shards; 16 per LoRA parameter
    text encoders, VAE: in their dtype, unless they are cached or offloaded

Only what is certain is counted: copies of the policy, activations and samples come on top. So nothing that could run is
refused; `--dry-run` tells whether the rest fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from safetensors import safe_open

from prefgrpo.config.schema import Config
from prefgrpo.models import family
from prefgrpo.models.folder import ENCODERS, index_of

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


def certain_bytes(config: Config, shapes: dict[str, Shapes], encoders: bool) -> int:
    """Bytes per GPU of components (name → tensors) under this configuration; encoders: whether they are loaded."""
    cls = family(config.family)
    t = config.train
    p = config.parallel
    shards = p.shard * p.ring * p.ulysses if config.splits else 1
    total = 0.0
    for name, tensors in shapes.items():
        count = sum(map(math.prod, tensors.values()))
        width = 4 if config.dtype == "fp32" or name in cls.parts_in_fp32 else 2
        kind = "text_encoder" if name.startswith(ENCODERS) else name
        if name in cls.denoisers:
            total += count * (width if t.lora_rank else 16) / shards * ("weights" not in config.offload)
        elif kind not in config.offload and (encoders or kind != "text_encoder"):
            total += count * width
    ends = tuple(f".{target}.weight" for target in t.lora_targets or cls.lora_targets)
    trained = [shape for key, shape in shapes.get(cls.denoisers[0], {}).items() if key.endswith(ends)]
    return int(total + 16 * t.lora_rank * sum(map(sum, trained)))


def remedies(config: Config, encoders: bool, processes: int) -> Iterator[tuple[str, Config, bool]]:
    """(switch, the configuration with it, whether text encoders are loaded), those that cost least first."""
    offload = config.offload
    if encoders:
        yield "data.cache, after `prefgrpo preprocess`", config, False
    if "vae" not in offload:
        yield "offload: [vae]", replace(config, offload=(*offload, "vae")), encoders
    for shard in (n for n in range(config.parallel.shard + 1, processes + 1) if processes % n == 0):
        yield f"parallel.shard: {shard}", replace(config, parallel=replace(config.parallel, shard=shard)), encoders
    if not config.train.lora_rank:
        yield "train.lora_rank: 64", replace(config, train=replace(config.train, lora_rank=64)), encoders


def refusal(config: Config, model: Path, encoders: bool, memory: int, processes: int) -> str:
    """Why a run cannot fit into a GPU's memory, and the smallest set of switches with which it could; '' if it can."""
    parts = [name for name, part in index_of(model).items() if isinstance(part, list) and part != [None, None]]
    shapes = {name: shapes_of(model / name) for name in parts if (model / name).is_dir()}
    needed = certain_bytes(config, shapes, encoders)
    if needed < memory:
        return ""
    head = f"weights and optimiser need {needed / GIB:.3g} GiB per GPU, of {memory / GIB:.3g}, before activations"
    names = [name for name, _, _ in remedies(config, encoders, processes)]
    for some in (chosen for count in range(1, len(names) + 1) for chosen in combinations(names, count)):
        changed = config
        loads = encoders
        for name in some:
            changed, loads = next((c, e) for n, c, e in remedies(changed, loads, processes) if n == name)
        if (total := certain_bytes(changed, shapes, loads)) < memory:
            return f"{head}; it fits with {' and '.join(some)}: {total / GIB:.3g} GiB"
    return f"{head}: impossible on {processes} such GPU(s); use more of them with parallel.shard, or a smaller model"
