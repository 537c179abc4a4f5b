"""LoRA files of any trainer, read as diffusers reads them.

A file has diffusers' names, or others that diffusers' loader of the family converts (kohya's, ai-toolkit's, ComfyUI's,
peft's). A LoRA is as strong as in the stock pipeline: by the header, by alpha tensors, otherwise alpha = rank. Names
with a prefix that the loader does not know are read as if they had diffusers' own. Invariant: a file is read as a whole
or rejected; tensors that fit no layer are never dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
"""Options of a folder that peft has written."""
NAMES = (FILE, PEFT_FILE, CONFIG)
"""What a folder is read from."""
PREFIX = "transformer."
"""Prefixes of the names that diffusers' loaders return, also for a second expert in its own file."""
STRENGTH = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
"""Options of peft, beside the tensors, on which the effect of a file depends."""
KINDS = {
    "a LoHa": (".hada_",), "a LoKr": (".lokr_",), "a DoRA": ("dora_scale", "lora_magnitude_vector"),
    "a LoRA of a text encoder": ("text_encoder", "lora_te", "clip_l.", "t5xxl."),
}  # fmt: skip
"""Kinds that are not trained here → parts of their tensors' names."""


def read(folder: Path, loader: Any, module: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """The tensors {layer.lora_A.weight: …} for `module` and peft's LoraConfig, from a file or its folder.

    loader: object with diffusers' `lora_state_dict` of the family. Raises FileNotFoundError, or ValueError for a file
    that cannot be read as a whole.
    """
    file = locate(folder)
    tensors, header = _content(file)
    for kind, parts in KINDS.items():
        if found := [name for name in tensors if any(part in name for part in parts)]:
            raise ValueError(f"{file} is {kind} ({found[0]}): expected a LoRA of the denoiser")
    for spelling in _spellings(tensors, module):
        packed, alphas, fault = _convert(spelling, loader, module)
        if not fault:
            break
    else:
        raise ValueError(f"{file} has {fault}")
    state = {name.removeprefix(PREFIX): tensor for name, tensor in packed.items()}
    return state, _config(file, state, header, alphas)


def locate(folder: Path) -> Path:
    """The LoRA file of a folder, or the file itself. Raises FileNotFoundError."""
    names = ("", FILE, PEFT_FILE)
    for file in (folder / name for name in names):
        if file.is_file():
            return file
    raise FileNotFoundError(f"no LoRA in '{folder}': expected {FILE} or {PEFT_FILE}")


def _content(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, and peft's options from the header or from peft's own file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            header = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is no complete safetensors file: {error}") from error
    options = file.parent / CONFIG
    if not header and file.name == PEFT_FILE and options.is_file():
        header = json.loads(options.read_text(encoding="utf-8"))
    return tensors, {name.removeprefix(PREFIX): value for name, value in header.items()}


def _spellings(tensors: dict[str, Tensor], module: nn.Module) -> list[dict[str, Tensor]]:
    """The tensors as they are, and under diffusers' names if theirs have another prefix or none."""
    bare = {re.sub(r"^(base_model\.model|diffusion_model)\.", "", name): tensor for name, tensor in tensors.items()}
    layers = {name for name, _ in module.named_modules()}
    ours = all(name.rpartition(".lora_")[0] in layers or name.removesuffix(".alpha") in layers for name in bare)
    return [tensors, {f"{PREFIX}{name}": tensor for name, tensor in bare.items()}] if ours else [tensors]


def _convert(tensors: dict[str, Tensor], loader: Any, module: nn.Module) -> tuple[dict[str, Tensor], Any, str]:
    """The tensors by diffusers' names, its alphas if it returns any, and what is wrong, or ""."""
    from diffusers.loaders import FluxLoraLoaderMixin

    # only FLUX.1's loader returns alphas, if asked to; the others multiply them into A or B, or reject them
    options = {"return_alphas": True} if isinstance(loader, FluxLoraLoaderMixin) else {}
    try:
        packed, *rest = loader.lora_state_dict(dict(tensors), return_lora_metadata=True, **options)
    except Exception as error:  # noqa: BLE001  (whatever the conversion of foreign names comes upon)
        why = f"diffusers cannot read it ({type(error).__name__}: {error})"
        return {}, None, f"the tensors {_some(tensors)}: {why}"
    alphas = rest[0] if len(rest) > 1 else None
    layers = {name for name, _ in module.named_modules()}
    other = [name for name in packed if not _is_layers(name, layers)]
    if not other and any(".lora_B." in name for name in packed):
        return packed, alphas, ""
    linear = next(name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    expected = f"expected names like {PREFIX}{linear}.lora_A.weight"
    return {}, None, f"tensors of no layer of the model: {_some(other or tensors)}; {expected}"


def _is_layers(name: str, layers: set[str]) -> bool:
    layer, _, end = name.removeprefix(PREFIX).rpartition(".lora_")
    return name.startswith(PREFIX) and layer in layers and end in ("A.weight", "B.weight")


def _config(file: Path, state: dict[str, Tensor], header: dict[str, Any], alphas: Any) -> Any:
    """peft's options, from the header or as diffusers derives them from the tensors."""
    from diffusers.utils.peft_utils import get_peft_kwargs
    from peft import LoraConfig

    if header and alphas:
        raise ValueError(f"{file} has alphas both in its header and as tensors ({next(iter(alphas))}): expected one")
    layers = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    if unknown := sorted(name for name in header if header[name] and name not in LoraConfig.__dataclass_fields__):
        raise ValueError(f"{file} needs a newer peft: its header has {', '.join(unknown)}")
    if header:
        options = {name: header[name] for name in STRENGTH if name in header}
    else:
        ranks = {f"^{name}": tensor.shape[1] for name, tensor in state.items() if ".lora_B." in name}
        own = {name.removeprefix(PREFIX): alpha for name, alpha in (alphas or {}).items()}
        derived = get_peft_kwargs(ranks, own, state)
        options = {name: derived[name] for name in STRENGTH if name in derived}
        options["lora_alpha"] = float(options["lora_alpha"])
        options["alpha_pattern"] = {name: float(alpha) for name, alpha in options["alpha_pattern"].items()}
    named = header.get("target_modules")  # layers that the file should have as well
    return LoraConfig(**options, target_modules=[*layers, *(named if isinstance(named, list) else [])])


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + ", …" * (len(listed) > 3)
