"""How long a training step of a recipe takes, estimated from the FLOP of its denoiser at its true size.

    seconds = FLOP of the step's forwards and backwards / (GPUs × rate)   + decoding

FLOP are counted on a denoiser without memory (torch's formulas; attention's backward is 2.5 forwards), rates are those
that FLUX.1-dev reached on one H100 (docs/scale.md). Not counted: texts, rewards, judges that answer after the rollout,
communication. `python -m benchmarks.step_time scripts/prefgrpo/lora_wan_480p_small.yaml --gpus 8`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch.utils.flop_counter import FlopCounterMode

from prefgrpo.config.loading import load
from prefgrpo.config.schema import Config
from prefgrpo.models import family

ROLLOUT = 358e12
UPDATE = 329e12
"""FLOP per second and GPU, measured."""
DECODE_S = 4.4
"""Seconds per clip of 480×832×81 in the VAE, at most, measured on the same GPU; other sizes by their pixels."""
PIXELS = 480 * 832 * 81
BACKWARD = {"linear": 1.0, "attention": 2.5}
"""FLOP of a backward by those of the forward: of frozen weights, only for their inputs."""


def wan(config: Config) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The 14B denoiser of Wan2.1, and the inputs of a forward of one clip."""
    r = config.rollout
    frames = ((r.frames or 81) - 1) // 4 + 1
    x = torch.zeros(1, 16, frames, r.height // 8, r.width // 8)
    text = torch.zeros(1, config.data.max_length, 4096)
    inputs = {"hidden_states": x, "timestep": torch.zeros(1), "encoder_hidden_states": text}
    return diffusers.WanTransformer3DModel(), inputs


def flux(config: Config) -> tuple[torch.nn.Module, dict[str, Any]]:
    """FLUX.1-dev, and the inputs of a forward of one image."""
    tokens = config.rollout.height // 16 * (config.rollout.width // 16)
    length = config.data.max_length
    shapes = {
        "hidden_states": (1, tokens, 64), "encoder_hidden_states": (1, length, 4096), "pooled_projections": (1, 768),
        "timestep": (1,), "guidance": (1,), "img_ids": (tokens, 3), "txt_ids": (length, 3),
    }  # fmt: skip
    inputs = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return diffusers.FluxTransformer2DModel(guidance_embeds=True), inputs


DENOISERS: dict[str, Callable[[Config], tuple[torch.nn.Module, dict[str, Any]]]] = {"wan": wan, "flux": flux}


def forward_flop(config: Config) -> tuple[float, float]:
    """FLOP of a forward of one sample: (all but attention, attention)."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        net, inputs = DENOISERS[config.family](config)
        net(**inputs)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))  # without a device it is two products
    return float(sum(counts.values()) - attention), float(attention)


def step_seconds(config: Config, gpus: int) -> dict[str, float]:
    """Seconds of the parts of a step."""
    r = config.rollout
    t = config.train
    linear, attention = forward_flop(config)
    forward = linear + attention
    cfg = family(config.family).cfg
    forwards = r.steps * (2 if cfg is not None and cfg.active(r.guidance) else 1)
    trained = r.window_size or (r.window_high or r.steps - 1) - r.window_low
    back = linear * BACKWARD["linear"] + attention * BACKWARD["attention"]
    of_update = forward * (1 + t.gradient_checkpointing + (t.kl_coef > 0)) + back
    samples = r.prompts_per_step * r.group_size / gpus
    clip = DECODE_S * r.height * r.width * (r.frames or 0) / PIXELS
    return {
        "denoising": samples * forwards * forward / ROLLOUT,
        "decoding": samples * clip,
        "update": samples * forwards * trained / r.steps * of_update / UPDATE,
    }


def main() -> None:
    """Print the parts in minutes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="+")
    parser.add_argument("--gpus", type=int, default=8)
    given = parser.parse_args()
    for recipe in given.recipe:
        config = load(recipe)
        parts = step_seconds(config, given.gpus)
        listed = " + ".join(f"{name} {seconds / 60:.1f}" for name, seconds in parts.items())
        print(f"{config.name} on {given.gpus} GPUs: {listed} = {sum(parts.values()) / 60:.0f} min per step")


if __name__ == "__main__":
    main()
