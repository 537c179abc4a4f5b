"""Wan image-to-video: Wan whose input has further channels: latents of a clip that begins with an image, and a mask.

Wan2.1 I2V also shows the frame to a CLIP image encoder; Wan2.2 I2V-A14B has two experts instead, boundary 0.9. A run
fits the frame to the output's size. Invariant: with `ode` steps the clips are those of the stock
WanImageToVideoPipeline under an Euler scheduler.
"""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.video_vae import encode_frame
from prefgrpo.models.wan import Wan
from prefgrpo.models.wan22 import Wan22


class WanI2V(Wan):
    """Wan2.1 I2V 14B (480p, 720p)."""

    pipeline = "WanImageToVideoPipeline"
    most_sources = 1
    needs_source = True
    source_spans_clip = True
    lora_targets = (*Wan.lora_targets, "add_k_proj", "add_v_proj")

    def source_tensors(self, sources: tuple[Image.Image, ...], frames: int | None) -> list[Tensor]:
        """Latents [C, F', h, w] of a clip that begins with the source, and (Wan2.1) what CLIP sees in it, [n, C']."""
        latents = encode_frame(self.pipe, sources[0], frames or self.default_frames)
        if self.pipe.transformer.config.image_dim is None:
            return [latents]
        if self.pipe.image_encoder is None:
            raise RuntimeError("the pipeline was loaded without its image encoder: load it with encoders=True")
        return [latents, self.pipe.encode_image(sources[0], self.device)[0]]

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        if not condition.sources:
            raise ValueError(f"{type(self).__name__} makes a clip from an image: expected one per prompt, got none")
        latents, *image_embeds = condition.sources
        known = torch.zeros_like(x[:, :1]).repeat(1, self.pipe.vae_scale_factor_temporal, 1, 1, 1)
        known[:, :, 0] = 1
        return self.forward(net, torch.cat([x, known, latents.to(x)], dim=1), sigma * 1000, condition, *image_embeds)


class Wan22I2V(Wan22, WanI2V):
    """Wan2.2 I2V-A14B: two experts."""

    pipeline = "WanImageToVideoPipeline"
    default_guidance_2 = 3.5
    lora_targets = Wan.lora_targets
