"""Wan2.2 TI2V-5B: Wan with one time per token, from text alone or from a first frame.

The frame's tokens have time 0 and hold its latents whatever x is there, and their velocity is 0, which no weight moves;
after the last step they take their place. Invariant: with `ode` steps the clips are those of the stock WanPipeline, or
with a source of the stock WanImageToVideoPipeline, under an Euler scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.video_vae import encode_frame
from prefgrpo.models.wan import Wan


class WanTI2V(Wan):
    """Wan2.2 TI2V-5B."""

    default_frames = 121
    most_sources = 1
    expand_timesteps = True

    def encode_source(self, source: Image.Image) -> Tensor:
        """Latents [C, 1, h, w] of the first frame."""
        return encode_frame(self.pipe, source)

    def stock_edit(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """The folder holds a WanPipeline; from an image, the other pipeline is built of it."""
        return "WanImageToVideoPipeline", {}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        patch = self.patch
        time = (sigma * 1000)[:, None, None, None].repeat(1, x.shape[2], x.shape[3] // patch, x.shape[4] // patch)
        if not condition.sources:
            return self.forward(net, x, time.flatten(1), condition)
        time[:, 0] = 0
        v = self.forward(net, self.final(x, condition), time.flatten(1), condition)
        return torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, 1:]], dim=2)

    def final(self, x: Tensor, condition: Condition) -> Tensor:
        """The first frame's latents in their place."""
        return torch.cat([condition.sources[0].to(x), x[:, :, 1:]], dim=2) if condition.sources else x
