"""`prefgrpo export`: the weights of a run or of one of its checkpoints, in diffusers' format or under ComfyUI's names.

A checkpoint has its LoRA in diffusers' format; of fully trained weights it contains only tensors, so the model is
loaded to write them. ComfyUI reads diffusers' LoRA files of FLUX, Qwen-Image, SD3 and Z-Image as they are; for other
families its map of names has only those of the publisher's own checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree
from typing import Literal

from prefgrpo.config.loading import load
from prefgrpo.config.recipe import UserError
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic, write_folder
from prefgrpo.run.folder import PRODUCTS, run_of


def export(
    run: Path,
    out: Path | None = None,
    format: Literal["diffusers", "comfy"] = "diffusers",
) -> int:
    """Write the trained weights of a run or of one of its checkpoints: their EMA, if the run keeps one.

    Args:
        run: Run folder (its newest checkpoint), or RUN/checkpoints/step_000020.
        out: Output folder, with --format diffusers a new or empty one, or a file NAME.safetensors for a LoRA; none:
            RUN/exports/step_000020 or RUN/comfy. A second expert's LoRA becomes a second file.
        format: diffusers: a LoRA for load_lora_weights, or the whole pipeline after full fine-tuning; comfy:
            safetensors files for ComfyUI's models/loras.
    """
    folder = run_of(run)
    if folder is None:
        raise UserError(f"'{run}' is not a run: expected a folder with config.yaml, or one of its checkpoints")
    from prefgrpo import models

    config = load(folder.config)
    names = models.family(config.family).comfy_names
    comfy = format == "comfy"
    if comfy and names is None:
        reason = f"ComfyUI has no names for LoRAs of {config.family} in separate q, k and v"
        raise UserError(f"{reason}: use the file with diffusers")
    as_file = comfy or (out is not None and out.suffix == ".safetensors")
    if as_file and not config.train.lora_rank:
        raise UserError(f"'{run}' has no LoRA for a single file: it trains all weights; export them into a folder")
    if not as_file and out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out: {out} exists; expected a new or an empty folder, as its content would be replaced")
    source = folder.product(lora=True)
    name = folder.root.resolve().name
    if not comfy or folder.latest() or not source.is_dir():  # a run without checkpoints has its final LoRA
        path = folder.checkpoint_of(run)
        name = f"{name}_{path.name}"
        source = folder.exported(path) if as_file or out is None else out
        write_folder(source, lambda inside: _write(config, path, inside))
        print(f"wrote {source}")
    if as_file:
        target = out or folder.comfy
        target = target if target.suffix == ".safetensors" else target / f"{name}.safetensors"
        _write_files(source, target, (names or ()) if comfy else ())
    return 0


def _write(config: Config, path: Path, target: Path) -> None:
    """Write a checkpoint's LoRA, or the pipeline with its weights."""
    if config.train.lora_rank:
        copytree(path / PRODUCTS[0], target, dirs_exist_ok=True)
        return
    import torch

    from prefgrpo.parallel.world import World
    from prefgrpo.run.opening import load_checkpoint, open_adapter

    world = World(0, 1, torch.device("cpu"))
    adapter = open_adapter(config, world.device)
    adapter.enable_full()
    for module in adapter.modules().values():
        module.float()  # a checkpoint holds fp32 masters
    load_checkpoint(adapter, path, config.train.ema_decay > 0, world)
    adapter.save_full(str(target))


def _write_files(lora: Path, target: Path, names: tuple[tuple[str, str], ...]) -> None:
    """Write a LoRA as single files, under other names."""
    from safetensors.torch import load_file, save

    target.parent.mkdir(parents=True, exist_ok=True)
    for file in sorted(lora.rglob("*.safetensors")):
        second = "" if file.parent == lora else f"_{file.parent.name}"
        copy = target.with_stem(target.stem + second)
        write_atomic(copy, save({renamed(key, names): tensor for key, tensor in load_file(file).items()}))
        print(f"wrote {copy}")


def renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    """`key` after all replacements (pattern, replacement), in order."""
    for pattern, replacement in names:
        key = re.sub(pattern, replacement, key)
    return key
