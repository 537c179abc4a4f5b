"""Reading LoRA files of any trainer: diffusers' converters name the layers, and its rules give their strength.

A file has diffusers' names, those of another trainer that its converters know (kohya, ai-toolkit, xlabs), or peft's
(`base_model.model.`, with adapter_config.json beside it). Its alpha is in a header, in tensors, or equal to its rank.
Invariant: a LoRA has the strength that it has in the stock pipeline; all tensors are read, or the file is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
SHAPE = (
    "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias", "exclude_modules",
    "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""Fields of a header that say what the tensors do; versions of peft differ in the others."""
HARMLESS = ("use_rslora", "runtime_config", "eva_config")
"""Fields named like a variant of LoRA that are none."""
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base weights as well: the file alone is half of them."""
OTHERS = {
    r"\.lokr_": "a LoKr",
    r"\.hada_": "a LoHa",
    r"\.(dora_scale|lora_magnitude_vector)": "a DoRA",
    r"^(base_model\.model\.)?(text_encoder|lora_te\d?_|te\d_)": "the LoRA of a text encoder",
    r"\.diff$": "differences of whole weights",
}
"""Pattern of a tensor's name → what it is part of, if that is no LoRA of a denoiser."""


def lora_file(folder: Path) -> Path:
    """The LoRA's file: `folder` itself, or the one in it. Raises FileNotFoundError."""
    if folder.is_file():
        return folder
    names = [name for name in (FILE, PEFT_FILE) if (folder / name).is_file()]
    files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    if len(files) != 1 and not names:
        found = ", ".join(file.name for file in files) or "no safetensors file"
        raise FileNotFoundError(f"no LoRA in '{folder}': expected {FILE} or {PEFT_FILE}, found {found}")
    return files[0]


def read_lora(file: Path, module: nn.Module, converter: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by their names in `module`, options of peft's LoraConfig) of a LoRA file.

    converter: the stock pipeline, whose `lora_state_dict` knows the names of other trainers. Raises ValueError, with
    the names that were found, for what is no plain LoRA or has other names.
    """
    from diffusers.utils import get_peft_kwargs

    raw = load_file(file)
    for pattern, kind in OTHERS.items():
        if found := [name for name in raw if re.search(pattern, name)]:
            raise ValueError(f"expected only a denoiser's LoRA, got {kind} ({len(found)} tensors, such as {found[0]})")
    header = _header(file)
    alphas = [name for name in raw if name.endswith(".alpha")]
    if header and alphas:
        raise ValueError(f"it has alpha in its header and in tensors, such as {alphas[0]}: expected one of the two")
    modules = {name for name, _ in module.named_modules()}
    expected = next(name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    renamed = {_own_name(name, modules): tensor for name, tensor in raw.items()}
    try:
        state, *more, _ = converter.lora_state_dict(dict(renamed), return_alphas=True, return_lora_metadata=True)
    except Exception as error:  # a converter assumes all names of its trainer, and fails in many ways without one
        found = f"found {', '.join(list(raw)[:3])}, …"
        raise ValueError(f"expected names such as {expected}.lora_A.weight, {found} ({error})") from error
    network_alphas = {name.removeprefix(PREFIX): alpha for name, alpha in ((more or [None])[0] or {}).items()}
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    unknown = [name for name in state if name.partition(".lora_")[0] not in modules or ".lora_" not in name]
    pairs = [sum(bool(re.search(r"lora_(A|down)\b", name)) for name in names) for names in (raw, state)]
    if unknown or not state or pairs[0] > pairs[1]:
        found = f"found {', '.join((unknown or list(raw))[:3])}, …"
        raise ValueError(f"expected names such as {expected}.lora_A.weight, {found}")
    if header:
        return state, {name: header[name] for name in SHAPE if header.get(name)}
    ranks = {f"^{name}": up.shape[1] for name, up in state.items() if "lora_B" in name and up.ndim > 1}
    options = get_peft_kwargs(ranks, network_alphas, state)
    options["lora_alpha"] = float(options["lora_alpha"])
    options["alpha_pattern"] = {name: float(alpha) for name, alpha in options["alpha_pattern"].items()}
    return state, {name: value for name, value in options.items() if name in SHAPE}


PREFIX = "transformer."
"""Of every name in diffusers' files, also of a second denoiser in its own file."""


def _own_name(name: str, modules: set[str]) -> str:
    """diffusers' name of a tensor that peft, or a file without any prefix, names as the model does."""
    bare = name.removeprefix("base_model.model.")
    return PREFIX + bare if re.split(r"\.lora_|\.alpha$", bare)[0] in modules else name


def _header(file: Path) -> dict[str, Any]:
    """Rank, alpha, layers and so on as the file's header or peft's adapter_config.json tells them; {} without either.
    Raises ValueError for a variant of LoRA."""
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("lora_adapter_metadata", "{}")
    header = {name.removeprefix(PREFIX): value for name, value in json.loads(text).items()}
    beside = file.with_name("adapter_config.json")
    if not header and file.name == PEFT_FILE and beside.is_file():
        header = json.loads(beside.read_text(encoding="utf-8"))
    variants = [name for name, value in header.items() if value and re.match(r"use_|\w+_config$", name)]
    variants = [name for name in variants if name not in HARMLESS]
    start = str(header.get("init_lora_weights", ""))
    if header.get("peft_type", "LORA") != "LORA" or start.startswith(CHANGE_BASE):
        variants += [str(header.get("peft_type")), start]
    if variants:
        raise ValueError(f"its header has {', '.join(variants)}: expected a plain LoRA")
    return header
