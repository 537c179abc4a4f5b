"""FLUX.1 (dev and schnell) and FLUX.1-Kontext: packed 2×2 latents [L, 4C], time = σ, guidance embedded (3.5; 2.5).

Conditions: T5 states and the pooled CLIP vector; for Kontext also the source image's packed latents, appended as tokens
with 1 in the first position channel (generated tokens: 0). Time shift: static or by image length, as the scheduler's
config says. Invariant: with `ode` steps the images are those of the stock FluxPipeline or FluxKontextPipeline.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.weights import JOINT_ATTENTION


class Flux(Adapter):
    """FLUX.1 text-to-image."""

    pipeline = "FluxPipeline"
    packed = True
    context_parallel = "ring"
    lora_targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, C] (T5) and pooled [C] (CLIP)."""
        embeds, pooled, _ = self.pipe.encode_prompt(prompt, device=self.device, max_sequence_length=max_length)
        return Condition(embeds[0], pooled=pooled[0])

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C] of the generated tokens, which those of Kontext's source follow.

        σ is multiplied by 1000, cast and divided by 1000 as in the stock pipeline, to be bitwise equal to it.
        """
        embeds = condition.prompt_embeds
        sources = condition.sources
        ids = [image_ids(*self.grid(sampling), x.device)]
        ids += [_source_ids(*source.shape[1:3], x.device) for source in sources]
        guidance = None
        if self.pipe.transformer.config.guidance_embeds:
            guidance = torch.full_like(sigma, sampling.guidance)
        return net(
            hidden_states=torch.cat([x, *(source.flatten(1, 2).to(x.dtype) for source in sources)], dim=1),
            timestep=(sigma * 1000).to(x.dtype) / 1000,
            guidance=guidance,
            pooled_projections=condition.pooled,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=x.device),
            img_ids=torch.cat(ids),
            return_dict=False,
        )[0][:, : x.shape[1]]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's scale and shift, decode."""
        grid = FluxPipeline._unpack_latents(latents, sampling.height, sampling.width, self.pipe.vae_scale_factor)
        return super().decode(grid, sampling)

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, L, 4C]."""
        grid = super().latents_of(pixels)
        return FluxPipeline._pack_latents(grid, *grid.shape)


class FluxKontext(Flux):
    """FLUX.1-Kontext image editing."""

    pipeline = "FluxKontextPipeline"
    most_sources = 1
    context_parallel = ""  # source tokens, whose number varies, follow the generated ones

    def encode_source(self, source: Image.Image) -> Tensor:
        """[rows, columns, 4C]: the packed latents of the source image at its own size."""
        processor = self.pipe.image_processor
        height, width = processor.get_default_height_width(source)
        rows, columns = height // self.unit, width // self.unit
        height, width = rows * self.unit, columns * self.unit
        pixels = processor.preprocess(processor.resize(source, height, width), height, width)
        return self.latents_of(pixels).view(rows, columns, -1)


@lru_cache(maxsize=64)
def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [rows · columns, 3] fp32."""
    return FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, torch.float32)


@lru_cache(maxsize=64)
def _source_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [rows · columns, 3] with 1 in the first channel."""
    ids = image_ids(rows, columns, device).clone()
    ids[:, 0] = 1
    return ids
