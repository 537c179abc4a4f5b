"""LTX-Video and LTX-2 text-to-video: packed latents [F'·h·w, C] of 8·(F' − 1) + 1 frames, time = 1000σ, guidance 3.0.

Conditions: T5 states as long as the prompt; for LTX-2, Gemma states after its connectors, for the clip and for its
audio. Frames are 1/25 s (LTX-2: 1/24 s) apart. VAEs that take a timestep decode at 0. LTX-2 denoises clip and audio
together: the audio tokens follow the clip's in one state, and noise and log-probs cover both. Invariant: with `ode`
steps the clips are those of the stock LTXPipeline, or of LTX2Pipeline with plain guidance at one scale for both.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling, text_mask
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.video_vae import decode_clip, latent_frames

FRAME_RATE = 25
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


class LTXVideo(Adapter):
    """LTX-Video text-to-video (with one patch per token, as in all published checkpoints)."""

    pipeline = "LTXPipeline"
    default_frames = 161
    own_lengths = True
    cfg = Cfg()
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION

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
        """(F', rows, columns) of tokens; ValueError unless the number of frames is a multiple of 8, plus 1."""
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


class LTX2(LTXVideo):
    """LTX-2 (2.0, 2.3) text-to-video; rewards see only the clip, so LoRA goes where clip tokens are computed."""

    pipeline = "LTX2Pipeline"
    default_frames = 121
    own_lengths = False
    lora_targets = tuple(f"{name}.{part}" for name in ("attn1", "attn2", "audio_to_video_attn") for part in ATTENTION)
    comfy_names = ((r"^transformer\.", "diffusion_model."),)
    frame_rate: ClassVar[float] = 24.0

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, C] for the clip and prompt_embeds_2 [max_length, C'] for the audio, no padding."""
        embeds, mask, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_length, device=self.device
        )
        clip, sound, _ = self.pipe.connectors(embeds, mask, padding_side=self.pipe.tokenizer.padding_side)
        return Condition(clip[0], prompt_embeds_2=sound[0])

    def condition_shapes(self, max_length: int) -> dict[str, tuple[int, ...]]:
        """Shapes that the connectors return: as wide as Gemma's states (2.0), or as the two streams."""
        config: Any = self.pipe.transformer.config
        wide = config.cross_attention_dim, config.audio_cross_attention_dim
        widths = (config.caption_channels,) * 2 if config.use_prompt_embeddings else wide
        return {"prompt_embeds": (max_length, widths[0]), "prompt_embeds_2": (max_length, widths[1])}

    def sound_tokens(self, sampling: Sampling) -> int:
        """Number of audio tokens of a clip."""
        pipe, frames = self.pipe, self.frames(sampling) or 1
        per_second = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        return round(frames / self.frame_rate * per_second)

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[F'·(height / 32)·(width / 32) + audio tokens, C]: clip and audio tokens are both C wide."""
        return self.tokens(sampling) + self.sound_tokens(sampling), self.pipe.transformer.config.in_channels

    def stock_call(self, prompts: list[str], max_length: int, sampling: Sampling) -> dict[str, Any]:
        """Plain guidance of clip and audio; `latents` are the clip's, and `audio_latents` the audio's."""
        plain = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
        call = super().stock_call(prompts, max_length, sampling) | plain | {f"audio_{k}": v for k, v in plain.items()}
        cross = self.pipe.transformer.config.cross_attn_mod
        return call | {"audio_guidance_scale": sampling.guidance, "use_cross_timestep": cross}

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
        """The clip, without its audio."""
        return super().decode(latents[:, : self.tokens(sampling)], sampling)
