"""Stable Diffusion 3 and 3.5: latents [C, h, w], time = 1000σ, classifier-free guidance 4.5.

Conditions: CLIP-L, CLIP-G and T5 states in one sequence, and both pooled vectors. Invariant: with `ode` steps the
images are those of the stock StableDiffusion3Pipeline (without skip-layer guidance).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.lora import JOINT_ATTENTION


class StableDiffusion3(Adapter):
    """SD3 / SD3.5 text-to-image."""

    pipeline = "StableDiffusion3Pipeline"
    cfg = Cfg()
    lora_targets = JOINT_ATTENTION

    @property
    def unit(self) -> int:
        """Pixels per side of one transformer patch: 16 for SD3.5."""
        return self.pipe.vae_scale_factor * self.pipe.patch_size

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [77 + max_length, C] and pooled [C']; max_length: T5 tokens."""
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt,
            prompt,
            prompt,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_length,
        )
        return Condition(embeds[0], pooled=pooled[0])

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The scheduler's own sigmas; if it shifts dynamically, the shift for this image size."""
        dynamic = self.pipe.scheduler.config.get("use_dynamic_shifting")
        return {"mu": self.mu(sampling)} if dynamic else {}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, h, w]."""
        return net(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=condition.prompt_embeds,
            pooled_projections=condition.pooled,
            return_dict=False,
        )[0]
