"""LTX-Video text-to-video: packed latents [F'·h·w, C] of 8·(F' − 1) + 1 frames, time = 1000σ, guidance 3.0.

Conditions: T5 states as long as the prompt. Frames are 1/25 s apart. VAEs that take a time decode at time 0. Invariant:
with `ode` steps the clips are those of the stock LTXPipeline.
"""

from __future__ import annotations

import math

import torch
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling, text_mask
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.video_vae import decode_clip, latent_frames

FRAME_RATE = 25


class LTXVideo(Adapter):
    """LTX-Video text-to-video (one patch per token, as all published checkpoints have it)."""

    pipeline = "LTXPipeline"
    default_frames = 161
    own_lengths = True
    cfg = Cfg()
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    @property
    def unit(self) -> int:
        """Pixels per side of one token: 32."""
        return self.pipe.vae_spatial_compression_ratio

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, and text_length = n."""
        embeds, mask, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_length, device=self.device
        )
        length = mask[0].sum().cpu()
        return Condition(embeds[0, :length], text_length=length)

    def volume(self, sampling: Sampling) -> tuple[int, int, int]:
        """(F', rows, columns) of tokens; ValueError unless frames are a multiple of 8, plus 1."""
        return latent_frames(self.frames(sampling), self.pipe.vae_temporal_compression_ratio), *self.grid(sampling)

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[F'·(height / 32)·(width / 32), C]."""
        return self.tokens(sampling), self.pipe.transformer.config.in_channels

    def tokens(self, sampling: Sampling) -> int:
        """F'·(height / 32)·(width / 32)."""
        return math.prod(self.volume(sampling))

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, F'·h·w, C]."""
        mask, (frames, rows, columns) = text_mask(condition), self.volume(sampling)
        side = self.pipe.vae_spatial_compression_ratio
        return net(
            hidden_states=x,
            encoder_hidden_states=condition.prompt_embeds[:, : mask.shape[1]],
            timestep=sigma * 1000,
            encoder_attention_mask=mask.to(x.device, non_blocking=True),
            num_frames=frames,
            height=rows,
            width=columns,
            rope_interpolation_scale=(self.pipe.vae_temporal_compression_ratio / FRAME_RATE, side, side),
            return_dict=False,
        )[0].float()

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode to [B, F, 3, H, W]."""
        vae = self.pipe.vae
        grid = LTXPipeline._unpack_latents(latents, *self.volume(sampling), 1, 1)
        grid = LTXPipeline._denormalize_latents(grid, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        time = torch.zeros(len(grid)).to(grid) if vae.config.timestep_conditioning else None
        return decode_clip(self.pipe, grid.to(vae.dtype), time)
