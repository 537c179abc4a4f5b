"""FLUX.1-Kontext (editing): FLUX.1 with the source image's packed latents appended as tokens, guidance 2.5.

Source tokens have 1 in the first position channel, generated tokens 0; only the velocity of generated tokens is kept.
Invariant: with `ode` steps the images are those of the stock FluxKontextPipeline.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.flux import Flux, image_ids


class FluxKontext(Flux):
    """FLUX.1-Kontext image editing."""

    pipeline = "FluxKontextPipeline"
    most_sources = 1
    leaves_sigmas = False
    context_parallel = ""  # source tokens, whose number varies, follow the generated ones

    def encode_source(self, source: Image.Image) -> Tensor:
        """[rows, columns, 4C]: the packed latents of the source image at its own size."""
        processor, vae = self.pipe.image_processor, self.pipe.vae
        height, width = processor.get_default_height_width(source)
        rows, columns = height // self.unit, width // self.unit
        height, width = rows * self.unit, columns * self.unit
        pixels = processor.preprocess(processor.resize(source, height, width), height, width)
        latents = self.pipe._encode_vae_image(pixels.to(vae.device, vae.dtype), generator=None)
        packed = self.pipe._pack_latents(latents, 1, latents.shape[1], 2 * rows, 2 * columns)
        return packed.view(rows, columns, -1)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C] of the generated tokens."""
        ids = image_ids(*self.grid(sampling), x.device)
        if not condition.sources:
            return self.forward(net, x, sigma, condition, sampling, ids)
        (source,) = condition.sources
        ids = torch.cat([ids, _source_ids(*source.shape[1:3], x.device)])
        tokens = torch.cat([x, source.flatten(1, 2).to(x.dtype)], dim=1)
        return self.forward(net, tokens, sigma, condition, sampling, ids)[:, : x.shape[1]]


@lru_cache(maxsize=64)
def _source_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids [rows · columns, 3] with 1 in the first channel."""
    ids = image_ids(rows, columns, device).clone()
    ids[:, 0] = 1
    return ids
