"""Forwards of diffusers' repeated blocks, with their pointwise parts in fused ops.

`self` is diffusers' block. Its linear layers are called as modules, and its attention through diffusers' dispatcher, so
LoRA, attention backends and split tokens work as in its own forward (Ulysses with fewer copies: `ulysses.py`).
B samples, N latent tokens, M text tokens. Arguments that no family passes are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.models.blocks.components import (
    Stream,
    Tables,
    after_text,
    attend,
    double,
    feed_forward,
    joint,
    joint_attention,
    joint_mask,
    modulation_of,
    norm_weights,
    normed,
    once,
    self_attention,
    single,
    swiglu,
)
from prefgrpo.models.blocks.joined import beside_swiglu
from prefgrpo.models.blocks.recompute import recomputed
from prefgrpo.models.lora import outputs
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope


# ---- FLUX.1 and FLUX.1-Kontext
def flux_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Tables, **_: Any
) -> tuple[Tensor, Tensor]:
    """Text [B, M, C] and image [B, N, C]."""
    image, text = double(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, None)
    return text, image


def flux_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Tables, **_: Any
) -> tuple[Tensor, Tensor]:
    """Text [B, M, C] and image [B, N, C]."""
    return single(self, encoder_hidden_states, hidden_states, temb, image_rotary_emb, None)


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
    projected = attn.to_qkv_mlp_proj(recomputed(layernorm_modulate, hidden_states, shift, scale, self.norm.eps))
    *qkv, ff_gate, ff = projected.split([attn.inner_dim] * 3 + [attn.mlp_hidden_dim] * 2, -1)
    q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in qkv)
    q, k = normed(attn, q, k, norm_weights(attn.norm_q, attn.norm_k), image_rotary_emb)
    out = attn.to_out(recomputed(beside_swiglu, attend(attn, q, k, v), ff_gate, ff))
    return gated_residual(hidden_states, out, gate)


# ---- FLUX.3: attention and feed-forward side by side, a modulation per token
def _apart(x: Tensor) -> Tensor:
    """Every token of [B, S, C] as a sample of its own, [B · S, 1, C]: ops take one vector per sample."""
    return x.flatten(0, 1)[:, None]


def _modulated(eps: float, *streams: Tensor) -> Tensor:
    """Norm and modulation of streams, joined; streams: x [B, S, C] and modulation [B, S, 3 C] of each in turn."""
    made = []
    for x, modulation in zip(streams[::2], streams[1::2], strict=True):
        shift, scale, _ = modulation.flatten(0, 1).chunk(3, 1)
        made.append(layernorm_modulate(_apart(x), shift, scale, eps).view_as(x))
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def _flux3(self: Any, streams: Sequence[tuple[Tensor, Tensor]], tables: Tables) -> list[Tensor]:
    """Each stream after a block; streams: tokens and their modulation, in the order of the tables."""
    attn = self.attn
    normalised = recomputed(partial(_modulated, self.norm.eps), *(t for stream in streams for t in stream))
    made = outputs((attn.to_q, attn.to_k, attn.to_v, self.ff.linear_in), normalised)
    q = next(made).unflatten(-1, (attn.heads, -1))
    k = next(made).unflatten(-1, (attn.heads, -1))
    q, k = normed(attn, q, k, norm_weights(attn.norm_q, attn.norm_k), tables)
    attended = attn.to_out[0](attend(attn, q, k, next(made).unflatten(-1, (attn.heads, -1))))
    fed = self.ff.linear_out(swiglu(*next(made).chunk(2, -1)))
    out = []
    start = 0
    for x, modulation in streams:
        end = start + x.shape[1]
        y = attended[:, start:end] + fed[:, start:end]
        gate = modulation.flatten(0, 1).chunk(3, 1)[2]
        out.append(gated_residual(_apart(x), _apart(y), gate).view_as(x))
        start = end
    return out


def flux3_mode(self: Any, hidden_states: Tensor, temb_mod: Tensor, image_rotary_emb: Tables) -> Tensor:
    """Tokens of one mode [B, S, C]; temb_mod [B, S, 3 C]."""
    return _flux3(self, [(hidden_states, temb_mod)], image_rotary_emb)[0]


def flux3_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb_mod: Tensor, temb_mod_context: Tensor,
    image_rotary_emb: Tables,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Text [B, M, C], and image with references [B, N, C]; their modulation [B, M, 3 C] and [B, N, 3 C]."""
    streams = [(encoder_hidden_states, temb_mod_context), (hidden_states, temb_mod)]
    text, image = _flux3(self, streams, image_rotary_emb)
    return text, image


# ---- HunyuanVideo and HunyuanVideo-1.5: text has no positions
def hunyuan_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None,
    freqs_cis: tuple[Tensor, Tensor], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]."""
    tables = after_text(encoder_hidden_states, freqs_cis)
    return double(self, hidden_states, encoder_hidden_states, temb, tables, attention_mask)


def hunyuan_single(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None,
    image_rotary_emb: tuple[Tensor, Tensor], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]."""
    tables = after_text(encoder_hidden_states, image_rotary_emb)
    text, video = single(self, encoder_hidden_states, hidden_states, temb, tables, attention_mask)
    return video, text


def hunyuan15_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, attention_mask: Tensor,
    freqs_cis: tuple[Tensor, Tensor], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Video [B, N, C] and text [B, M, C]; attention_mask [B, M]: 0 for padding, which neither sees nor is seen."""
    mask = once(joint_mask, attention_mask, hidden_states.shape[1])
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
    x = recomputed(modulate, hidden_states, 0, self.img_norm1.eps)
    q, k, v = (y.unflatten(-1, (attn.heads, -1)) for y in outputs((attn.to_q, attn.to_k, attn.to_v), x))
    tables = (rotary_emb.real, rotary_emb.imag)
    q, k = recomputed(qk_norm_rope, q, k, attn.norm_q.weight, attn.norm_k.weight, *tables, attn.norm_q.eps)
    text = dispatch_attention_fn(q[:, :count], k[:, :count], v[:, :count], is_causal=True)
    out = torch.cat([text, dispatch_attention_fn(q[:, count:], k, v)], 1).flatten(2)
    hidden_states = residual(hidden_states, attn.to_out[0](out), 1)
    x = recomputed(modulate, hidden_states, 2, self.img_norm2.eps)
    ff = self.img_mlp
    return residual(hidden_states, ff.out(swiglu(*outputs((ff.gate_layer, ff.proj), x))), 3)


# ---- SD3 and SD3.5
def sd3_double(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, *_: Any, **__: Any
) -> tuple[Tensor | None, Tensor]:
    """Text [B, M, C], or None from the last block, and image [B, N, C], which in some blocks of SD3.5-medium has a
    second attention."""
    modulation = modulation_of(self.norm1, temb, 9 if self.use_dual_attention else 6)
    of_text = modulation_of(self.norm1_context, temb, 2 if self.context_pre_only else 6)
    if self.context_pre_only:
        of_text = of_text[::-1]  # this norm has the scale first
    image = Stream(hidden_states, modulation, partial(feed_forward, self.ff))
    text = Stream(encoder_hidden_states, of_text, partial(feed_forward, self.ff_context))
    out, out_text = joint_attention(self.attn, image, text, (None, None), None)
    x = image.attended(out)
    if self.use_dual_attention:
        shift, scale, gate = modulation[6:]
        normed = recomputed(layernorm_modulate, hidden_states, shift, scale)
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
    x = recomputed(modulate, hidden_states, shift, scale, self.norm1.eps)
    hidden_states = residual(hidden_states, self.attn1.to_out[0](self_attention(self.attn1, x, (cos, sin))), gate)
    norm = self.norm2
    if isinstance(norm, torch.nn.LayerNorm):
        bias, weight = (t.float().expand(len(x), -1) for t in (norm.bias, norm.weight))
        x = recomputed(layernorm_modulate, hidden_states, bias, weight - 1, norm.eps)
    else:
        x = norm(hidden_states)
    hidden_states = hidden_states + self.attn2(x, encoder_hidden_states, None, None)
    x = recomputed(modulate, hidden_states, shift_ff, scale_ff, self.norm3.eps)
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
    y = recomputed(scaled, x, self.attention_norm1, scale)
    out = attn.to_out[0](self_attention(attn, y, (freqs_cis.real, freqs_cis.imag), mask))
    x = gated_residual(x, normed(out, self.attention_norm2), gate.tanh())
    ff = self.feed_forward
    y = recomputed(scaled, x, self.ffn_norm1, scale_ff)
    return gated_residual(x, normed(ff.w2(swiglu(ff.w1(y), ff.w3(y))), self.ffn_norm2), gate_ff.tanh())


# ---- Krea-2: RMS norms with weights 1 + w in fp32, fewer heads of keys and values, a gate on attention's output. Only
# `gated_residual` fits: `qk_norm_rope` needs as many heads of keys as of queries
def krea2_block(
    self: Any, hidden_states: Tensor, temb: Tensor, image_rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Text and image [B, S, C]; temb [B, 1, 6 C]."""

    def normed(x: Tensor, norm: Any) -> Tensor:
        wide = recomputed(partial(Tensor.to, dtype=torch.float32, copy=True), x)
        y = recomputed(partial(F.rms_norm, eps=norm.eps), wide, x.shape[-1:], norm.weight + 1.0)
        return recomputed(partial(Tensor.to, dtype=x.dtype, copy=True), y)

    def scaled(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (1.0 + scale) * y + shift

    def modulated(x: Tensor, norm: Any, scale: Tensor, shift: Tensor) -> Tensor:
        return recomputed(scaled, normed(x, norm), scale[:, None], shift[:, None])

    def turned(x: Tensor, norm: Any) -> Tensor:
        return recomputed(partial(apply_rotary_emb, sequence_dim=1), normed(x, norm), image_rotary_emb)

    def repeated(x: Tensor) -> Tensor:
        return recomputed(partial(Tensor.repeat_interleave, dim=2), x, attn.num_heads // attn.num_kv_heads)

    attn = self.attn
    table = temb.flatten(0, 1).unflatten(-1, (6, -1)) + self.scale_shift_table
    scale, shift, gate, scale_ff, shift_ff, gate_ff = table.unbind(1)
    x = modulated(hidden_states, self.norm1, scale, shift)
    q, k, v, opened = outputs((attn.to_q, attn.to_k, attn.to_v, attn.to_gate), x)
    k = repeated(turned(k.unflatten(-1, (-1, attn.head_dim)), attn.norm_k))
    v = repeated(v.unflatten(-1, (-1, attn.head_dim)))
    q = turned(q.unflatten(-1, (-1, attn.head_dim)), attn.norm_q)
    options = {"backend": attn.processor._attention_backend, "parallel_config": attn.processor._parallel_config}
    out = dispatch_attention_fn(q, k, v, attn_mask=attention_mask, **options).flatten(2)
    out = attn.to_out[0](recomputed(torch.mul, out, recomputed(torch.sigmoid, opened)))
    hidden_states = gated_residual(hidden_states, out, gate)
    x = modulated(hidden_states, self.norm2, scale_ff, shift_ff)
    ff = self.ff
    return gated_residual(hidden_states, ff.down(swiglu(*outputs((ff.gate, ff.up), x))), gate_ff)
