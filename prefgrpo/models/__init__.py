"""The table of model families, and loading one."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from prefgrpo.config.by_path import load_object
from prefgrpo.models import folder
from prefgrpo.models.base import Adapter

MODELS: dict[str, str] = {
    "flux": "prefgrpo.models.flux:Flux",
    "flux_kontext": "prefgrpo.models.flux_kontext:FluxKontext",
    "flux2": "prefgrpo.models.flux2:Flux2",
    "flux2_klein": "prefgrpo.models.flux2:Flux2Klein",
    "hunyuan_video": "prefgrpo.models.hunyuan_video:HunyuanVideo",
    "hunyuan_video_15": "prefgrpo.models.hunyuan_video:HunyuanVideo15",
    "ltx2": "prefgrpo.models.ltx2:LTX2",
    "qwen_image": "prefgrpo.models.qwen_image:QwenImage",
    "qwen_image_edit": "prefgrpo.models.qwen_image_edit:QwenImageEdit",
    "qwen_image_edit_plus": "prefgrpo.models.qwen_image_edit:QwenImageEditPlus",
    "qwen_image_21": "prefgrpo.models.qwen_image_21:QwenImage21",
    "sd3": "prefgrpo.models.sd3:StableDiffusion3",
    "wan": "prefgrpo.models.wan:Wan",
    "wan22": "prefgrpo.models.wan:Wan22",
    "wan22_i2v": "prefgrpo.models.wan:Wan22I2V",
    "wan_i2v": "prefgrpo.models.wan:WanI2V",
    "wan_ti2v": "prefgrpo.models.wan:WanTI2V",
    "z_image": "prefgrpo.models.z_image:ZImage",
}
"""Family name → import path of its adapter."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Name in a configuration → compute dtype."""


def family(name: str) -> type[Adapter]:
    """Adapter class of a family in MODELS, or at the import path `name` (as file.py:Class). Raises ValueError for a
    name that is neither, and suggests the nearest."""
    path = MODELS.get(name, name)
    if not {".", ":"} & set(path):
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        expected = f"expected one of {', '.join(MODELS)}, or the import path of a class"
        raise ValueError(f"unknown model family '{name}': {expected}{hint}")
    try:
        cls = load_object(path)
    except Exception as error:
        raise ValueError(f"cannot load the family '{name}': {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Adapter)):
        raise ValueError(f"expected a class derived from prefgrpo.models.base.Adapter at '{name}', got {cls!r}")
    return cls


def family_of(model: str) -> str:
    """Family of a pipeline (folder or hub id), by its model_index.json. Raises ModelError if none fits."""
    index = folder.index_of(folder.locate(model, configs_only=True))
    classes = {name: family(name) for name in MODELS}
    fits = (n for n, c in classes.items() if c.pipeline == index.get("_class_name") and not c.unsupported_index(index))
    if found := next(fits, None):
        return found
    raise folder.ModelError(f"'{model}' contains a {index.get('_class_name')}, which no model family supports")


def load(name: str, model: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Adapter:
    """Load `model` (a folder or hub id) as family `name`; options are passed to `Adapter.load`."""
    return family(name).load(model, dtype, device, **options)
