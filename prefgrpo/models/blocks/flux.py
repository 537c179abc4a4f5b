"""Blocks of FLUX.1 and FLUX.1-Kontext."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, Stream, feed_forward, joint, random_tables, random_tokens, self_attention
from prefgrpo.ops import gated_residual, layernorm_modulate


class FluxDouble(FluxTransformerBlock):
    """Text and image, each with layers of its own, in one attention."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [B, M, C] and image [B, N, C]."""
        attn = self.attn
        image, text = (norm.linear(norm.silu(temb)).chunk(6, 1) for norm in (self.norm1, self.norm1_context))
        hidden_states, encoder_hidden_states = joint(
            attn,
            Stream(hidden_states, image, attn.to_out[0], partial(feed_forward, self.ff)),
            Stream(encoder_hidden_states, text, attn.to_add_out, partial(feed_forward, self.ff_context)),
            image_rotary_emb,
            text_first=True,
        )
        return encoder_hidden_states, hidden_states

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        return _inputs(self.attn, dtype, device)


class FluxSingle(FluxSingleTransformerBlock):
    """Text and image in one stream, with attention and feed-forward side by side."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [B, M, C] and image [B, N, C]."""
        count = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], 1)
        shift, scale, gate = self.norm.linear(self.norm.silu(temb)).chunk(3, 1)
        normed = again(layernorm_modulate, x, shift, scale, self.norm.norm.eps)
        ff = self.act_mlp(self.proj_mlp(normed))
        attended = self_attention(self.attn, normed, image_rotary_emb)
        x = gated_residual(x, self.proj_out(torch.cat([attended, ff], 2)), gate)
        return x[:, :count], x[:, count:]

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        return _inputs(self.attn, dtype, device)


def _inputs(attn: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    temb = torch.randn(2, attn.query_dim, dtype=dtype, device=device)
    tables = random_tables(sum(TOKENS), attn.head_dim, device)
    return random_tokens(attn.query_dim, dtype, device) | {"temb": temb, "image_rotary_emb": tables}
