"""Blocks of Z-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, self_attention, swiglu
from prefgrpo.ops import gated_residual


class ZImageBlock(ZImageTransformerBlock):
    """Attention and feed-forward between RMS norms, for which torch has a kernel (diffusers' own is several)."""

    @keeps_inputs
    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        noise_mask: Tensor | None = None,
        *rest: Any,
    ) -> Tensor:
        """Text and image [B, S, C]; freqs_cis [B, S, D / 2] complex."""
        if adaln_input is None or noise_mask is not None:  # text alone, without modulation; Omni
            return super().forward(x, attn_mask, freqs_cis, adaln_input, noise_mask, *rest)
        scale, gate, scale_ff, gate_ff = self.adaLN_modulation(adaln_input).chunk(4, 1)
        mask = attn_mask[:, None, None] if attn_mask is not None and attn_mask.dim() == 2 else attn_mask
        attn = self.attention
        normed = again(_scaled, x, self.attention_norm1.weight, scale, self.attention_norm1.eps)
        out = attn.to_out[0](self_attention(attn, normed, (freqs_cis.real, freqs_cis.imag), mask))
        x = gated_residual(x, _normed(self.attention_norm2, out), gate.tanh())
        ff = self.feed_forward
        normed = again(_scaled, x, self.ffn_norm1.weight, scale_ff, self.ffn_norm1.eps)
        out = ff.w2(swiglu(ff.w1(normed), ff.w3(normed)))
        return gated_residual(x, _normed(self.ffn_norm2, out), gate_ff.tanh())

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        angle = 6 * torch.rand(2, sum(TOKENS), self.head_dim // 2, device=device)
        tokens = torch.randn(2, sum(TOKENS), self.dim, dtype=dtype, device=device)
        temb = torch.randn(2, self.adaLN_modulation[0].in_features, dtype=dtype, device=device)
        turns = torch.polar(torch.ones_like(angle), angle)
        return {"x": tokens, "attn_mask": None, "freqs_cis": turns, "adaln_input": temb}


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _scaled(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps) * (1 + scale[:, None])
