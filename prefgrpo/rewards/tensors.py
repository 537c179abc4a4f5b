"""A model from the tensors of a published file, whichever names they have there.

    W ← W + scale·B·A  (LoRA, merged in float32)        pixels ← (x/255 − mean) / deviation  (CLIP's)

Invariant: a model that is returned has every weight from the file and uses every tensor given, or RewardError says
which not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefgrpo.rewards.base import RewardError

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]


def standard(pixels: Tensor) -> Tensor:
    """[…, 3, H, W] of values 0 … 255, as CLIP and its descendants take them."""
    return (pixels.float() / 255 - MEAN) / STD


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of safetensors or torch files (read without unpickling code)."""
    if not files:
        raise RewardError("expected a checkpoint's .safetensors, .pth or .bin file, found none")
    found: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found |= load_file(file)
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            found |= loaded.get("model", loaded)
    return found


def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """peft's names taken away and W + scale·B·A in the place of each adapted W (in float32, then W's dtype)."""
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
        a, b, weight = plain[name].float(), plain[f"{stem}.lora_B.weight"].float(), merged[f"{stem}.weight"]
        merged[f"{stem}.weight"] = (weight.float() + scale * (b @ a)).to(weight.dtype)
    return merged


def filled(cls: Any, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, **how: Any) -> Any:
    """A transformers model of `cls` with these weights, to score with."""
    model, info = cls.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True, **how
    )
    wrong = {
        k: sorted(map(str, info[k]))[:3] for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[k]
    }
    if wrong:
        raise RewardError(f"the checkpoint does not fit {cls.__name__} as its config describes it: {wrong}")
    return model.eval().requires_grad_(False)
