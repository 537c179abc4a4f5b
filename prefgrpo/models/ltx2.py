"""LTX-2 text-to-video: packed latents [F'·h·w, C] of 8·(F' − 1) + 1 frames, then those of the audio; time = 1000σ.

Guidance 3.0. Conditions: Gemma states after the connectors, for the clip and for its audio. Frames are 1/24 s apart.
Clip and audio are denoised together: the audio tokens follow the clip's in one state, and noise and log-probs cover
both. Invariant: with `ode` steps the clips are those of the stock LTX2Pipeline with plain guidance at one scale for
both.
"""

from __future__ import annotations

import math

import torch
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_clip
from prefgrpo.models.video import latent_frames

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


class LTX2(Adapter):
    """LTX-2 (2.0, 2.3), with one patch per token, as in all published checkpoints.

    Rewards see only the clip, so LoRA goes where clip tokens are computed.
    """

    pipeline = "LTX2Pipeline"
    default_frames = 121
    frame_rate = 24.0
    stock_sampler = "spatio-temporal and modality guidance, rescaling"
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

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, clip and audio tokens, C]."""
        frames, rows, columns = self.volume(sampling)
        parts = x.split([self.tokens(sampling), self.sound_tokens(sampling)], dim=1)
        clip, sound = (part.contiguous() for part in parts)  # else torch multiplies trained weights in another order
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
        )
        return torch.cat(v, dim=1).float()

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """The clip [B, F, 3, H, W], without its audio: unpack, undo the VAE's normalisation, decode."""
        vae = self.pipe.vae
        clip = latents[:, : self.tokens(sampling)]
        grid = LTX2Pipeline._unpack_latents(clip, *self.volume(sampling), 1, 1)
        grid = LTX2Pipeline._denormalize_latents(grid, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return decode_clip(self.pipe, grid.to(vae.dtype))
