"""LTX-2 text-to-video: packed latents [F'·h·w, C] of 8·(F' − 1) + 1 frames, then those of the audio; time = 1000σ.

Guidance 3.0. Conditions: Gemma states after the connectors, for the clip and for its audio. Frames are 1/24 s apart.
Clip and audio are denoised together: the audio tokens follow the clip's in one state, and noise and log-probs cover
both. Rollouts use plain guidance at one scale for both. Evaluation uses the published sampler, which combines the clean
samples x₀ = x − σv of four branches, separately for clip and audio:

    g = c + (s − 1)(c − u) + (c − p) + 2(c − i),    .7·g·std(c) / std(g) + .3·g

c, u: with the prompt and the negative prompt; p: without the attention of block 28; i: without attention between clip
and audio; s: the guidance scale, for the audio 7. Invariant: with `ode` steps the clips are those of the stock
LTX2Pipeline, in evaluation with its defaults, otherwise with plain guidance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline, rescale_noise_cfg
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_clip
from prefgrpo.models.video import latent_frames

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
PERTURBED = [28]
"""Blocks without self-attention in spatio-temporal guidance (STG): the stock call's default, meant for LTX-2.3."""
STG = 1.0
MODALITY = 3.0
RESCALE = 0.7
AUDIO_GUIDANCE = 7.0


class LTX2(Adapter):
    """LTX-2 (2.0, 2.3), with one patch per token, as in all published checkpoints.

    Rewards see only the clip, so LoRA goes where clip tokens are computed.
    """

    pipeline = "LTX2Pipeline"
    default_frames = 121
    frame_rate = 24.0
    stock_sampler = "spatio-temporal and modality guidance and rescaling"
    with_sound = True
    cfg = Cfg()
    lora_targets = tuple(f"{name}.{part}" for name in ("attn1", "attn2", "audio_to_video_attn") for part in ATTENTION)
    comfy_names = ((r"^transformer\.", "diffusion_model."),)

    @property
    def unit(self) -> int:
        """Pixels per side of one token: 32."""
        return self.pipe.vae_spatial_compression_ratio

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, C] for the clip and prompt_embeds_2 [max_length, C'] for the audio, no padding."""
        embeds, mask, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_length, device=self.device
        )
        clip, sound, _ = self.pipe.connectors(embeds, mask, padding_side=self.pipe.tokenizer.padding_side)
        return Condition(clip[0], prompt_embeds_2=sound[0])

    def volume(self, sampling: Sampling) -> tuple[int, int, int]:
        """(F', rows, columns) of tokens; ValueError unless the number of frames is a multiple of 8, plus 1."""
        return latent_frames(self.frames(sampling), self.pipe.vae_temporal_compression_ratio), *self.grid(sampling)

    def tokens(self, sampling: Sampling) -> int:
        """F'·(height / 32)·(width / 32)."""
        return math.prod(self.volume(sampling))

    def sound_tokens(self, sampling: Sampling) -> int:
        """Number of audio tokens of a clip."""
        pipe = self.pipe
        frames = self.frames(sampling) or 1
        per_second = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        return round(frames / self.frame_rate * per_second)

    def attention_tokens(self, sampling: Sampling, max_length: int) -> list[tuple[int, int]]:
        """The clip's tokens attend to themselves, then to the text (its audio is small)."""
        clip = self.tokens(sampling)
        return [(clip, clip), (clip, max_length)]

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[F'·(height / 32)·(width / 32) + audio tokens, C]: clip and audio tokens are both C wide."""
        return self.tokens(sampling) + self.sound_tokens(sampling), self.pipe.transformer.config.in_channels

    def predict(
        self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling, **branch: Any
    ) -> Tensor:
        """Velocity [B, clip and audio tokens, C]; branch: further arguments of the model."""
        frames, rows, columns = self.volume(sampling)
        parts = x.split([self.tokens(sampling), self.sound_tokens(sampling)], dim=1)
        clip, sound = (part.contiguous() for part in parts)  # or torch multiplies trained weights in another order
        v = net(
            hidden_states=clip,
            audio_hidden_states=sound,
            encoder_hidden_states=condition.prompt_embeds,
            audio_encoder_hidden_states=condition.prompt_embeds_2,
            timestep=sigma * 1000,
            sigma=sigma * 1000,
            num_frames=frames,
            height=rows,
            width=columns,
            fps=self.frame_rate,
            audio_num_frames=sound.shape[1],
            use_cross_timestep=self.pipe.transformer.config.cross_attn_mod,
            return_dict=False,
            **branch,
        )
        return torch.cat(v, dim=1).float()

    def published_velocity(self, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """The velocity of all four branches; with guidance off, as of a distilled model, that of the prompt alone."""
        if not self.guided(sampling):
            return self.velocity(x, sigma, condition, sampling)
        c, u = self.predictions(x, sigma, condition, sampling)
        assert u is not None
        sigma = sigma.to(x.device, non_blocking=True)
        prompt = replace(condition, negative=None).cast(self.dtype)
        inputs = (self.pipe.transformer, x.to(self.dtype), sigma, prompt, sampling)
        perturbed = self.predict(*inputs, spatio_temporal_guidance_blocks=PERTURBED)
        isolated = self.predict(*inputs, isolate_modalities=True)
        counts = [self.tokens(sampling), self.sound_tokens(sampling)]
        branches = zip(*(one.split(counts, dim=1) for one in (c, u, perturbed, isolated)), strict=True)
        parts = zip(x.float().split(counts, dim=1), branches, (sampling.guidance, AUDIO_GUIDANCE), strict=True)
        return torch.cat([_combined(*part, sigma[:, None, None]) for part in parts], dim=1)

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """The clip [B, F, 3, H, W], without its audio: unpack, undo the VAE's normalisation, decode."""
        vae = self.pipe.vae
        clip = latents[:, : self.tokens(sampling)]
        grid = LTX2Pipeline._unpack_latents(clip, *self.volume(sampling), 1, 1)
        grid = LTX2Pipeline._denormalize_latents(grid, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return decode_clip(self.pipe, grid.to(vae.dtype))


def _combined(x: Tensor, branches: tuple[Tensor, ...], scale: float, sigma: Tensor) -> Tensor:
    """Velocity [B, tokens, C] of the clip, or of the audio, from those of its four branches, by the stock call's
    operations in their order; all fp32, sigma: [B, 1, 1]."""
    c, u, perturbed, isolated = (x - v * sigma for v in branches)
    guided = c + (scale - 1) * (c - u) + STG * (c - perturbed) + (MODALITY - 1) * (c - isolated)
    return (x - rescale_noise_cfg(guided, c, RESCALE)) / sigma
