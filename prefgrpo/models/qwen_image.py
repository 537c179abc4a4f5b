"""Qwen-Image, -Edit and -Edit-Plus (2509, 2511): packed 2×2 latents [L, 4C], time = σ, true guidance 4.0 rescaled to
the conditional prediction's norm.

Conditions: states of the Qwen2.5-VL language model, as long as the prompt. Sources of an edit go through the language
model together with the prompt, and their packed latents follow the generated tokens. As in the stock pipelines, each is
resized to about a million pixels (384² for the language model of -Plus), at any output size. Invariant: with `ode`
steps the images are those of the stock pipeline with negative prompt " ".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_image, encode, latent_statistics, unnormalise
from prefgrpo.models.weights import JOINT_ATTENTION


class QwenImage(Adapter):
    """Qwen-Image text-to-image."""

    pipeline = "QwenImagePipeline"
    packed = True
    attention_masks = "padding"
    context_parallel = "ulysses"
    cfg = Cfg(rescale=True, negative=" ")
    lora_targets = JOINT_ATTENTION

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens."""
        return self.embed(prompt, max_sequence_length=max_length)

    def embed(self, prompt: str, **options: Any) -> Condition:
        """Call the pipeline's own `encode_prompt` with one prompt."""
        embeds, _ = self.pipe.encode_prompt(prompt=[prompt], device=self.device, **options)
        return Condition(embeds[0])

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C] of the generated tokens, which those of the sources follow.

        A mask is passed only if context parallelism pads the text.
        """
        embeds = condition.prompt_embeds
        count, length = embeds.shape[:2]
        sources = condition.sources
        grids = [self.grid(sampling), *((source.shape[1], source.shape[2]) for source in sources)]
        mask = None
        if missing := -length % self.text_multiple:
            embeds = nn.functional.pad(embeds, (0, 0, 0, missing))
            mask = (torch.arange(length + missing, device=embeds.device) < length).expand(count, -1)
        return net(
            hidden_states=torch.cat([x, *(source.flatten(1, 2).to(x.dtype) for source in sources)], dim=1),
            timestep=(sigma * 1000).to(x.dtype) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *grid) for grid in grids]] * count,
            return_dict=False,
        )[0][:, : x.shape[1]]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode a clip of one frame."""
        grid = QwenImagePipeline._unpack_latents(latents, sampling.height, sampling.width, self.pipe.vae_scale_factor)
        return decode_image(self.pipe, unnormalise(self.pipe.vae, grid))

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, L, 4C], of a clip of one frame."""
        latents = encode(self.pipe.vae, pixels.unsqueeze(2))
        mean, std = latent_statistics(self.pipe.vae, latents)
        grid = ((latents - mean) / std)[:, :, 0]  # Wan's pipelines multiply by 1 / std, which rounds differently
        return QwenImagePipeline._pack_latents(grid, *grid.shape)


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

    def encode_edit(self, prompt: str, max_length: int, sources: tuple[Image.Image, ...]) -> Condition:
        """prompt_embeds [n, C], image tokens included; nothing is truncated."""
        if not sources:
            raise ValueError(f"{type(self).__name__} edits images: expected a source image for the prompt {prompt!r}")
        return self.embed(prompt, image=[self._resized(image, self.seen_area) for image in sources])

    def encode_source(self, source: Image.Image) -> Tensor:
        """[rows, columns, 4C]: the packed latents of the source."""
        image = self._resized(source)
        pixels = self.pipe.image_processor.preprocess(image, image.height, image.width)
        return self.latents_of(pixels).view(image.height // self.unit, image.width // self.unit, -1)

    def _resized(self, image: Image.Image, most: float = math.inf) -> Image.Image:
        """The image resized to about `source_area` pixels (at most `most`), its sides multiples of 32."""
        assert self.source_area is not None
        width, height = calculate_dimensions(min(self.source_area, most), image.width / image.height)
        return self.pipe.image_processor.resize(image, height, width)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus (2509, 2511): several source images, called "Picture 1", "Picture 2", … in the prompt."""

    pipeline = "QwenImageEditPlusPipeline"
    most_sources = 3
    seen_area = 384 * 384
