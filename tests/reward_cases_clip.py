"""Tiny random checkpoints, in their published file formats, of the rewards of the CLIP family.

The formats: a folder with open_clip_config.json and open_clip_pytorch_model.bin (DFN5B), one .pt with {"state_dict"}
(HPS 2.1), a CLIPModel as transformers saves it with tokenizer and image processor (OpenAI's CLIP, PickScore), and the
aesthetic head's .pth.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from reward_case import Case
from reward_cases_own import spread
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from prefgrpo.media import Media
from prefgrpo.rewards.base import Sample
from prefgrpo.tiny.pipelines import clip_tokenizer

SIZE = 28
GRID = 'Two cats, a 1x2 grid. Warm light. [LEFT]: a cat that says "hi." [RIGHT]: another cat sleeps.'


def picture(seed: int, high: int = 40, wide: int = 56) -> Media:
    """A smooth picture, so that resizing keeps what tells it from others."""
    coarse = np.random.default_rng(seed).integers(0, 256, (high // 8, wide // 8, 3), np.uint8)
    return Media(coarse.repeat(8, 0).repeat(8, 1))


def config(quick_gelu: bool = True, size: int = SIZE) -> dict[str, Any]:
    """A ViT of two layers with open_clip's own tokenizer."""
    vision = {"image_size": size, "layers": 2, "width": 32, "head_width": 16, "patch_size": 14}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    return {"embed_dim": 24, "quick_gelu": quick_gelu, "vision_cfg": vision, "text_cfg": text}


def open_clip_folder(folder: Path, quick_gelu: bool = True, size: int = SIZE, seed: int = 0) -> Path:
    """As open_clip's push_to_hub writes it, preprocessing of DFN5B (squash)."""
    folder.mkdir(parents=True)
    architecture = config(quick_gelu, size)
    preprocess = {"mean": list(open_clip.OPENAI_DATASET_MEAN), "std": list(open_clip.OPENAI_DATASET_STD)}
    preprocess |= {"interpolation": "bicubic", "resize_mode": "squash"}
    text = json.dumps({"model_cfg": architecture, "preprocess_cfg": preprocess})
    (folder / "open_clip_config.json").write_text(text)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    spread(model, seed)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def hps_folder(folder: Path) -> Path:
    """HPS_v2.1_compressed.pt; the config beside it stands in for the name ViT-H-14."""
    open_clip_folder(folder, quick_gelu=False)
    weights = torch.load(folder / "open_clip_pytorch_model.bin", weights_only=True)
    (folder / "open_clip_pytorch_model.bin").unlink()
    torch.save({"epoch": 1, "state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    return folder


def clip_folder(folder: Path, width: int = 24, seed: int = 0) -> Path:
    """A CLIPModel folder: config, safetensors, tokenizer, image processor."""
    tokenizer = clip_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = small | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 77}
    vision = small | {"image_size": SIZE, "patch_size": 14}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=width))
    spread(model, seed)
    model.logit_scale.data = torch.tensor(4.6052)
    model.save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


def aesthetic_head(file: Path, seed: int = 0) -> Path:
    """The published names and shapes: layers.0, 2, 4, 6, 7."""
    layers = [nn.Linear(768, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64)]
    head = nn.ModuleDict({"layers": nn.Sequential(*layers, nn.Identity(), nn.Linear(64, 16), nn.Linear(16, 1))})
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    torch.save(head.state_dict(), file)
    return file


def pictures() -> list[Sample]:
    """Two pictures of one prompt, one of another."""
    return [Sample(p, picture(k)) for k, p in enumerate(["a red cat", "a red cat", "two dogs on a hill"])]


def edits() -> list[Sample]:
    """Two edits of one source, one of two sources."""
    source = (picture(8),)
    more = Sample("add both", picture(2), (picture(8), picture(9)))
    return [Sample("add a hat", picture(0), source), Sample("add a hat", picture(1), source), more]


def grids() -> list[Sample]:
    """Two grids, and a prompt without one."""
    return [Sample(GRID, picture(k)) for k in range(2)] + [Sample("a 1920x1080 photo", picture(2))]


def aesthetic_options(folder: Path) -> dict[str, Any]:
    head = aesthetic_head(folder / "sac+logos+ava1-l14-linearMSE.pth")
    return {"model": str(clip_folder(folder / "clip", width=768)), "head": str(head)}


CASES = {
    "aesthetic": Case(aesthetic_options, pictures),
    "clip": Case(lambda folder: {"model": str(open_clip_folder(folder / "dfn5b"))}, pictures),
    "hpsv2": Case(lambda folder: {"model": str(hps_folder(folder / "hps"))}, pictures),
    "pickscore": Case(lambda folder: {"model": str(clip_folder(folder / "pickscore"))}, pictures),
    "clipscore": Case(lambda folder: {"model": str(clip_folder(folder / "clip"))}, pictures),
    "image_similarity": Case(lambda folder: {"model": str(clip_folder(folder / "clip"))}, edits),
    "subfig_clipT": Case(lambda folder: {"model": str(open_clip_folder(folder / "laion", False))}, grids),
    "subfig_clipI": Case(lambda folder: {"model": str(open_clip_folder(folder / "laion", False))}, grids),
}
