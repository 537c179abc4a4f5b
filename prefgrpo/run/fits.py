"""Whether what a run keeps in GPU memory fits, from the headers of the model's files, before anything is loaded.

    denoisers: 2 or 4 bytes per parameter, fully trained 16, over the shards; 16 per LoRA parameter
    text encoders, VAE: in their dtype, unless they are cached or offloaded

Only what is certain is counted: copies of the policy, activations and samples come on top. So nothing that could run is
refused; `--dry-run` tells whether the rest fits.
"""

from __future__ import annotations

import math
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


def certain_bytes(config: Config, shapes: dict[str, Shapes], encoders: bool) -> dict[str, int]:
    """Bytes per GPU of each component (name → tensors), and of the LoRA; encoders: whether they are loaded."""
    cls = family(config.family)
    t = config.train
    p = config.parallel
    shards = p.shard * p.ring * p.ulysses if config.splits else 1
    out: dict[str, int] = {}
    for name, tensors in shapes.items():
        count = sum(map(math.prod, tensors.values()))
        width = 4 if config.dtype == "fp32" or name in cls.parts_in_fp32 else 2
        kind = "text_encoder" if name.startswith(ENCODERS) else name
        if name in cls.denoisers:
            offloaded = "weights" in config.offload
            out[name] = 0 if offloaded else count * (width if t.lora_rank else 16) // shards
        elif kind not in config.offload and (encoders or kind != "text_encoder"):
            out[name] = count * width
    ends = tuple(f".{target}.weight" for target in t.lora_targets or cls.lora_targets)
    trained = [shape for key, shape in shapes.get(cls.denoisers[0], {}).items() if key.endswith(ends)]
    return out | {"LoRA": 16 * t.lora_rank * sum(map(sum, trained))}


def refusal(config: Config, model: Path, encoders: bool, memory: int) -> str:
    """Why a run cannot fit into a GPU's memory, part by part, and which fields make them smaller; '' if it can."""
    names = [name for name, part in index_of(model).items() if isinstance(part, list) and part != [None, None]]
    shapes = {name: shapes_of(model / name) for name in names if (model / name).is_dir()}
    parts = certain_bytes(config, shapes, encoders)
    needed = sum(parts.values())
    if needed < memory:
        return ""
    listed = " + ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
    return (
        f"weights and optimiser need {needed / GIB:.3g} GiB per GPU, of {memory / GIB:.3g}, before activations: "
        f"{listed}; expected less: data.cache and `prefgrpo preprocess` leave the text encoders out, offload the "
        "encoders and the VAE, parallel.shard divides the denoisers, train.lora_rank trains fewer weights"
    )
