"""Z-Image: latents [C, h, w], time = 1 − σ, output negated, guidance c + g·(c − u) with g = 3.

Conditions: Qwen3 states (second-to-last layer), as long as the prompt. The transformer takes lists with one entry per
sample. Invariant: with `ode` steps the images are those of the stock ZImagePipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg


class ZImage(Adapter):
    """Z-Image text-to-image."""

    pipeline = "ZImagePipeline"
    attention_masks = "padding"
    cfg = Cfg(from_cond=True)
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")

    @property
    def most_tokens(self) -> int:
        """The shorter side of its rotary embedding."""
        config: Any = self.transformer.config
        return int(min(config.axes_lens[1:]))

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens (chat template included)."""
        (embeds,), _ = self.pipe.encode_prompt(
            [prompt], device=self.device, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return Condition(embeds)

    def attention_tokens(self, sampling: Sampling, max_length: int) -> list[tuple[int, int]]:
        """Text and image, each padded by the denoiser to a multiple of 32 tokens."""
        both = sum(-(-n // 32) * 32 for n in (self.tokens(sampling), max_length))
        return [(both, both)]

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Evenly spaced fp32 sigmas and the shift for this image size."""
        steps = sampling.steps
        return {"sigmas": torch.linspace(1.0, 1.0 / steps, steps).tolist(), "mu": self.mu(sampling)}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, h, w]."""
        images = list(x.unsqueeze(2).unbind())
        texts = list(condition.prompt_embeds.unbind())
        out = net(images, (1000 - sigma * 1000) / 1000, texts, return_dict=False)[0]
        return -torch.stack([one.float() for one in out]).squeeze(2)
