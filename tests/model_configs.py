"""Pipeline folders with the true configs of the published models and no weights, for `prefgrpo plan`.

Those that only differ from another in their pipeline class, input channels or an image encoder are made from it.
"""

import json
import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path

import diffusers

from prefgrpo import plan
from prefgrpo.config import Config
from prefgrpo.plan import Estimate

DATA = Path(__file__).parent / "data" / "model_configs"
EDIT = {"processor": ["transformers", "Qwen2VLProcessor"]}
VISION = {
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
I2V = "WanImageToVideoPipeline"
MODELS = {
    "black-forest-labs/FLUX.1-dev": ("flux", {}, {}),
    "black-forest-labs/FLUX.1-Kontext-dev": ("flux", {"_class_name": "FluxKontextPipeline"}, {}),
    "black-forest-labs/FLUX.2-klein-base-9B": ("klein", {}, {}),
    "CompVis/stable-diffusion-v1-4": ("sd1", {}, {}),
    "hunyuanvideo-community/HunyuanVideo": ("hunyuan", {}, {}),
    "Lightricks/LTX-Video": ("ltx", {}, {}),
    "Qwen/Qwen-Image": ("qwen", {}, {}),
    "Qwen/Qwen-Image-Edit": ("qwen", {"_class_name": "QwenImageEditPipeline", **EDIT}, {}),
    "Qwen/Qwen-Image-Edit-2509": ("qwen", {"_class_name": "QwenImageEditPlusPipeline", **EDIT}, {}),
    "stabilityai/stable-diffusion-3.5-medium": ("sd35m", {}, {}),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("sd1", {}, {}),
    "Tongyi-MAI/Z-Image": ("zimage", {}, {}),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (
        "wan14", {"_class_name": I2V, **VISION}, {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("wan13", {}, {}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("wan14", {}, {}),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (
        "wan22",
        {"_class_name": I2V, "boundary_ratio": 0.9, **{key: [None, None] for key in VISION}},
        {"in_channels": 36},
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("wan22", {}, {}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("wan_ti2v", {}, {}),
}  # fmt: skip
"""Hub id → (folder of data/model_configs, changes of model_index.json, changes of the transformers' configs)."""
CLIP_H = {
    "architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "hidden_size": 1280, "patch_size": 14,
    "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16, "image_size": 224,
}  # fmt: skip


def folder(model: str, into: Path, depth: dict[str, int] | None = None) -> Path:
    """A folder in `into` for a hub id; depth: numbers of blocks that replace those of the transformers' configs."""
    name, index, transformer = MODELS[model]
    shutil.copytree(DATA / name, into)
    _change(into / "model_index.json", index)
    for file in into.glob("transformer*/config.json"):
        _change(file, transformer | (depth or {}))
    if index.get("image_encoder", [None])[0]:
        for part, content in (("image_encoder/config.json", CLIP_H), ("image_processor/preprocessor_config.json", {})):
            (into / part).parent.mkdir()
            (into / part).write_text(json.dumps(content))
    return into


def estimate(config: Config, into: Path) -> Estimate:
    """`plan.estimate` with the true config of the model, from models of 2 and 4 blocks of each kind.

    What a block adds is the same for every block but SD3.5's, so the rest follows; a whole trace takes a minute.
    """
    blocks = depths(config.model)

    def at(**depth: int) -> Estimate:
        place = into / ("-".join(map(str, depth.values())) or "whole")
        return plan.estimate(replace(config, model=str(folder(config.model, place, depth))))

    low = at(**dict.fromkeys(blocks, 2))
    parts, phases = dict(low.parts), dict(low.phases)
    for key, count in blocks.items():
        more = at(**(dict.fromkeys(blocks, 2) | {key: 4}))
        for out, small, large in ((parts, low.parts, more.parts), (phases, low.phases, more.phases)):
            for name in out:
                out[name] += (large[name] - small[name]) * (count - 2) // 2
    return Estimate(parts | {"activations": max(phases.values())}, phases, low.parameters)


def depths(model: str) -> dict[str, int]:
    """The numbers of blocks of the transformer, by their key in its config; none where the blocks differ."""
    file = DATA / MODELS[model][0] / "transformer" / "config.json"
    if not file.is_file() or "sd35m" in file.parts:
        return {}
    config = json.loads(file.read_text())
    defaults = signature(getattr(diffusers, config["_class_name"]).__init__).parameters
    keys = [key for key in ("num_layers", "num_single_layers", "n_layers") if key in defaults]
    return {key: config.get(key, defaults[key].default) for key in keys}


def _change(file: Path, changes: dict) -> None:
    content = json.loads(file.read_text())
    file.chmod(0o644)
    file.write_text(json.dumps(content | changes))
