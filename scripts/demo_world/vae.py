"""Train the tiny AutoencoderKL of a world: `python -m scripts.demo_world.vae OUT`, or with `--world text`.

165 k parameters; scenes: 32x32x3 pixels -> 8x8x4 latents (a FluxPipeline packs them to 16 tokens of 16), words:
16x64x3 -> 4x16x8 (16 tokens of 32). Loss: L1 + MSE + 2e-3 KL per pixel, on freshly drawn images of the train split.
Invariant: the saved scaling_factor and shift_factor give latents of mean 0 and std 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import tyro
from diffusers import AutoencoderKL
from torch import Tensor

from scripts.demo_world.training import Schedule, fit, parameter_count
from scripts.demo_world.worlds import WORLDS, World

CHANNELS = (8, 16, 32)  # the full-resolution channels dominate the cost


@dataclass(frozen=True)
class VAEConfig:
    """What to train, and where to save it."""

    out: tyro.conf.Positional[Path]
    """Folder for the trained AutoencoderKL."""
    world: Literal["scenes", "text"] = "scenes"
    """The world whose images it learns (worlds.py)."""
    steps: int = 4000
    """Optimiser steps."""
    batch: int = 32
    """Images per step."""
    lr: float = 4e-3
    """Peak learning rate of AdamW."""
    kl: float = 2e-3
    """Weight of the KL term."""
    seed: int = 0
    """Seed of weights, images and noise."""


def build(world: World) -> AutoencoderKL:
    """The untrained autoencoder."""
    levels = len(CHANNELS)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=CHANNELS,
        layers_per_block=1,
        latent_channels=world.latent_channels,
        norm_num_groups=4,
        sample_size=world.width,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def train_vae(config: VAEConfig) -> AutoencoderKL:
    """Train on train-split images and set the latent scale."""
    torch.manual_seed(config.seed)
    world = WORLDS[config.world]
    vae = build(world).to(memory_format=torch.channels_last)  # 1.3-2.5x faster on CPU
    print(f"vae: {parameter_count(vae)} parameters")

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        x = (world.draw("train", config.batch, None)[0] * 2 - 1).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(x).latent_dist
        recon = vae.decode(posterior.sample()).sample
        mse = F.mse_loss(recon, x)
        kl = posterior.kl().mean() / x[0].numel()
        loss = (recon - x).abs().mean() + mse + config.kl * kl
        return loss, {"mse": mse.item(), "kl": kl.item()}

    schedule = Schedule(config.steps, config.lr, betas=(0.9, 0.999), weight_decay=0.0)
    seconds = fit("vae", [(list(vae.parameters()), 1.0)], step_loss, schedule)
    print(f"vae: {seconds:.0f} CPU seconds")
    vae.to(memory_format=torch.contiguous_format).eval()
    set_latent_scale(vae, world)
    return vae


@torch.no_grad()
def set_latent_scale(vae: AutoencoderKL, world: World, n: int = 2000) -> None:
    """Measure the sampled latents and store shift = mean, scaling = 1 / std in the config."""
    latents = vae.encode(world.draw("train", n, None)[0] * 2 - 1).latent_dist.sample()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def report(vae: AutoencoderKL, world: World, split: str, n: int = 1000) -> str:
    """Reconstruction PSNR and the share of reconstructions that still show the correct codes."""
    images, codes = world.draw(split, n, torch.Generator().manual_seed(1))
    recon = vae.decode(vae.encode(images * 2 - 1).latent_dist.mode()).sample
    recon = (recon / 2 + 0.5).clamp(0, 1)
    psnr = -10 * (recon - images).square().mean((1, 2, 3)).log10()
    correct = world.matches_codes(recon, codes).float()
    return f"vae {split}: PSNR {psnr.mean():.1f} dB, reconstructions read correctly {correct.mean():.3f}"


def train(config: Annotated[VAEConfig, tyro.conf.arg(name="")]) -> None:
    """Train, report and save."""
    vae = train_vae(config)
    for split in ("train", "dev", "test"):
        print(report(vae, WORLDS[config.world], split))
    vae.save_pretrained(config.out)


if __name__ == "__main__":
    tyro.cli(train, description=__doc__)
