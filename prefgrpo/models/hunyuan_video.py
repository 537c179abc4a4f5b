"""HunyuanVideo and HunyuanVideo-1.5 text-to-video: latents [C, F', h, w] of 4·(F' − 1) + 1 frames, time = 1000σ.

Conditions: Llama states as long as the prompt, and the pooled CLIP vector; for 1.5, Qwen2.5-VL states, and ByT5 states
of text quoted in the prompt. Guidance 6.0 is embedded, in 1.5 classifier-free. Invariant: with `ode` steps the clips
are those of the stock HunyuanVideoPipeline (without true guidance) or HunyuanVideo15Pipeline (a guider of this scale).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Masks, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_clip, encode
from prefgrpo.models.video import PatchVideo
from prefgrpo.models.weights import JOINT_ATTENTION


class HunyuanVideo(PatchVideo):
    """HunyuanVideo text-to-video."""

    pipeline = "HunyuanVideoPipeline"
    default_frames = 129
    frame_rate = 24.0
    attention_masks: ClassVar[Masks] = "padding"
    lora_targets = JOINT_ATTENTION
    comfy_names = None

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(pipe, **options)
        net: Any = self.transformer
        if self.attention_masks == "padding":
            for block in [*net.transformer_blocks, *net.single_transformer_blocks]:
                block.register_forward_pre_hook(self._without_mask)

    def _without_mask(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A block's arguments without the mask (the fourth), which diffusers always makes and no text needs."""
        return (*args[:3], None, *args[4:])

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, and pooled [C']."""
        embeds, pooled, mask = self.pipe.encode_prompt(prompt, device=self.device, max_sequence_length=max_length)
        return Condition(embeds[0, : mask[0].sum()], pooled=pooled[0])

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """Even sigmas from 1, before the static shift."""
        return {"sigmas": np.linspace(1.0, 0.0, sampling.steps + 1)[:-1]}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        text = condition.prompt_embeds
        return net(
            hidden_states=x,
            timestep=(sigma * 1000).to(x.dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=x.new_ones(text.shape[:2]),
            pooled_projections=condition.pooled,
            guidance=torch.full_like(sigma, sampling.guidance, dtype=x.dtype) * 1000.0,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the VAE's scale, decode to [B, F, 3, H, W]."""
        return decode_clip(self.pipe, latents.to(self.pipe.vae.dtype) / self.pipe.vae.config.scaling_factor)

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, C, F', h, w]."""
        return encode(self.pipe.vae, pixels) * self.pipe.vae.config.scaling_factor


class HunyuanVideo15(HunyuanVideo):
    """HunyuanVideo-1.5 text-to-video, 480p or 720p."""

    pipeline = "HunyuanVideo15Pipeline"
    default_frames = 121
    attention_masks = "always"  # its attention needs one
    cfg = Cfg()

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, and prompt_embeds_2 [n', C'] of quoted text."""
        self.pipe.tokenizer_max_length = max_length
        embeds, mask, glyphs, glyph_mask = self.pipe.encode_prompt(prompt, device=self.device)
        length, count = (int(each.float().sum()) for each in (mask, glyph_mask))  # bf16 counts to 256 only
        return Condition(embeds[0, :length], prompt_embeds_2=glyphs[0, :count])

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]; there is no first frame: its latents and mask are 0, its image tokens left out.

        The stock pipeline instead masks the texts' padding and 729 empty image tokens, which are absent here.
        """
        first = condition.prompt_embeds
        second = condition.prompt_embeds_2
        assert second is not None
        return net(
            hidden_states=torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1),
            timestep=(sigma * 1000).to(x.dtype),
            encoder_hidden_states=first,
            encoder_attention_mask=first.new_ones(first.shape[:2], dtype=torch.bool),
            encoder_hidden_states_2=second,
            encoder_attention_mask_2=second.new_ones(second.shape[:2], dtype=torch.bool),
            image_embeds=second.new_zeros(len(x), 0, self.pipe.transformer.config.image_embed_dim),
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """One clip at a time: in diffusers 0.42 the VAE's attention mask is wrong for batches."""
        self.pipe.vae.enable_slicing()
        return super().decode(latents, sampling)
