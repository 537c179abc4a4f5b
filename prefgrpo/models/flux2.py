"""FLUX.2 (dev and klein): patchified latents [4C, h, w] normalised by the VAE's batch-norm statistics, time = σ.

Conditions: concatenated states of three layers of the language model (dev: Mistral 3, klein: Qwen3); for editing also
the sources' latents, appended as tokens with 10, 20, … in the first position channel. Guidance 4.0 is embedded in dev,
classifier-free in klein base, and off in distilled klein. Invariant: with `ode` steps the images are those of the stock
Flux2Pipeline or Flux2KleinPipeline.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline, compute_empirical_mu
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_image, encode
from prefgrpo.models.weights import JOINT_ATTENTION


class Flux2(Adapter):
    """FLUX.2-dev text-to-image and editing."""

    pipeline = "Flux2Pipeline"
    most_sources = 4
    context_parallel = "ring"
    lora_targets = (
        *JOINT_ATTENTION, "attn.to_qkv_mlp_proj",
        "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out",
    )  # fmt: skip

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, 3C]."""
        embeds, _ = self.pipe.encode_prompt(prompt, device=self.device, max_sequence_length=max_length)
        return Condition(embeds[0])

    def encode_source(self, source: Image.Image) -> Tensor:
        """[rows, columns, 4C]: normalised latents of the source at its own size, at most a million pixels."""
        processor = self.pipe.image_processor
        processor.check_image_input(source)
        source = processor._resize_if_exceeds_area(source)
        width, height = (side // self.unit * self.unit for side in source.size)
        pixels = processor.preprocess(source, height=height, width=width, resize_mode="crop")
        return self.latents_of(pixels)[0].permute(1, 2, 0)

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[4C, height / 16, width / 16] where the VAE's scale is 8."""
        return self.pipe.transformer.config.in_channels, *self.grid(sampling)

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Even sigmas and the empirical shift of this image length and number of steps."""
        mu = compute_empirical_mu(image_seq_len=self.tokens(sampling), num_steps=sampling.steps)
        return super().schedule_options(sampling) | {"mu": mu}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, 4C, h, w]; the transformer sees tokens [B, h · w, 4C]."""
        embeds = condition.prompt_embeds
        sources = condition.sources
        tokens = Flux2Pipeline._pack_latents(x)
        ids = _image_ids(*self.grid(sampling), x.device)
        count = tokens.shape[1]
        embedded = self.pipe.transformer.config.guidance_embeds
        guidance = torch.full_like(sigma, sampling.guidance) if embedded else None
        if sources:
            tokens = torch.cat([tokens, *(source.flatten(1, 2).to(x.dtype) for source in sources)], dim=1)
            ids = torch.cat([ids, _source_ids(tuple(source.shape[1:3] for source in sources), x.device)], dim=1)
        v = net(
            hidden_states=tokens,
            timestep=(sigma * 1000).to(x.dtype) / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            txt_ids=_text_ids(embeds.shape[1], x.device).expand(x.shape[0], -1, -1),
            img_ids=ids.expand(x.shape[0], -1, -1),
            return_dict=False,
        )[0][:, :count]
        return v.transpose(1, 2).reshape(x.shape)

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, 4C, h, w]: encode, patchify, apply the batch-norm."""
        latents = Flux2Pipeline._patchify_latents(encode(self.pipe.vae, pixels))
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the VAE's batch-norm, [1, 4C, 1, 1]."""
        vae = self.pipe.vae
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(like)
        return mean, torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(like)

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the batch-norm, unpatchify, decode."""
        mean, std = self._statistics(latents)
        return decode_image(self.pipe, Flux2Pipeline._unpatchify_latents(latents * std + mean))


class Flux2Klein(Flux2):
    """FLUX.2-klein text-to-image and editing, base or distilled."""

    pipeline = "Flux2KleinPipeline"
    cfg = Cfg()

    def guided(self, sampling: Sampling) -> bool:
        """Guidance is off for a step-distilled model, whatever the scale."""
        return super().guided(sampling) and not self.pipe.config.is_distilled


@lru_cache(maxsize=64)
def _image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [1, rows · columns, 4]."""
    grid = torch.empty(1, 1, rows, columns)
    return Flux2Pipeline._prepare_latent_ids(grid).to(device)


@lru_cache(maxsize=64)
def _source_ids(grids: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Position ids [1, total tokens, 4] of source images with these (rows, columns)."""
    return Flux2Pipeline._prepare_image_ids([torch.empty(1, 1, *grid) for grid in grids]).to(device)


@lru_cache(maxsize=64)
def _text_ids(length: int, device: torch.device) -> Tensor:
    """Position ids [1, length, 4]."""
    return Flux2Pipeline._prepare_text_ids(torch.empty(1, length, 1)).to(device)
