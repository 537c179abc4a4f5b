"""Blocks of SD3 and SD3.5."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import Stream, feed_forward, joint_attention, random_tokens, self_attention
from prefgrpo.ops import gated_residual, layernorm_modulate


class SD3Double(JointTransformerBlock):
    """Image and text, each with layers of its own, in one attention without positions.

    In some blocks of SD3.5-medium the image has a second attention; the last block returns no text.
    """

    @keeps_inputs
    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, joint_attention_kwargs: Any = None
    ) -> tuple[Tensor | None, Tensor]:
        """Text [B, M, C], or None, and image [B, N, C]."""
        attn = self.attn
        norm, norm_text = self.norm1, self.norm1_context
        modulation = norm.linear(norm.silu(temb)).chunk(9 if self.use_dual_attention else 6, 1)
        of_text = norm_text.linear(norm_text.silu(temb)).chunk(2 if self.context_pre_only else 6, 1)
        if self.context_pre_only:
            of_text = of_text[::-1]  # this norm has the scale first
        image = Stream(hidden_states, modulation, attn.to_out[0], partial(feed_forward, self.ff))
        text = Stream(encoder_hidden_states, of_text, attn.to_add_out, partial(feed_forward, self.ff_context))
        out, out_text = joint_attention(attn, image, text, (None, None), text_first=False)
        x = image.attended(out)
        if self.use_dual_attention:
            shift, scale, gate = modulation[6:]
            normed = again(layernorm_modulate, hidden_states, shift, scale)
            alone = self_attention(self.attn2, normed, (None, None))
            x = gated_residual(x, self.attn2.to_out[0](alone), gate)
        return None if self.context_pre_only else text.fed(text.attended(out_text)), image.fed(x)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        width = self.attn.query_dim
        return random_tokens(width, dtype, device) | {"temb": torch.randn(2, width, dtype=dtype, device=device)}
