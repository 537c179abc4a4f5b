"""Wan2.1 text-to-video: latents [C, F', h, w] of 4·(F' − 1) + 1 frames, time = 1000σ, guidance 5.0.

Conditions: UMT5 states, zero-padded. The published folders come with a multistep solver; only its shift is used.
Invariant: with `ode` steps the clips are those of the stock WanPipeline under an Euler scheduler of that shift.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.video_vae import PatchVideo, decode_clip, unnormalise


class Wan(PatchVideo):
    """Wan2.1 T2V, 1.3B and 14B."""

    pipeline = "WanPipeline"
    default_frames = 81
    context_parallel = "ring"
    cfg = Cfg()
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")

    expand_timesteps: ClassVar[bool] = False
    """Whether every token has a time of its own."""

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """Also by what the folder says of times."""
        expand = bool(index.get("expand_timesteps"))
        odd = f"has expand_timesteps {expand}, {cls.__name__} has {cls.expand_timesteps}"
        return super().unsupported_index(index) if expand is cls.expand_timesteps else odd

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, C]."""
        embeds, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_length, device=self.device
        )
        return Condition(embeds[0])

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The scheduler's own sigmas."""
        return {}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        return self.forward(net, x, sigma * 1000, condition)

    def forward(
        self, net: nn.Module, x: Tensor, time: Tensor, condition: Condition, image_embeds: Tensor | None = None
    ) -> Tensor:
        """The transformer at time [B], or [B, tokens]."""
        return net(
            hidden_states=x,
            timestep=time,
            encoder_hidden_states=condition.prompt_embeds,
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )[0]

    def sequence(self, sampling: Sampling) -> int:
        """Tokens of all latent frames."""
        return self.tokens(sampling) * self.latent_shape(sampling)[1]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the VAE's normalisation, decode to [B, F, 3, H, W]."""
        return decode_clip(self.pipe, unnormalise(self.pipe.vae, latents))
