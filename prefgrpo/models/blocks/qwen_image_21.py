"""Blocks of Qwen-Image-2.1."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21TransformerBlock
from torch import Tensor

from prefgrpo.models.blocks.kept import again, keeps_inputs
from prefgrpo.models.blocks.parts import TOKENS, swiglu
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope


class QwenImage21Block(QwenImage21TransformerBlock):
    """Text, which is causal and modulated as at time 0, then the image, which sees everything."""

    @keeps_inputs
    def forward(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        rotary_emb: Tensor,
        attention_mask: Any = None,
        target_token_mask: Tensor | None = None,
        layer_cache: Any = None,
        kv_cache_mode: str | None = None,
        cache_write_slice: Any = None,
        segments: list[tuple[int, int, bool]] | None = None,
        key_valid: Tensor | None = None,
    ) -> Tensor:
        """Text and image [B, S, C]; modulation [B + 1, 4 C], the last row is the text's; segments: that of the text."""
        ((_, count, _),) = segments or ((0, 0, True),)
        of_text = modulation[-1:].expand(len(hidden_states), -1).chunk(4, 1)
        of_image = modulation[:-1].chunk(4, 1)
        attn = self.attn
        text, image = hidden_states[:, :count], hidden_states[:, count:]
        normed = again(_modulate, text, image, of_text[0], of_image[0], self.img_norm1.eps)
        q, k, v = (layer(normed).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        norms = (attn.norm_q.weight, attn.norm_k.weight)
        q, k = again(qk_norm_rope, q, k, *norms, rotary_emb.real, rotary_emb.imag, attn.norm_q.eps)
        out_text = dispatch_attention_fn(q[:, :count], k[:, :count], v[:, :count], is_causal=True)
        out = torch.cat([out_text, dispatch_attention_fn(q[:, count:], k, v)], 1).flatten(2)
        out = attn.to_out[0](out)
        text = gated_residual(text, out[:, :count], of_text[1].tanh())
        image = gated_residual(image, out[:, count:], of_image[1].tanh())
        normed = again(_modulate, text, image, of_text[2], of_image[2], self.img_norm2.eps)
        ff = self.img_mlp
        out = ff.out(swiglu(ff.gate_layer(normed), ff.proj(normed)))
        text = gated_residual(text, out[:, :count], of_text[3].tanh())
        return torch.cat([text, gated_residual(image, out[:, count:], of_image[3].tanh())], 1)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Random arguments."""
        width = self.attn.inner_dim
        latents, text = TOKENS
        angle = 6 * torch.rand(latents + text, width // self.attn.heads // 2, device=device)
        return {
            "hidden_states": torch.randn(2, latents + text, width, dtype=dtype, device=device),
            "modulation": torch.randn(3, 4 * width, dtype=dtype, device=device),
            "rotary_emb": torch.polar(torch.ones_like(angle), angle),
            "target_token_mask": torch.arange(latents + text, device=device) >= text,
            "segments": [(0, text, True)],
        }


def _modulate(text: Tensor, image: Tensor, scale_text: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm · (1 + scale) of both, joined."""
    parts = ((text, scale_text), (image, scale))
    return torch.cat([layernorm_modulate(x, torch.zeros_like(by), by, eps) for x, by in parts], 1)
