"""Forwards of diffusers' repeated blocks whose pointwise part runs in fused ops.

`self` is diffusers' block. Its linear layers are called as modules, and its attention by diffusers' dispatcher, so
LoRA, attention backends and split tokens work as in its own forward. B samples, N latent tokens, M text tokens.
Arguments that no family passes are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.models.blocks.kept import again
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope

Tables = tuple[Tensor | None, Tensor | None]
"""cos and sin of a rotary embedding, fp32 [S, D], or [S, D / 2] with one value per pair; None: no rotation."""


# ---- parts
def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] by the backend and over the processes that are set in the attention's processor."""
    options = {"backend": attn.processor._attention_backend, "parallel_config": attn.processor._parallel_config}
    return dispatch_attention_fn(q, k, v, attn_mask=mask, **options).flatten(2)


def self_attention(attn: Any, x: Tensor, tables: Tables, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] of tokens [B, S, C] to each other, before its output's projection."""
    q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
    q, k = again(qk_norm_rope, q, k, *_weights(attn.norm_q, attn.norm_k), *tables, _eps(attn))
    return attend(attn, q, k, v, mask)


def _weights(norm_q: Any, norm_k: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of the norms of q and k, which SD3 has none of."""
    return (None, None) if norm_q is None else (norm_q.weight, norm_k.weight)


def _eps(attn: Any) -> float:
    return 1e-6 if attn.norm_q is None else attn.norm_q.eps


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' feed-forward with a GELU."""
    gelu = ff.net[0]
    return ff.net[2](again(partial(F.gelu, approximate=gelu.approximate), gelu.proj(x)))


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) · x."""
    return again(torch.mul, again(F.silu, gate), x)


class Stream(NamedTuple):
    """One of the two streams of a block with joint attention: latents or text."""

    x: Tensor
    """[B, S, C]."""
    modulation: Sequence[Tensor]
    """shift, scale and gate [B, C] of the attention, then of the feed-forward."""
    ff: Callable[[Tensor], Tensor]
    """The feed-forward."""
    eps: float = 1e-6

    def attended(self, out: Tensor) -> Tensor:
        """x with the attention's output."""
        return gated_residual(self.x, out, self.modulation[2])

    def fed(self, x: Tensor) -> Tensor:
        """x after the feed-forward."""
        shift, scale, gate = self.modulation[3:6]
        return gated_residual(x, self.ff(again(layernorm_modulate, x, shift, scale, self.eps)), gate)


def joint_attention(attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None) -> Any:
    """Outputs [B, S, C] of one attention over text and latents, in this order in the tables and the mask: of latents,
    and of text, or None where no layer projects it."""
    qkv = []
    weights = []
    for stream, layers, norms in (
        (text, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), _weights(attn.norm_added_q, attn.norm_added_k)),
        (latents, (attn.to_q, attn.to_k, attn.to_v), _weights(attn.norm_q, attn.norm_k)),
    ):
        shift, scale, *_ = stream.modulation
        x = again(layernorm_modulate, stream.x, shift, scale, stream.eps)
        qkv.append([layer(x).unflatten(-1, (attn.heads, -1)) for layer in layers])
        weights.append(norms)
    qs, ks, vs = zip(*qkv, strict=True)
    q, k = again(qk_norm_rope, qs, ks, *zip(*weights, strict=True), *tables, _eps(attn))
    out = attend(attn, q, k, torch.cat(vs, 1), mask)
    count = text.x.shape[1]
    of_latents = attn.to_out[0](again(Tensor.contiguous, out[:, count:]))
    if attn.to_add_out is None:
        return of_latents, None
    return of_latents, attn.to_add_out(again(Tensor.contiguous, out[:, :count]))


def joint(attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(latents, text) after one attention over both and a feed-forward of each."""
    out, out_text = joint_attention(attn, latents, text, tables, mask)
    return latents.fed(latents.attended(out)), text.fed(text.attended(out_text))


def _modulation(norm: Any, temb: Tensor, count: int) -> tuple[Tensor, ...]:
    """`count` vectors [B, C] of one of diffusers' adaptive norms."""
    return norm.linear(norm.silu(temb)).chunk(count, 1)


def _double(
    self: Any, x: Tensor, text: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(latents, text) of the double-stream blocks of FLUX.1 and HunyuanVideo."""
    latents = Stream(x, _modulation(self.norm1, temb, 6), partial(feed_forward, self.ff))
    texts = Stream(text, _modulation(self.norm1_context, temb, 6), partial(feed_forward, self.ff_context))
    return joint(self.attn, latents, texts, tables, mask)


def _single(self: Any, text: Tensor, x: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None) -> list[Tensor]:
    """[text, latents] of their single-stream blocks, which have attention and feed-forward side by side."""
    sizes = [text.shape[1], x.shape[1]]
    x = torch.cat([text, x], 1)
    shift, scale, gate = _modulation(self.norm, temb, 3)
    normed = again(layernorm_modulate, x, shift, scale, self.norm.norm.eps)
    ff = self.act_mlp(self.proj_mlp(normed))
    out = self.proj_out(torch.cat([self_attention(self.attn, normed, tables, mask), ff], 2))
    return list(gated_residual(x, out, gate).split(sizes, 1))


def _after_text(text: Tensor, tables: tuple[Tensor, Tensor]) -> Tables:
    """Tables of text [B, M, C] without positions, then of latents."""
    cos, sin = tables
    return F.pad(cos, (0, 0, text.shape[1], 0), value=1.0), F.pad(sin, (0, 0, text.shape[1], 0))


# ---- FLUX.1 and FLUX.1-Kontext
def flux_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Tables, **_: Any
) -> tuple[Tensor, Tensor]:
    """Text [B, M, C] and image [B, N, C]."""
    image, text = _double(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, None)
    return text, image


def flux_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Tables, **_: Any
) -> list[Tensor]:
    """Text [B, M, C] and image [B, N, C]."""
    return _single(self, encoder_hidden_states, hidden_states, temb, image_rotary_emb, None)


# ---- FLUX.2: modulation is shared by all blocks of a kind
def flux2_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb_mod_img: Tensor, temb_mod_txt: Tensor,
    image_rotary_emb: Tables, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Text [B, M, C] and image [B, N, C]."""

    def run(ff: Any, x: Tensor) -> Tensor:
        return ff.linear_out(swiglu(*ff.linear_in(x).chunk(2, -1)))

    eps = self.norm1.eps
    latents = Stream(hidden_states, temb_mod_img.chunk(6, 1), partial(run, self.ff), eps)
    texts = Stream(encoder_hidden_states, temb_mod_txt.chunk(6, 1), partial(run, self.ff_context), eps)
    image, text = joint(self.attn, latents, texts, image_rotary_emb, None)
    return text, image


def flux2_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: None, temb_mod: Tensor, image_rotary_emb: Tables, **_: Any
) -> Tensor:
    """Text and image [B, M + N, C]; one projection makes q, k, v and the feed-forward's input."""
    attn = self.attn
    shift, scale, gate = temb_mod.chunk(3, 1)
    projected = attn.to_qkv_mlp_proj(again(layernorm_modulate, hidden_states, shift, scale, self.norm.eps))
    *qkv, ff_gate, ff = projected.split([attn.inner_dim] * 3 + [attn.mlp_hidden_dim] * 2, -1)
    q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in qkv)
    q, k = again(qk_norm_rope, q, k, attn.norm_q.weight, attn.norm_k.weight, *image_rotary_emb, attn.norm_q.eps)
    out = attn.to_out(torch.cat([attend(attn, q, k, v), swiglu(ff_gate, ff)], -1))
    return gated_residual(hidden_states, out, gate)


# ---- HunyuanVideo and HunyuanVideo-1.5: text has no positions
def hunyuan_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None,
    freqs_cis: tuple[Tensor, Tensor], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]."""
    tables = _after_text(encoder_hidden_states, freqs_cis)
    return _double(self, hidden_states, encoder_hidden_states, temb, tables, attention_mask)


def hunyuan_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None,
    image_rotary_emb: tuple[Tensor, Tensor], *_: Any,
) -> list[Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]."""
    tables = _after_text(encoder_hidden_states, image_rotary_emb)
    return _single(self, encoder_hidden_states, hidden_states, temb, tables, attention_mask)[::-1]


def hunyuan15_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor,
    freqs_cis: tuple[Tensor, Tensor], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]; attention_mask [B, M]: 0 for padding, which neither sees nor is seen."""
    valid = F.pad(attention_mask.bool(), (0, hidden_states.shape[1]), value=True)
    mask = valid[:, None, :, None] & valid[:, None, None]
    return hunyuan_double(self, hidden_states, encoder_hidden_states, temb, mask, freqs_cis)


# ---- Qwen-Image and its editing models
def qwen_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_hidden_states_mask: Tensor | None,
    temb: Tensor, image_rotary_emb: tuple[Tensor, Tensor], joint_attention_kwargs: Any = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Text [B, M, C] and image [B, N, C]; text is masked where context parallelism pads it."""
    if modulate_index is not None:  # sources have a time of their own (Qwen-Image-Edit-2511)
        given = (hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb)
        return self.stock_forward(*given, joint_attention_kwargs, modulate_index)
    mask = None
    if encoder_hidden_states_mask is not None:
        latents_seen = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2])
        mask = torch.cat([encoder_hidden_states_mask, latents_seen], 1)[:, None, None]
    of_image, of_text = image_rotary_emb
    turns = torch.cat([of_text, of_image])
    eps = self.img_norm1.eps
    latents = Stream(hidden_states, self.img_mod(temb).chunk(6, 1), partial(feed_forward, self.img_mlp), eps)
    texts = Stream(encoder_hidden_states, self.txt_mod(temb).chunk(6, 1), partial(feed_forward, self.txt_mlp), eps)
    x, y = joint(self.attn, latents, texts, (turns.real, turns.imag), mask)
    return y, x


# ---- Qwen-Image-2.1: text is causal and modulated as at time 0; the image sees everything
def qwen21_block(
    self: Any, hidden_states: Tensor, modulation: Tensor, rotary_emb: Tensor, attention_mask: Any = None,
    target_token_mask: Tensor | None = None, layer_cache: Any = None, kv_cache_mode: Any = None,
    cache_write_slice: Any = None, segments: Sequence[tuple[int, int, bool]] = (), key_valid: Any = None,
) -> Tensor:  # fmt: skip
    """Text and image [B, M + N, C]; modulation [B + 1, 4 C], the last row is the text's; segments: the text's."""
    ((_, count, _),) = segments
    of_text = modulation[-1:].expand(len(hidden_states), -1).chunk(4, 1)
    of_image = modulation[:-1].chunk(4, 1)

    def modulate(x: Tensor, number: int, eps: float) -> Tensor:
        parts = ((x[:, :count], of_text[number]), (x[:, count:], of_image[number]))
        return torch.cat([layernorm_modulate(part, torch.zeros_like(by), by, eps) for part, by in parts], 1)

    def residual(x: Tensor, y: Tensor, number: int) -> Tensor:
        parts = ((slice(None, count), of_text[number]), (slice(count, None), of_image[number]))
        return torch.cat([gated_residual(x[:, part], y[:, part], by.tanh()) for part, by in parts], 1)

    attn = self.attn
    x = again(modulate, hidden_states, 0, self.img_norm1.eps)
    q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
    tables = (rotary_emb.real, rotary_emb.imag)
    q, k = again(qk_norm_rope, q, k, attn.norm_q.weight, attn.norm_k.weight, *tables, attn.norm_q.eps)
    text = dispatch_attention_fn(q[:, :count], k[:, :count], v[:, :count], is_causal=True)
    out = torch.cat([text, dispatch_attention_fn(q[:, count:], k, v)], 1).flatten(2)
    hidden_states = residual(hidden_states, attn.to_out[0](out), 1)
    x = again(modulate, hidden_states, 2, self.img_norm2.eps)
    ff = self.img_mlp
    return residual(hidden_states, ff.out(swiglu(ff.gate_layer(x), ff.proj(x))), 3)


# ---- SD3 and SD3.5
def sd3_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, *_: Any, **__: Any
) -> tuple[Tensor | None, Tensor]:
    """Text [B, M, C], or None from the last block, and image [B, N, C], which in some blocks of SD3.5-medium has a
    second attention."""
    modulation = _modulation(self.norm1, temb, 9 if self.use_dual_attention else 6)
    of_text = _modulation(self.norm1_context, temb, 2 if self.context_pre_only else 6)
    if self.context_pre_only:
        of_text = of_text[::-1]  # this norm has the scale first
    image = Stream(hidden_states, modulation, partial(feed_forward, self.ff))
    text = Stream(encoder_hidden_states, of_text, partial(feed_forward, self.ff_context))
    out, out_text = joint_attention(self.attn, image, text, (None, None), None)
    x = image.attended(out)
    if self.use_dual_attention:
        shift, scale, gate = modulation[6:]
        normed = again(layernorm_modulate, hidden_states, shift, scale)
        x = gated_residual(x, self.attn2.to_out[0](self_attention(self.attn2, normed, (None, None))), gate)
    return None if self.context_pre_only else text.fed(text.attended(out_text)), image.fed(x)


# ---- Wan 2.1 and 2.2: modulation in fp32, q and k normalised over all heads
def wan_block(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: tuple[Tensor, Tensor]
) -> Tensor:
    """Video [B, N, C]; temb [B, 6, C], or in TI2V-5B [B, N, 6, C], a time for each token."""

    def modulate_each(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift).type_as(x)

    def residual_each(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return (x.float() + y * gate).type_as(x)

    shift, scale, gate, shift_ff, scale_ff, gate_ff = (self.scale_shift_table + temb.float()).unbind(-2)
    modulate = layernorm_modulate if temb.dim() == 3 else modulate_each
    residual = gated_residual if temb.dim() == 3 else residual_each
    cos, sin = (table.flatten(0, 2) for table in rotary_emb)
    x = again(modulate, hidden_states, shift, scale, self.norm1.eps)
    hidden_states = residual(hidden_states, self.attn1.to_out[0](self_attention(self.attn1, x, (cos, sin))), gate)
    norm = self.norm2
    if isinstance(norm, torch.nn.LayerNorm):
        bias, weight = (t.float().expand(len(x), -1) for t in (norm.bias, norm.weight))
        x = again(layernorm_modulate, hidden_states, bias, weight - 1, norm.eps)
    else:
        x = norm(hidden_states)
    hidden_states = hidden_states + self.attn2(x, encoder_hidden_states, None, None)
    x = again(modulate, hidden_states, shift_ff, scale_ff, self.norm3.eps)
    return residual(hidden_states, feed_forward(self.ffn, x), gate_ff)


# ---- Z-Image: RMS norms, for which torch has a kernel (diffusers' own is several)
def z_image_block(
    self: Any, x: Tensor, attn_mask: Tensor | None, freqs_cis: Tensor, adaln_input: Tensor | None = None, *rest: Any
) -> Tensor:
    """Text and image [B, S, C]; freqs_cis [B, S, D / 2] complex."""
    if adaln_input is None:  # text alone, without modulation
        return self.stock_forward(x, attn_mask, freqs_cis, adaln_input, *rest)

    def normed(x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)

    def scaled(x: Tensor, norm: Any, scale: Tensor) -> Tensor:
        return normed(x, norm) * (1 + scale[:, None])

    scale, gate, scale_ff, gate_ff = self.adaLN_modulation(adaln_input).chunk(4, 1)
    mask = None if attn_mask is None else attn_mask[:, None, None]
    attn = self.attention
    y = again(scaled, x, self.attention_norm1, scale)
    out = attn.to_out[0](self_attention(attn, y, (freqs_cis.real, freqs_cis.imag), mask))
    x = gated_residual(x, normed(out, self.attention_norm2), gate.tanh())
    ff = self.feed_forward
    y = again(scaled, x, self.ffn_norm1, scale_ff)
    return gated_residual(x, normed(ff.w2(swiglu(ff.w1(y), ff.w3(y))), self.ffn_norm2), gate_ff.tanh())
