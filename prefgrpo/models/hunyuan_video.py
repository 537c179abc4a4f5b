"""HunyuanVideo text-to-video: latents [C, F', h, w] of 4·(F' − 1) + 1 frames, time = 1000σ, guidance embedded (6.0).

Conditions: Llama states as long as the prompt, and the pooled CLIP vector. Invariant: with `ode` steps the clips are
those of the stock HunyuanVideoPipeline (without true guidance).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling, text_mask
from prefgrpo.models.lora import JOINT_ATTENTION
from prefgrpo.models.video_vae import PatchVideo, decode_clip


class HunyuanVideo(PatchVideo):
    """HunyuanVideo text-to-video."""

    pipeline = "HunyuanVideoPipeline"
    default_frames = 129
    own_lengths = True
    lora_targets = JOINT_ATTENTION

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, text_length = n, and pooled [C']."""
        embeds, pooled, mask = self.pipe.encode_prompt(prompt, device=self.device, max_sequence_length=max_length)
        length = mask[0].sum()
        return Condition(embeds[0, :length], text_length=length.cpu(), pooled=pooled[0])

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Even sigmas from 1, before the static shift."""
        return {"sigmas": np.linspace(1.0, 0.0, sampling.steps + 1)[:-1]}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        mask = text_mask(condition)
        return net(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=condition.prompt_embeds[:, : mask.shape[1]],
            encoder_attention_mask=mask.to(x.device, x.dtype, non_blocking=True),
            pooled_projections=condition.pooled,
            guidance=torch.full_like(sigma, sampling.guidance) * 1000.0,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the VAE's scale, decode to [B, F, 3, H, W]."""
        return decode_clip(self.pipe, latents.to(self.pipe.vae.dtype) / self.pipe.vae.config.scaling_factor)
