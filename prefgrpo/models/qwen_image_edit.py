"""Qwen-Image-Edit (one source image) and -Edit-Plus (2509, 2511: several): Qwen-Image with two inputs for each source.

Sources go through the language model together with the prompt, and their packed latents follow the generated tokens.
As in the stock pipelines, each source is resized to about a million pixels (384² for the language model of -Plus),
at any output size. Invariant: with `ode` steps the images are those of the stock pipeline with negative prompt " ".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.qwen_image import QwenImage


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: one source image."""

    pipeline = "QwenImageEditPipeline"
    most_sources = 1
    needs_source = True
    text_sees_sources = True
    context_parallel = ""  # source tokens, whose number varies, follow the generated ones
    default_source_area = 1024 * 1024
    seen_area: ClassVar[int] = 1024 * 1024
    """Number of pixels of a source passed to the language model's image processor, unless `source_area` is less."""

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(pipe, **options)
        if self.source_area is not None and self.source_area < 32 * 32:
            raise ValueError(f"source_area: expected at least {32 * 32} pixels, got {self.source_area}")

    def encode_edit(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...]) -> Condition:
        """prompt_embeds [n, C], image tokens included, and text_length = n; nothing is truncated."""
        if not sources:
            raise ValueError(f"{type(self).__name__} edits images: expected a source image for the prompt {prompt!r}")
        return self.embed(prompt, image=[self._resized(image, self.seen_area) for image in sources])

    def encode_source(self, source: Image.Image) -> Tensor:
        """[rows, columns, 4C]: the packed latents of the source."""
        vae, image = self.pipe.vae, self._resized(source)
        pixels = self.pipe.image_processor.preprocess(image, image.height, image.width).unsqueeze(2)
        latents = self.pipe._encode_vae_image(pixels.to(vae.device, vae.dtype), generator=None)
        _, channels, _, height, width = latents.shape
        packed = self.pipe._pack_latents(latents, 1, channels, height, width)
        return packed.view(height // 2, width // 2, -1)

    def _resized(self, image: Image.Image, most: float = math.inf) -> Image.Image:
        """The image resized to about `source_area` pixels (at most `most`), its sides multiples of 32."""
        assert self.source_area is not None
        width, height = calculate_dimensions(min(self.source_area, most), image.width / image.height)
        return self.pipe.image_processor.resize(image, height, width)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C] of the generated tokens."""
        sources = condition.sources
        tokens = torch.cat([x, *(source.flatten(1, 2).to(x.dtype) for source in sources)], dim=1)
        grids = [self.grid(sampling), *((source.shape[1], source.shape[2]) for source in sources)]
        return self.forward(net, tokens, sigma, condition, grids)[:, : x.shape[1]]


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus (2509, 2511): several source images, called "Picture 1", "Picture 2", … in the prompt."""

    pipeline = "QwenImageEditPlusPipeline"
    most_sources = 3
    seen_area = 384 * 384
