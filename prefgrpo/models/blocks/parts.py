"""What the fused blocks of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from prefgrpo.models.blocks.kept import again
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope

Tables = tuple[Tensor | None, Tensor | None]
"""cos and sin of a rotary embedding, fp32 [S, D], or [S, D / 2] with one value per pair; None: no rotation."""
TOKENS = (160, 96)
"""Latent and text tokens of `check`."""


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] by the backend and over the processes that are set in the attention's processor."""
    options = {"backend": attn.processor._attention_backend, "parallel_config": attn.processor._parallel_config}
    return dispatch_attention_fn(q, k, v, attn_mask=mask, **options).flatten(2)


def self_attention(attn: Any, x: Tensor, tables: Tables, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] of tokens [B, S, C] to each other, before its output's projection."""
    q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
    q, k = again(qk_norm_rope, q, k, *_weights(attn.norm_q, attn.norm_k), *tables, _eps(attn))
    return attend(attn, q, k, v, mask)


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' feed-forward with a GELU."""
    gelu = ff.net[0]
    return ff.net[2](again(partial(nn.functional.gelu, approximate=gelu.approximate), gelu.proj(x)))


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) · x."""
    return again(torch.mul, again(nn.functional.silu, gate), x)


class Stream(NamedTuple):
    """One of the two streams of a block with joint attention: latents or text."""

    x: Tensor
    """[B, S, C]."""
    modulation: Sequence[Tensor]
    """shift, scale and gate [B, C] of the attention, then of the feed-forward."""
    out: nn.Module
    """Projection of the attention's output."""
    ff: Callable[[Tensor], Tensor]
    """The feed-forward."""
    eps: float = 1e-6

    def normed(self) -> Tensor:
        """The attention's input."""
        shift, scale, *_ = self.modulation
        return again(layernorm_modulate, self.x, shift, scale, self.eps)

    def attended(self, out: Tensor) -> Tensor:
        """x with the attention's output."""
        return gated_residual(self.x, self.out(again(Tensor.contiguous, out)), self.modulation[2])

    def fed(self, x: Tensor) -> Tensor:
        """x after the feed-forward."""
        shift, scale, gate = self.modulation[3:6]
        return gated_residual(x, self.ff(again(layernorm_modulate, x, shift, scale, self.eps)), gate)


def joint_attention(
    attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None = None, *, text_first: bool
) -> tuple[Tensor, Tensor]:
    """One attention over latents and text: [B, S, H · D] of each, before the projections of its output.

    text_first: the order of the tokens, in the tables too.
    """
    projections = [
        (latents, (attn.to_q, attn.to_k, attn.to_v), _weights(attn.norm_q, attn.norm_k)),
        (text, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), _weights(attn.norm_added_q, attn.norm_added_k)),
    ]
    qkv = []
    weights = []
    for stream, layers, norms in projections[:: -1 if text_first else 1]:
        x = stream.normed()
        qkv.append([layer(x).unflatten(-1, (attn.heads, -1)) for layer in layers])
        weights.append(norms)
    q, k, v = zip(*qkv, strict=True)
    q, k = again(qk_norm_rope, q, k, *zip(*weights, strict=True), *tables, _eps(attn))
    out = attend(attn, q, k, torch.cat(v, 1), mask)
    count = text.x.shape[1]
    return (out[:, count:], out[:, :count]) if text_first else (out[:, :-count], out[:, -count:])


def joint(
    attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None = None, *, text_first: bool
) -> tuple[Tensor, Tensor]:
    """(latents, text) after one attention over both and a feed-forward of each."""
    out, out_text = joint_attention(attn, latents, text, tables, mask, text_first=text_first)
    return latents.fed(latents.attended(out)), text.fed(text.attended(out_text))


def _weights(norm_q: Any, norm_k: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of the norms of q and k, which SD3 has none of."""
    return (None, None) if norm_q is None else (norm_q.weight, norm_k.weight)


def _eps(attn: Any) -> float:
    return 1e-6 if attn.norm_q is None else attn.norm_q.eps


def without_positions(tables: tuple[Tensor, Tensor], tokens: int) -> Tables:
    """Tables of latents, then of `tokens` of text, which are not rotated."""
    cos, sin = tables
    return nn.functional.pad(cos, (0, 0, 0, tokens), value=1.0), nn.functional.pad(sin, (0, 0, 0, tokens))


def random_tokens(width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Random latent and text tokens of two samples."""
    names = ("hidden_states", "encoder_hidden_states")
    return {k: torch.randn(2, n, width, dtype=dtype, device=device) for k, n in zip(names, TOKENS, strict=True)}


def random_tables(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Tables` [S, D] of random angles."""
    angles = 6 * torch.rand(tokens, width // 2, device=device).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()
