"""Tiny random checkpoints of the CLIP family's rewards, in their published file formats; equal seeds, equal weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from prefgrpo.rewards.weights import library
from prefgrpo.tiny.pipelines import clip_tokenizer

SIZE = 28
"""Side in pixels of the images given to the encoders."""


def spread(model: nn.Module, seed: int) -> None:
    """Scales the weights so that every part of the model affects the score."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.1)
        if "norm" in name.lower() and name.endswith("weight"):
            weight.data += 1


def architecture(quick_gelu: bool = True, size: int = SIZE) -> dict[str, Any]:
    """open_clip's description of a ViT of two layers, with open_clip's own tokenizer."""
    vision = {"image_size": size, "layers": 2, "width": 32, "head_width": 16, "patch_size": 14}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    return {"embed_dim": 24, "quick_gelu": quick_gelu, "vision_cfg": vision, "text_cfg": text}


def open_clip_folder(folder: Path, quick_gelu: bool = True, size: int = SIZE, seed: int = 0) -> Path:
    """open_clip_config.json and open_clip_pytorch_model.bin as open_clip publishes them, preprocessing of DFN5B."""
    open_clip = library("open_clip", "'prefgrpo[rewards]'")
    folder.mkdir(parents=True, exist_ok=True)
    preprocess: dict[str, Any] = {
        "mean": list(open_clip.OPENAI_DATASET_MEAN),
        "std": list(open_clip.OPENAI_DATASET_STD),
    }
    preprocess |= {"interpolation": "bicubic", "resize_mode": "squash"}
    told = {"model_cfg": architecture(quick_gelu, size), "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(told), encoding="utf-8")
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    spread(model, seed)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def hps_folder(folder: Path) -> Path:
    """HPS_v2.1_compressed.pt, {"state_dict": …}; the config beside it stands in for the name ViT-H-14."""
    open_clip_folder(folder, quick_gelu=False)
    weights = torch.load(folder / "open_clip_pytorch_model.bin", weights_only=True)
    (folder / "open_clip_pytorch_model.bin").unlink()
    torch.save({"epoch": 1, "state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    return folder


def clip_folder(folder: Path, width: int = 24, seed: int = 0) -> Path:
    """A CLIPModel as transformers saves it: config, safetensors, tokenizer, image processor."""
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
    """The aesthetic head's .pth, with the published names and shapes: layers.0, 2, 4, 6, 7."""
    layers = [nn.Linear(768, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64)]
    head = nn.ModuleDict({"layers": nn.Sequential(*layers, nn.Identity(), nn.Linear(64, 16), nn.Linear(16, 1))})
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    torch.save(head.state_dict(), file)
    return file


def _aesthetic(folder: Path) -> dict[str, Any]:
    model = clip_folder(folder, width=768)
    return {"model": str(model), "head": str(aesthetic_head(folder / "sac+logos+ava1-l14-linearMSE.pth"))}


def _clip(folder: Path) -> dict[str, Any]:
    return {"model": str(clip_folder(folder))}


def _laion(folder: Path) -> dict[str, Any]:
    return {"model": str(open_clip_folder(folder, quick_gelu=False))}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "aesthetic": _aesthetic,
    "clip": lambda folder: {"model": str(open_clip_folder(folder)), "architecture": "checkpoint"},
    "clipscore": _clip,
    "hpsv2": lambda folder: {"model": str(hps_folder(folder)), "architecture": "checkpoint"},
    "image_similarity": _clip,
    "pickscore": _clip,
    "subfig_clipT": _laion,
}
"""Reward -> function that fills a folder and returns the options that refer to its files."""


def make(names: str, folder: Path) -> Path:
    """Write checkpoints of rewards, e.g. "clip,aesthetic", into `folder`, each in its own; returns their recipe."""
    logging.disable(logging.WARNING)  # open_clip warns that the weights are random
    try:
        entries = [{"name": name, "options": MAKERS[name]((folder / name).resolve())} for name in names.split(",")]
    finally:
        logging.disable(logging.NOTSET)
    file = folder / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": entries}, sort_keys=False), encoding="utf-8")
    return file
