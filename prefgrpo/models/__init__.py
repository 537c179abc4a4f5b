"""The table of model families."""

from __future__ import annotations

import torch

from prefgrpo.config.by_path import registered_class
from prefgrpo.config.schema import Config
from prefgrpo.models import folder
from prefgrpo.models.base import Adapter

MODELS: dict[str, str] = {
    "flux": "prefgrpo.models.flux:Flux",
    "flux_kontext": "prefgrpo.models.flux:FluxKontext",
    "flux2": "prefgrpo.models.flux2:Flux2",
    "flux2_klein": "prefgrpo.models.flux2:Flux2Klein",
    "flux3": "prefgrpo.models.flux3:Flux3",
    "hunyuan_video": "prefgrpo.models.hunyuan_video:HunyuanVideo",
    "hunyuan_video_15": "prefgrpo.models.hunyuan_video:HunyuanVideo15",
    "krea2": "prefgrpo.models.krea2:Krea2",
    "ltx2": "prefgrpo.models.ltx2:LTX2",
    "qwen_image": "prefgrpo.models.qwen_image:QwenImage",
    "qwen_image_edit": "prefgrpo.models.qwen_image:QwenImageEdit",
    "qwen_image_edit_plus": "prefgrpo.models.qwen_image:QwenImageEditPlus",
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
    """Adapter class of a family in MODELS, or at the import path `name` (as file.py:Class). Raises ValueError."""
    return registered_class("family", name, MODELS, Adapter)  # type: ignore[type-abstract]


def family_of(model: str) -> str:
    """Family of a pipeline (folder or hub id), by its model_index.json. Raises ModelError if none fits."""
    index = folder.index_of(folder.locate(model, configs_only=True))
    for name in MODELS:
        if not family(name).unsupported_index(index):
            return name
    raise folder.ModelError(f"'{model}' contains a {index.get('_class_name')}, which no model family supports")


def makes_clips(config: Config) -> bool:
    """Whether samples are videos of more than one frame."""
    frames = config.rollout.frames or family(config.family).default_frames
    return frames is not None and frames > 1
