"""What the forwards of diffusers' blocks have in common: attention, feed-forward, streams and modulation.

B samples, N latent tokens, M text tokens, S of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from prefgrpo.models.blocks.joined import beside_gelu, join, split
from prefgrpo.models.blocks.recompute import recomputed
from prefgrpo.models.blocks.ulysses import ulysses
from prefgrpo.models.lora import LoraLinear, outputs
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope
from prefgrpo.ops.low_rank_gelu import low_rank_gelu
from prefgrpo.ops.qk_norm_rope import NormWeights, Streams

Tables = tuple[Tensor | None, Tensor | None]
"""cos and sin of a rotary embedding, fp32 [S, D], or [S, D / 2] with one value per pair; None: no rotation."""


def normed(
    attn: Any,
    q: Streams,
    k: Streams,
    weights: tuple[NormWeights, NormWeights],
    tables: Tables,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised and rotated queries and keys for `attend`. Under Ulysses, sending both starts here and overlaps the
    projection of v, which takes as long (Wan 14B at 480p: .55 ms at 774 TFLOP/s; both sent: .37 ms at 400 GB/s)."""
    split = ulysses(attn, mask)
    if split is None:
        return recomputed(qk_norm_rope, q, k, *weights, *tables, norm_eps(attn))
    q, k = recomputed(partial(qk_norm_rope, groups=split.size), q, k, *weights, *tables, norm_eps(attn))
    return split.send(q), split.send(k)


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] of queries and keys from `normed`, with the backend and context parallelism that are set
    in the attention's processor."""
    return attend_streams(attn, q, k, [v], mask)[0]


def attend_streams(
    attn: Any, q: Tensor, k: Tensor, values: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """`attend` for joint attention: contiguous outputs [B, Sᵢ, H · D], one for each stream of values [B, Sᵢ, H, D]."""
    backend = attn.processor._attention_backend
    split = ulysses(attn, mask)
    if split is not None:
        return split.attend(q, k, values, backend)
    v = values[0] if len(values) == 1 else torch.cat(list(values), 1)
    options = {"backend": backend, "parallel_config": attn.processor._parallel_config}
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, **options).flatten(2)
    if len(values) == 1:
        return [out]
    return [recomputed(Tensor.contiguous, part) for part in out.split([t.shape[1] for t in values], 1)]


def self_attention(attn: Any, x: Tensor, tables: Tables, mask: Tensor | None = None) -> Tensor:
    """Attention [B, S, H · D] of tokens [B, S, C] to each other, before its output's projection."""
    made = heads_of(attn, (attn.to_q, attn.to_k, attn.to_v), x)
    q, k = normed(attn, next(made), next(made), norm_weights(attn.norm_q, attn.norm_k), tables, mask)
    return attend(attn, q, k, next(made), mask)


def heads_of(attn: Any, layers: Sequence[torch.nn.Module], x: Tensor) -> Iterator[Tensor]:
    """layer(x) [B, S, H, D] of each layer, computed one at a time."""
    return (y.unflatten(-1, (attn.heads, -1)) for y in outputs(layers, x))


def norm_weights(norm_q: Any, norm_k: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weights of the norms of q and k, of which SD3 has none."""
    return (None, None) if norm_q is None else (norm_q.weight, norm_k.weight)


def norm_eps(attn: Any) -> float:
    """eps of the norms of q and k."""
    return 1e-6 if attn.norm_q is None else attn.norm_q.eps


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' feed-forward with GELU; the LoRA of its first layer is added in `low_rank_gelu`."""
    gelu = ff.net[0]
    if isinstance(gelu.proj, LoraLinear) and gelu.approximate == "tanh":
        y = recomputed(low_rank_gelu, *gelu.proj(x, apart=True)).unflatten(0, x.shape[:-1])
    else:
        y = recomputed(partial(F.gelu, approximate=gelu.approximate), gelu.proj(x))
    return ff.net[2](y)


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) · x."""
    return recomputed(torch.mul, recomputed(F.silu, gate), x)


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
        return gated_residual(x, self.ff(recomputed(layernorm_modulate, x, shift, scale, self.eps)), gate)


def joint_attention(attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None) -> Any:
    """Outputs [B, S, C] of one attention over text and latents, in this order in the tables and the mask: of latents,
    and of text, or None where no layer projects it."""
    made = []
    for stream, layers in (
        (text, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
        (latents, (attn.to_q, attn.to_k, attn.to_v)),
    ):
        shift, scale, *_ = stream.modulation
        x = recomputed(layernorm_modulate, stream.x, shift, scale, stream.eps)
        made.append(heads_of(attn, layers, x))
    of_text = norm_weights(attn.norm_added_q, attn.norm_added_k)
    q_weights, k_weights = zip(of_text, norm_weights(attn.norm_q, attn.norm_k), strict=True)
    qs = [next(of_stream) for of_stream in made]
    ks = [next(of_stream) for of_stream in made]
    q, k = normed(attn, qs, ks, (q_weights, k_weights), tables, mask)
    out_text, out = attend_streams(attn, q, k, [next(of_stream) for of_stream in made], mask)
    return attn.to_out[0](out), None if attn.to_add_out is None else attn.to_add_out(out_text)


def joint(attn: Any, latents: Stream, text: Stream, tables: Tables, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(latents, text) after one attention over both and a feed-forward of each."""
    out, out_text = joint_attention(attn, latents, text, tables, mask)
    texts = text.fed(text.attended(out_text))
    return latents.fed(latents.attended(out)), texts  # last, as recomputation does not repeat a block's last product


def modulation_of(norm: Any, temb: Tensor, count: int) -> tuple[Tensor, ...]:
    """`count` vectors [B, C] of one of diffusers' adaptive norms."""
    return norm.linear(norm.silu(temb)).chunk(count, 1)


def double(
    self: Any, x: Tensor, text: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(latents, text) of the double-stream blocks of FLUX.1 and HunyuanVideo."""
    latents = Stream(x, modulation_of(self.norm1, temb, 6), partial(feed_forward, self.ff))
    texts = Stream(text, modulation_of(self.norm1_context, temb, 6), partial(feed_forward, self.ff_context))
    return joint(self.attn, latents, texts, tables, mask)


def single(
    self: Any, text: Tensor, x: Tensor, temb: Tensor, tables: Tables, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(text, latents) of their single-stream blocks, which have attention and feed-forward side by side."""
    count = text.shape[1]
    x = join(text, x)
    shift, scale, gate = modulation_of(self.norm, temb, 3)
    normed = recomputed(layernorm_modulate, x, shift, scale, self.norm.norm.eps)
    ff = self.proj_mlp(normed)
    out = self_attention(self.attn, normed, tables, mask)
    out = self.proj_out(recomputed(beside_gelu, out, ff, self.act_mlp.approximate))
    return split(gated_residual(x, out, gate), count)


_made: Any = WeakTensorKeyDictionary()
"""Arguments that all blocks of a forward share → what the first block computed from them."""


def once(make: Callable[..., Tensor], shared: Tensor, *args: float) -> Tensor:
    """make(shared, *args), once for all blocks that are given the same tensor."""
    found = _made.setdefault(shared, {})
    key = (make, shared._version, *args)
    if key not in found:
        found[key] = make(shared, *args)
    return found[key]


def after_text(text: Tensor, tables: tuple[Tensor, Tensor]) -> Tables:
    """Tables of text [B, M, C] without positions, then of latents."""
    count = text.shape[1]
    cos, sin = tables
    return once(_padded, cos, count, 1.0), once(_padded, sin, count, 0.0)


def _padded(table: Tensor, count: int, fill: float) -> Tensor:
    """A table after `count` rows of one value."""
    return F.pad(table, (0, 0, count, 0), value=fill)


def joint_mask(mask: Tensor, count: int) -> Tensor:
    """Which of M + `count` tokens see which, [B, 1, M + count, M + count]; mask [B, M]: 0 for padding."""
    valid = F.pad(mask.bool(), (0, count), value=True)
    return valid[:, None, :, None] & valid[:, None, None]
