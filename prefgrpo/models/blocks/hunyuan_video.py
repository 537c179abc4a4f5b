"""Blocks of HunyuanVideo and HunyuanVideo-1.5."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTransformerBlock,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import (
    TOKENS,
    Stream,
    feed_forward,
    joint,
    random_tables,
    random_tokens,
    self_attention,
    without_positions,
)
from prefgrpo.ops import gated_residual, layernorm_modulate


class HunyuanVideoDouble(HunyuanVideoTransformerBlock):
    """Video and text, each with layers of its own, in one attention; text has no positions."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor | None,
        freqs_cis: tuple[Tensor, Tensor],
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Video [B, N, C] and text [B, M, C]."""
        return _double(self, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        return _inputs(self.attn, "freqs_cis", dtype, device)


class HunyuanVideo15Double(HunyuanVideo15TransformerBlock):
    """The same, with masked text."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor,
        freqs_cis: tuple[Tensor, Tensor],
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Video [B, N, C] and text [B, M, C]; attention_mask [B, M]: 0 for padding, which sees and is seen by nothing."""
        seen = torch.nn.functional.pad(attention_mask.bool(), (hidden_states.shape[1], 0), value=True)
        mask = seen[:, None, :, None] & seen[:, None, None]
        return _double(self, hidden_states, encoder_hidden_states, temb, mask, freqs_cis)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        seen = torch.arange(TOKENS[1], device=device).expand(2, -1) < TOKENS[1] - 20
        return _inputs(self.attn, "freqs_cis", dtype, device) | {"attention_mask": seen}


class HunyuanVideoSingle(HunyuanVideoSingleTransformerBlock):
    """Video and text in one stream, with attention and feed-forward side by side."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Tensor | None,
        image_rotary_emb: tuple[Tensor, Tensor],
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Video [B, N, C] and text [B, M, C]."""
        count = hidden_states.shape[1]
        x = torch.cat([hidden_states, encoder_hidden_states], 1)
        shift, scale, gate = self.norm.linear(self.norm.silu(temb)).chunk(3, 1)
        normed = again(layernorm_modulate, x, shift, scale)
        ff = self.act_mlp(self.proj_mlp(normed))
        tables = without_positions(image_rotary_emb, encoder_hidden_states.shape[1])
        attended = self_attention(self.attn, normed, tables, attention_mask)
        x = gated_residual(x, self.proj_out(torch.cat([attended, ff], 2)), gate)
        return x[:, :count], x[:, count:]

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        return _inputs(self.attn, "image_rotary_emb", dtype, device)


def _double(
    block: Any, latents: Tensor, encoded: Tensor, temb: Tensor, mask: Tensor | None, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    attn = block.attn
    video, text = (norm.linear(norm.silu(temb)).chunk(6, 1) for norm in (block.norm1, block.norm1_context))
    return joint(
        attn,
        Stream(latents, video, attn.to_out[0], partial(feed_forward, block.ff)),
        Stream(encoded, text, attn.to_add_out, partial(feed_forward, block.ff_context)),
        without_positions(tables, encoded.shape[1]),
        mask,
        text_first=False,
    )


def _inputs(attn: Any, tables: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    width = attn.query_dim
    temb = torch.randn(2, width, dtype=dtype, device=device)
    rotary = random_tables(TOKENS[0], width // attn.heads, device)
    return random_tokens(width, dtype, device) | {"temb": temb, "attention_mask": None, tables: rotary}
