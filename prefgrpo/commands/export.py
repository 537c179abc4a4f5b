"""`prefgrpo export`: the weights of a run or of one of its checkpoints, in diffusers' format or under ComfyUI's names.

A checkpoint holds tensors only, so the model is opened to write them: for a LoRA, from mapped files, without reading
its weights. ComfyUI reads diffusers' LoRA files of FLUX, Qwen-Image, SD3 and Z-Image as they are; for other families
its map of names has only those of the publisher's own checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save

from prefgrpo import models
from prefgrpo.config.loading import load
from prefgrpo.config.recipe import UserError
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic, write_folder
from prefgrpo.parallel.parallelize import add_trained_weights
from prefgrpo.parallel.world import World
from prefgrpo.run.loading import load_checkpoint, open_adapter
from prefgrpo.run.run_folder import RunFolder, run_of


def export(
    run: Path,
    out: Path | None = None,
    format: Literal["diffusers", "comfy"] = "diffusers",
    weights: Literal["auto", "live", "ema"] = "auto",
) -> int:
    """Write the trained weights of a run or of one of its checkpoints.

    Args:
        run: Run folder (its newest checkpoint), or RUN/checkpoints/step_000020.
        out: Output folder; none: RUN/exports/step_000020 or RUN/comfy. A second expert's LoRA becomes a second file.
        format: diffusers: a LoRA for load_lora_weights, or the whole pipeline after full fine-tuning; comfy:
            safetensors files for ComfyUI's models/loras.
        weights: Weights of the checkpoint: live, ema, or auto (ema if the run keeps one).
    """
    folder = run_of(run)
    if folder is None:
        raise UserError(f"'{run}' is not a run: expected a folder with config.yaml, or one of its checkpoints")
    config = load(folder.config)
    if format == "comfy":
        return _comfy(folder, run, config, weights, out)
    path = folder.checkpoint_of(run)
    if path is None:
        raise UserError(f"'{run}' has no checkpoint to export")
    target = out or folder.root / "exports" / path.name
    write_folder(target, lambda inside: _write(config, path, weights, inside))
    print(f"wrote {target}")
    return 0


def _write(config: Config, path: Path, weights: str, target: Path) -> None:
    """Write the weights of a checkpoint in diffusers format."""
    if weights == "ema" and not config.train.ema_decay:
        raise UserError(f"{path} has no EMA weights (train.ema_decay is 0); expected --weights live")
    world = World(0, 1, torch.device("cpu"))
    lora = config.train.lora_rank > 0
    adapter = open_adapter(config, world.device, encoders=not lora, split=lora)
    add_trained_weights(adapter, config.train, config.seed)
    if not lora:
        for module in adapter.modules().values():
            module.float()  # a checkpoint holds fp32 masters
    load_checkpoint(adapter, path, config.train.ema_decay > 0 and weights != "live", world)
    if lora:
        adapter.save_lora(str(target))
    else:
        adapter.save_full(str(target))


def _comfy(folder: RunFolder, run: Path, config: Config, weights: str, out: Path | None) -> int:
    """Write LoRA files under ComfyUI's names: those of the finished run, or of a checkpoint."""
    names = models.family(config.family).comfy_names
    if names is None:
        raise UserError(
            f"ComfyUI has no names for LoRAs of {config.family} in separate q, k and v: use the file with diffusers"
        )
    if not config.train.lora_rank:
        raise UserError(f"'{run}' has no LoRA: it trains all weights, which ComfyUI loads as a diffusers pipeline")
    lora = folder.product(lora=True)
    path = folder.checkpoint_of(run)
    target = out or folder.root / "comfy"
    if run.resolve() != folder.root.resolve() or not lora.is_dir():
        if path is None:
            raise UserError(f"'{run}' has no LoRA: expected lora/ in it, or a checkpoint")
        lora = folder.root / "exports" / path.name
        write_folder(lora, lambda inside: _write(config, path, weights, inside))
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(lora.rglob("*.safetensors")):
        second = "" if file.parent == lora else f"_{file.parent.name}"
        copy = target / f"{folder.root.resolve().name}{second}.safetensors"
        write_atomic(copy, save({renamed(key, names): tensor for key, tensor in load_file(file).items()}))
        print(f"wrote {copy}")
    return 0


def renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    """`key` after all replacements (pattern, replacement), in order."""
    for pattern, replacement in names:
        key = re.sub(pattern, replacement, key)
    return key
