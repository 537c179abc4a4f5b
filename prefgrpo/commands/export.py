"""`prefgrpo export`: a run's LoRA under the names of another program.

ComfyUI reads diffusers' LoRA files of FLUX, Qwen-Image, SD3 and Z-Image as they are; for other families its map of
names has only those of the publisher's own checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file, save

from prefgrpo import models
from prefgrpo.config.loading import load
from prefgrpo.config.recipe import UserError
from prefgrpo.data.atomic import write_atomic


def export(run: Path, out: Path | None = None, format: Literal["comfy"] = "comfy") -> int:
    """Write the LoRA of a run, or of one of its checkpoints, for another program.

    Args:
        run: Run folder, or RUN/checkpoints/step_000020.
        out: Output folder; none: RUN/comfy. A second expert's LoRA becomes a second file.
        format: comfy: safetensors files for ComfyUI's models/loras.
    """
    root = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (root / "config.yaml").is_file() or not (run / "lora").is_dir():
        raise UserError(f"'{run}' has no LoRA: expected the folder of a run with lora/, or one of its checkpoints")
    family = load(root / "config.yaml").family
    names = models.family(family).comfy_names
    if names is None:
        raise UserError(
            f"ComfyUI has no names for LoRAs of {family} in separate q, k and v: use the file with diffusers"
        )
    folder = out or run / format
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((run / "lora").rglob("*.safetensors")):
        second = "" if file.parent == run / "lora" else f"_{file.parent.name}"
        target = folder / f"{root.resolve().name}{second}.safetensors"
        write_atomic(target, save({renamed(key, names): tensor for key, tensor in load_file(file).items()}))
        print(f"wrote {target}")
    return 0


def renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    """`key` after all replacements (pattern, replacement), in order."""
    for pattern, replacement in names:
        key = re.sub(pattern, replacement, key)
    return key
