"""Shared by rewards that load weights: files from a folder or the hub, devices, models built from published tensors.

Invariants: every failure while loading a model becomes a RewardError that names the model; no weight is left random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prefgrpo.rewards.base import INSTALL, RewardError, library

Dtype = Literal["float32", "bfloat16", "float16"]
AutoDtype = Literal["auto", "float32", "bfloat16", "float16"]


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Convert exceptions for a broken, wrong or missing checkpoint into a RewardError that names `model`."""
    try:
        yield
    except (RewardError, ImportError):
        raise
    except Exception as error:  # libraries raise anything for a broken file
        raise RewardError(
            f"cannot load '{model}': {type(error).__name__}: {str(error)[:500]}. Expected a folder, a file or a hub id "
            "with a complete checkpoint of this reward; download it again or give another in the reward's options"
        ) from error


def device_of(name: str) -> torch.device:
    """The device called `name`; `auto`: cuda if available, else cpu."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def dtype_of(name: str, device: torch.device, half: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype called `name`; `auto`: `half` on a GPU, else float32."""
    if name == "auto":
        return half if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def source_of(model: str | Path) -> dict[str, str]:
    """transformers' arguments for a folder, or for a hub id 'owner/name' or 'owner/name@revision'."""
    model = str(model)
    name, at, revision = model.rpartition("@")
    if not at or Path(model).expanduser().exists():
        return {"pretrained_model_name_or_path": str(Path(model).expanduser()) if model.startswith("~") else model}
    return {"pretrained_model_name_or_path": name, "revision": revision}


def folder_of(model: str, patterns: Sequence[str]) -> Path:
    """The folder `model`, or a download of the hub repository's files that match the patterns.

    model: folder, 'owner/name' or 'owner/name@revision', where a commit fixes the weights for good.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    source = source_of(model)
    name = source["pretrained_model_name_or_path"]
    if path.exists() or model.startswith((".", "/", "~")) or name.count("/") != 1:
        raise RewardError(f"'{model}' is neither a folder nor a hub id (owner/name or owner/name@revision)")
    from huggingface_hub import snapshot_download

    with loading(model):
        return Path(snapshot_download(name, revision=source.get("revision"), allow_patterns=list(patterns)))


def pretrained(kind: str, model: str, **how: Any) -> Any:
    """transformers' class of that name, from a folder or hub id. RewardError if it is absent or broken."""
    transformers = library("transformers", INSTALL)
    with loading(model):
        return getattr(transformers, kind).from_pretrained(**source_of(model), **how)


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of safetensors or torch files (loaded with weights_only)."""
    if not files:
        raise RewardError("expected a checkpoint's .safetensors, .pth or .bin file, found none")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors |= load_file(file)
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            tensors |= loaded.get("model", loaded)
    return tensors


def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Strip peft's prefixes and replace each adapted W by W + scale·B·A (in float32, cast back to W's dtype)."""
    plain = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default.", "."): tensor
        for name, tensor in tensors.items()
        if ".original_module." not in name
    }
    merged = {name.replace(".base_layer.", "."): t for name, t in plain.items() if ".lora_" not in name}
    for name in (n for n in plain if ".lora_" in n and not n.endswith(".lora_B.weight")):
        stem, _, kind = name.partition(".lora_")
        if kind != "A.weight" or f"{stem}.weight" not in merged:
            raise RewardError(f"expected LoRA pairs of linear layers in the checkpoint, got '{name}'")
        a = plain[name].float()
        b = plain[f"{stem}.lora_B.weight"].float()
        weight = merged[f"{stem}.weight"]
        merged[f"{stem}.weight"] = (weight.float() + scale * (b @ a)).to(weight.dtype)
    return merged


def build_model(cls: Any, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
    """A transformers model of class `cls` with these weights, all of which it must have."""
    loaded = cls.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True, **how
    )
    return frozen(*loaded, "missing_keys", "unexpected_keys", "mismatched_keys")


def frozen(model: Any, info: Mapping[str, Any], *faults: str) -> Any:
    """The model in eval mode without gradients. RewardError if the info of its loading lists keys under `faults`."""
    if wrong := {fault: sorted(map(str, info[fault]))[:3] for fault in faults if info[fault]}:
        where = f" '{model.name_or_path}'" * bool(model.name_or_path)
        raise RewardError(f"the checkpoint{where} does not fit {type(model).__name__} as its config describes: {wrong}")
    return model.eval().requires_grad_(False)


def linear_head(tensors: Mapping[str, Tensor], prefix: str, activation: type[nn.Module]) -> nn.Sequential:
    """The linear layers `prefix`* in the order of their names, in float32, with activations in between."""
    own = {name: tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
    stems = sorted(name.removesuffix("weight") for name in own if name.endswith("weight"))
    if not stems:
        raise RewardError(f"expected a reward head ({prefix}*) in the checkpoint, found none")
    biased = any(name.endswith("bias") for name in own)
    layers: list[nn.Module] = []
    for stem in stems:
        outputs, inputs = own[f"{stem}weight"].shape
        layer = nn.Linear(inputs, outputs, bias=biased, device="meta")
        layer.load_state_dict({k.removeprefix(stem): v for k, v in own.items() if k.startswith(stem)}, assign=True)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).requires_grad_(False)
