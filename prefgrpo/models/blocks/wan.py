"""Blocks of Wan 2.1 and 2.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, feed_forward, random_tables, random_tokens, self_attention
from prefgrpo.ops import gated_residual, layernorm_modulate


class WanBlock(WanTransformerBlock):
    """Self-attention, attention to the text, feed-forward; modulation in fp32, q and k normalised over all heads."""

    @keeps_inputs
    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Video [B, N, C]; temb [B, 6, C], or in TI2V-5B [B, N, 6, C], a time for each token."""
        shift, scale, gate, shift_ff, scale_ff, gate_ff = (self.scale_shift_table + temb.float()).unbind(-2)
        modulate = layernorm_modulate if temb.dim() == 3 else _modulate_each
        residual = gated_residual if temb.dim() == 3 else _residual_each
        cos, sin = (table.flatten(0, 2) for table in rotary_emb)
        x = hidden_states
        normed = again(modulate, x, shift, scale, self.norm1.eps)
        x = residual(x, self.attn1.to_out[0](self_attention(self.attn1, normed, (cos, sin))), gate)
        x = x + self.attn2(self._norm2(x), encoder_hidden_states, None, None)
        normed = again(modulate, x, shift_ff, scale_ff, self.norm3.eps)
        return residual(x, feed_forward(self.ffn, normed), gate_ff)

    def _norm2(self, x: Tensor) -> Tensor:
        """The text attention's input: a LayerNorm with weights, if there is one."""
        norm = self.norm2
        if not isinstance(norm, torch.nn.LayerNorm):
            return norm(x)
        bias, weight = (t.float().expand(len(x), -1) for t in (norm.bias, norm.weight))
        return again(layernorm_modulate, x, bias, weight - 1, norm.eps)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        width = self.attn1.inner_dim
        temb = torch.randn(2, 6, width, dtype=dtype, device=device)
        tables = random_tables(TOKENS[0], width // self.attn1.heads, device)
        rotary = tuple(table[None, :, None] for table in tables)
        return random_tokens(width, dtype, device) | {"temb": temb, "rotary_emb": rotary}


def _modulate_each(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm and modulation with vectors [B, N, C] of each token, in fp32."""
    return (torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift).type_as(x)


def _residual_each(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Residual with gates [B, N, C] of each token, in fp32."""
    return (x.float() + y * gate).type_as(x)
