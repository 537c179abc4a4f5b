"""What the recipes of scripts/prefgrpo keep in GPU memory at the published size, and how busy all recipes keep GPUs.

    python -m benchmarks.recipes          # docs/recipes.md summarises this table
    python -m benchmarks.recipes 64       # docs/recipes.md has this one: all recipes on 64 GPUs
    python -m benchmarks.recipes ran      # and this one: what of each recipe has run

Counted from recipes and published sizes: no model is loaded. Stored: latents from the rollout to the update, per GPU.
Weights: the denoisers in bf16 with a LoRA, and with optimiser in full fine-tuning. Busy: share of the GPUs' time in
which they have a batch, in rollout and update.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from prefgrpo.config.loading import load
from prefgrpo.config.schema import Config
from prefgrpo.models import family
from prefgrpo.parallel.world import Layout
from prefgrpo.rollout.assignment import assign_batches, busy_prompts, busy_share
from prefgrpo.update.memory import GIB, stored_bytes

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
GPUS = {"lora_flowgrpo_ocr_sd3_1gpu": 1, "lora_flowgrpo_pickscore_sd3_4gpu": 4, "full_dancegrpo_flux": 16}
"""Number of GPUs of the runs whose recipe's first lines name another than 8."""

GPU = "H100 80GB, 2026-11-27, 6c6f4560"
"""The GPU, day and commit of the runs that the next two name (scripts/gpu_check.sh)."""
STEP_ON_GPU = ("prefgrpo/lora_flux",)
"""Recipes of which it ran a step at the published size, with random weights."""
NEVER_ON_GPU = ("flux3", "krea2")
"""Families of which it ran no tiny model."""
TRAINED: tuple[str, ...] = ()
"""Recipes that were trained to a curve with published weights."""


class Published(NamedTuple):
    """Sizes of a published model."""

    billions: float
    """Parameters of all denoisers."""
    channels: int = 16
    """Channels of the latents."""
    space: int = 8
    """Pixels per side of a latent."""
    time: int = 4
    """Frames per latent frame, beyond the first."""

    def latent_shape(self, config: Config) -> tuple[int, ...]:
        """Shape of a sample's latents, unpacked, without LTX-2's audio (2 % of a clip)."""
        r = config.rollout
        frames = r.frames or family(config.family).default_frames or 1
        return self.channels, (frames - 1) // self.time + 1, r.height // self.space, r.width // self.space


MODELS = {
    "black-forest-labs/FLUX.1-dev": Published(11.9),
    "black-forest-labs/FLUX.1-Kontext-dev": Published(11.9),
    "black-forest-labs/FLUX.2-dev": Published(32.0, channels=32),
    "black-forest-labs/FLUX.2-klein-base-9B": Published(9.1, channels=32),
    "black-forest-labs/flux-3-image-klein-base": Published(5.54, channels=32),
    "stabilityai/stable-diffusion-3.5-medium": Published(2.24),
    "Tongyi-MAI/Z-Image": Published(6.15),
    "krea/Krea-2-Raw": Published(12.8),
    "Qwen/Qwen-Image": Published(20.4),
    "Qwen/Qwen-Image-Edit": Published(20.4),
    "Qwen/Qwen-Image-Edit-2509": Published(20.4),
    "Qwen/Qwen-Image-2.1": Published(7.0),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published(1.42),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published(14.3),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published(16.4),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published(28.6),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(28.6),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published(5.0, channels=48, space=16),
    "hunyuanvideo-community/HunyuanVideo": Published(12.8),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Published(8.3, channels=32, space=16),
    "Lightricks/LTX-2": Published(19.0, channels=128, space=32, time=8),
}


class Row(NamedTuple):
    """A recipe on its number of GPUs."""

    gpus: int
    stored: int
    """Bytes per GPU."""
    weights: int
    """Bytes per GPU."""
    busy: float


def count(config: Config, gpus: int) -> Row:
    """The row of a recipe for a published model."""
    model = MODELS[config.model]
    layout = Layout.of(config, gpus)
    stored = stored_bytes(config, model.latent_shape(config), layout, gpus)
    each = 2 if config.train.lora_rank else 16
    weights = int(model.billions * 1e9 * each) // layout.weight_shards
    return Row(gpus, stored, weights, busy_share(config, gpus // layout.context))


def busy_table(gpus: int) -> list[str]:
    """The lines of a table of all recipes on this number of GPUs; those of a folder with equal numbers share one."""
    rows = defaultdict[tuple[str, ...], list[str]](list)
    for file in sorted(SCRIPTS.glob("*/*.yaml")):
        if not file.stem.startswith(("lora_", "full_")):
            continue
        config = load(file)
        shares = gpus // Layout.of(config, gpus).context
        batches = Counter(batch.update for batch in assign_batches(config))
        per_update = " or ".join(str(count) for count in sorted(set(batches.values())))
        busy = f"{busy_share(config, shares):.0%}"
        r = config.rollout
        numbers = (str(r.prompts_per_step), per_update, str(shares), busy, str(busy_prompts(config, shares)))
        rows[(file.parent.name, *numbers)].append(f"`{file.stem}`")
    return [
        "| folder | recipes | prompts per step | batches per update | shares | busy | prompts that keep them busy |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(f"| {key[0]} | {', '.join(names)} | {' | '.join(key[1:])} |" for key, names in rows.items()),
    ]


def ran_table() -> list[str]:
    """The lines of a table of what has run: each recipe is in the first row that it fits."""
    rows: dict[str, list[str]] = {
        "trained to a curve, with published weights": [],
        f"a step at its published size, with random weights, on a GPU ({GPU})": [],
        f"tiny: the recipe on a CPU, its family on a GPU ({GPU})": [],
        "tiny: the recipe on a CPU": [],
    }
    for file in sorted(SCRIPTS.glob("*/*.yaml")):
        if not file.stem.startswith(("lora_", "full_")):
            continue
        name = f"{file.parent.name}/{file.stem}"
        on_gpu = load(file).family not in NEVER_ON_GPU
        seen = (name in TRAINED, name in STEP_ON_GPU, on_gpu, True)
        list(rows.values())[seen.index(True)].append(f"`{name}`")
    most = max(rows.values(), key=len)
    lines = ["| what has run | recipes |", "|---|---|"]
    for what, names in rows.items():
        listed = ", ".join(names) or "none"
        lines.append(f"| {what} | {'all others' if names is most else listed} |")
    return lines


def main(argv: list[str]) -> None:
    """Print the table of one machine, of a number of GPUs, or of what has run."""
    if argv == ["ran"]:
        print(*ran_table(), sep="\n")
        return
    if argv:
        print(*busy_table(int(argv[0])), sep="\n")
        return
    print("| recipe | GPUs | stored, GiB | weights, GiB | busy |")
    print("|---|---:|---:|---:|---:|")
    for file in sorted((SCRIPTS / "prefgrpo").glob("lora_*.yaml")):
        config = load(file)
        if config.model in MODELS:
            row = count(config, GPUS.get(config.name, 8))
            sizes = f"{row.stored / GIB:.2f} | {row.weights / GIB:.1f}"
            print(f"| `{file.stem}` | {row.gpus} | {sizes} | {row.busy:.0%} |")


if __name__ == "__main__":
    main(sys.argv[1:])
