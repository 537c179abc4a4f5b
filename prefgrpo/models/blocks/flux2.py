"""Blocks of FLUX.2, whose modulation is shared by all of a kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, Stream, attend, joint, random_tables, random_tokens, swiglu
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope


def _feed_forward(ff: Any, x: Tensor) -> Tensor:
    return ff.linear_out(swiglu(*ff.linear_in(x).chunk(2, -1)))


class Flux2Double(Flux2TransformerBlock):
    """Text and image, each with layers of its own, in one attention."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [B, M, C] and image [B, N, C]."""
        attn = self.attn
        image = temb_mod_img.chunk(6, 1)
        text = temb_mod_txt.chunk(6, 1)
        eps = self.norm1.eps
        hidden_states, encoder_hidden_states = joint(
            attn,
            Stream(hidden_states, image, attn.to_out[0], partial(_feed_forward, self.ff), eps),
            Stream(encoder_hidden_states, text, attn.to_add_out, partial(_feed_forward, self.ff_context), eps),
            image_rotary_emb,
            text_first=True,
        )
        return encoder_hidden_states, hidden_states

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        width = self.attn.query_dim
        image, text = torch.randn(2, 2, 6 * width, dtype=dtype, device=device)
        tables = random_tables(sum(TOKENS), self.attn.head_dim, device)
        modulation = {"temb_mod_img": image, "temb_mod_txt": text}
        return random_tokens(width, dtype, device) | modulation | {"image_rotary_emb": tables}


class Flux2Single(Flux2SingleTransformerBlock):
    """One stream; one projection makes q, k, v and the feed-forward's input."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        temb_mod: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: Any = None,
    ) -> Tensor:
        """Text and image [B, M + N, C]."""
        attn = self.attn
        shift, scale, gate = temb_mod.chunk(3, 1)
        projected = attn.to_qkv_mlp_proj(again(layernorm_modulate, hidden_states, shift, scale, self.norm.eps))
        *qkv, ff_gate, ff = projected.split([attn.inner_dim] * 3 + [attn.mlp_hidden_dim] * 2, -1)
        q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in qkv)
        q, k = again(qk_norm_rope, q, k, attn.norm_q.weight, attn.norm_k.weight, *image_rotary_emb, attn.norm_q.eps)
        out = attn.to_out(torch.cat([attend(attn, q, k, v), swiglu(ff_gate, ff)], -1))
        return gated_residual(hidden_states, out, gate)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        width = self.attn.query_dim
        tokens = torch.randn(2, sum(TOKENS), width, dtype=dtype, device=device)
        temb = torch.randn(2, 3 * width, dtype=dtype, device=device)
        tables = random_tables(sum(TOKENS), self.attn.head_dim, device)
        return {"hidden_states": tokens, "encoder_hidden_states": None, "temb_mod": temb, "image_rotary_emb": tables}
