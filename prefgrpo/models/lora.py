"""LoRA on a frozen diffusers transformer: W x + (alpha / rank)·B A x, with fp32 masters over any base dtype.

peft provides the layers; diffusers reads and writes the file. A file has alpha = rank, with B multiplied by alpha /
rank, because most programs (ComfyUI, for example) ignore the header, where diffusers keeps alpha, and use the scale 1.
Invariants: the initial LoRA depends on (seed, shapes), not on device or rank; a saved LoRA has the same effect without
its header, and equal LoRAs give identical files.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prefgrpo.models.folder import HUB_ID, hub_id

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Attention projections of blocks that process image and text jointly."""
NAME = "default"
"""Name of the trained adapter inside peft."""


def has(transformer: nn.Module) -> bool:
    """Whether a LoRA was injected."""
    return NAME in getattr(transformer, "peft_config", {})


def add(
    transformer: nn.Module,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    seed: int,
    init: Literal["kaiming", "gaussian"] = "kaiming",
) -> None:
    """Inject LoRA layers into every Linear whose name ends in one of `targets`.

    A is Kaiming-uniform (peft's default) or N(0, 1 / rank²) (peft's "gaussian"), drawn from `seed`; B is 0, so outputs
    do not change. Raises ValueError for a second LoRA, a rank below 1, or a target that matches no module.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"LoRA rank must be at least 1, got {rank}")
    if has(transformer):
        raise ValueError("the transformer already has a LoRA: reload the base model")
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    unknown = [t for t in targets if not any(name == t or name.endswith("." + t) for name in linear)]
    if unknown or not targets:
        known = sorted({re.sub(r"^\w+\.\d+\.", "", name) for name in linear})
        raise ValueError(f"LoRA targets {unknown} match no Linear layer of the transformer; it has {', '.join(known)}")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
    _inject(transformer, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if ".lora_A." in name:
            start = torch.empty(parameter.shape)
            if init == "gaussian":
                nn.init.normal_(start, std=1.0 / rank, generator=generator)
            else:
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(start)


def _inject(transformer: Any, config: Any) -> None:
    """Inject `config`, with trained weights in fp32; the random state of the process is preserved."""
    from prefgrpo.integrations.lora import fuse_lora

    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        transformer.add_adapter(config, adapter_name=NAME)
    fuse_lora(transformer)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save(pipe: Any, folder: str, component: str = "transformer") -> None:
    """Write `pytorch_lora_weights.safetensors` into `folder`, atomically, with alpha = rank.

    B is multiplied by alpha / rank and rounded to fp32, which is exact if alpha / rank is a power of two.
    """
    from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
    from peft import get_peft_model_state_dict

    module = getattr(pipe, component)
    if not has(module):
        raise RuntimeError("there is no LoRA to save: call add_lora or load_lora first")
    config = module.peft_config[NAME]
    facts = config.to_dict() | {"lora_alpha": config.r}
    part = f".partial-{os.getpid()}.safetensors"
    _files(pipe).save_lora_weights(
        folder,
        transformer_lora_layers=_scale_up(
            get_peft_model_state_dict(module, adapter_name=NAME), config.lora_alpha / config.r
        ),
        transformer_lora_adapter_metadata={k: sorted(v) if isinstance(v, set) else v for k, v in facts.items()},
        weight_name=part,
    )
    sort_header(Path(folder) / part)
    os.replace(Path(folder) / part, Path(folder) / LORA_WEIGHT_NAME_SAFE)


def _scale_up(layers: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The tensors of LoRA layers, with every B multiplied by `factor`."""
    return {key: value * factor if ".lora_B." in key else value for key, value in layers.items()}


def _files(pipe: Any) -> Any:
    """Loader of the pipeline's LoRA files: the pipeline, or HunyuanVideo's mixin for 1.5, whose pipeline has none."""
    from diffusers.loaders import HunyuanVideoLoraLoaderMixin

    return pipe if hasattr(pipe, "save_lora_weights") else HunyuanVideoLoraLoaderMixin


def sort_header(file: Path) -> None:
    """Sort the keys of a safetensors file's header in place, since safetensors writes metadata in random order."""
    with file.open("r+b") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        handle.seek(8)
        handle.write(text.ljust(size))  # trailing spaces in the header align the tensors


def locate(source: str) -> Path:
    """Folder or file of a LoRA: a path, a run's folder, or a hub id 'owner/name' or 'owner/name@revision', downloaded
    unless cached. Raises FileNotFoundError, or OSError if the hub has no such LoRA.
    """
    from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
    from huggingface_hub import hf_hub_download

    path = Path(source).expanduser()
    if path.exists():
        return path / "lora" if (path / "lora").is_dir() else path
    name, revision = hub_id(source)
    if not HUB_ID.fullmatch(source) or Path(source.split("/")[0]).is_dir():
        raise FileNotFoundError(f"expected a folder, a file or a hub id 'owner/name', got '{source}'")
    return Path(hf_hub_download(name, LORA_WEIGHT_NAME_SAFE, revision=revision))


def load(pipe: Any, place: str, component: str = "transformer") -> None:
    """Load a LoRA in diffusers format from a file, or from a folder as `save` wrote it.

    If the model has no LoRA, one of the saved rank, alpha and layers is injected first (alpha = rank if the file does
    not tell it, as other programs read such files); otherwise the model's alpha stays, and B is scaled to match.
    Raises FileNotFoundError, or ValueError if the layers or rank of the saved LoRA differ from the model's.
    """
    from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
    from peft import LoraConfig, set_peft_model_state_dict

    file = Path(place)
    module = getattr(pipe, component)
    if not file.is_file():
        file = file / LORA_WEIGHT_NAME_SAFE
    if not file.is_file():
        raise FileNotFoundError(f"no LoRA in '{place}': expected {LORA_WEIGHT_NAME_SAFE}")
    packed, *_, metadata = _files(pipe).lora_state_dict(
        str(file.resolve().parent), weight_name=file.name, return_lora_metadata=True
    )
    prefix = "transformer."  # also for a second one, in its own file
    state = {key.removeprefix(prefix): value for key, value in packed.items()}
    options = {k.removeprefix(prefix): v for k, v in (metadata or {}).items()}
    if not has(module):
        _inject(module, LoraConfig(**options) if "lora_alpha" in options else _shape_of(state, file))
    config = module.peft_config[NAME]
    stored = options["lora_alpha"] / options["r"] if "lora_alpha" in options else 1.0
    state = _scale_up(state, stored / (config.lora_alpha / config.r))
    own = sum(".lora_" in name for name, _ in module.named_parameters())
    result = set_peft_model_state_dict(module, state, adapter_name=NAME)
    if result.unexpected_keys or own != len(state):
        raise ValueError(f"{file} contains {len(state)} tensors, but the model's LoRA has {own}: their targets differ")


def _shape_of(state: dict[str, Tensor], file: Path) -> Any:
    """The peft configuration of a LoRA whose file has no header: rank and layers from the tensors, alpha = rank."""
    from peft import LoraConfig

    down = {key: value for key, value in state.items() if key.endswith(".lora_A.weight")}
    ranks = {value.shape[0] for value in down.values()}
    if len(ranks) != 1:
        found = f"ranks {sorted(ranks)}" if ranks else "no layer of a LoRA"
        raise ValueError(f"{file} has no header, and {found}: expected layers of one rank in diffusers format")
    (rank,) = ranks
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=[key.removesuffix(".lora_A.weight") for key in down])
