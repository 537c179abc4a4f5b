"""RMS norm and rotary position embedding of queries and keys, in one launch.

    n = x/√(mean(x²) + eps) · weight        y = n · cos + turned(n) · sin

turned(n) is (−b, a) for a pair (a, b): neighbouring channels, or channels d and d + D/2. In Triton, y is computed in
fp32 and rounded once; the reference rounds where diffusers' modules do. Backward keeps q and k before the norm, and
computes the norms again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import DTYPES, aligned


def reference_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """torch.nn.RMSNorm of [B, S, H, D] over each head, or with H·D weights over all heads, as Wan's; in fp32 where the
    weights are, as FLUX.3's."""
    if weight is None:
        return x
    dtype = torch.promote_types(x.dtype, weight.dtype)
    x = x.to(dtype)
    weight = weight.to(dtype)
    if weight.numel() == x.shape[-1]:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.flatten(2), weight.shape, weight, eps).unflatten(2, x.shape[2:])


def reference_rope(x: Tensor, cos: Tensor | None, sin: Tensor | None, use_real_unbind_dim: int) -> Tensor:
    """diffusers' apply_rotary_emb of [B, S, H, D]."""
    if cos is None or sin is None:
        return x
    cos, sin = (_per_channel(t, x.shape[-1], use_real_unbind_dim).unsqueeze(-2) for t in (cos, sin))
    if use_real_unbind_dim == -1:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-b, a], dim=-1).flatten(3)
    else:
        a, b = x.unflatten(-1, (2, -1)).unbind(-2)
        turned = torch.cat([-b, a], dim=-1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(dtype) * cos + turned.to(dtype) * sin).to(x.dtype)


def _per_channel(table: Tensor, dim: int, use_real_unbind_dim: int) -> Tensor:
    """A table […, D/2] of one value per pair as [..., D]."""
    if table.shape[-1] == dim:
        return table
    return table.repeat_interleave(2, -1) if use_real_unbind_dim == -1 else torch.cat([table, table], -1)


def reference_norm_rope(
    parts: Sequence[Any], cos: Tensor | None, sin: Tensor | None, eps: float, use_real_unbind_dim: int, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Queries and keys of the streams (q, k, q_weight, k_weight, …): each normed, joined, then rotated."""

    def one(heads: Sequence[Any], weights: Sequence[Any]) -> Tensor:
        joined = torch.cat([reference_norm(x, w, eps) for x, w in zip(heads, weights, strict=True)], 1)
        turned = reference_rope(joined, cos, sin, use_real_unbind_dim).to(parts[0].dtype)
        if groups == 1:
            return turned
        return turned.unflatten(2, (groups, -1)).permute(2, 1, 0, 3, 4).contiguous()

    return one(parts[::4], parts[2::4]), one(parts[1::4], parts[3::4])


# ---- custom ops: one stream of tokens
@op("qk_norm_rope", mutates=("q_out", "k_out"))
def _norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    eps: float, interleaved: bool, q_out: Tensor, k_out: Tensor,
) -> None:  # fmt: skip
    if q.numel():
        inputs = (_heads(q), _heads(k), aligned(q_weight), aligned(k_weight), *_tables(q, cos, sin), eps, interleaved)
        launch("triton", "qk_norm_rope", q, *inputs, q_out, k_out)


@op("qk_norm_rope_grad", mutates=("dq", "dk", "d_q_weight", "d_k_weight"))
def _grad(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    eps: float, interleaved: bool, gq: Tensor, gk: Tensor, dq: Tensor | None, dk: Tensor | None,
    d_q_weight: Tensor | None, d_k_weight: Tensor | None,
) -> None:  # fmt: skip
    inputs = (_heads(q), _heads(k), aligned(q_weight), aligned(k_weight), *_tables(q, cos, sin), eps, interleaved)
    launch("triton", "qk_norm_rope_grad", q, *inputs, _heads(gq), _heads(gk), dq, dk, d_q_weight, d_k_weight)


def _heads(t: Tensor) -> Tensor:
    """`t` […, H, D], copied unless its last two dimensions are contiguous and it begins on 16 bytes."""
    is_whole = t.stride(-1) == 1 and t.stride(-2) == t.shape[-1]
    return t if is_whole and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _by_token(t: Tensor, groups: int) -> Tensor:
    """A result, or its gradient, viewed as [B, S, groups, H / groups, D]."""
    return t.unsqueeze(2) if groups == 1 else t.permute(2, 1, 0, 3, 4)


def _tables(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The tables as a kernel reads them: per pair with any stride, as the parts of a complex table have it."""
    if cos is None or sin is None or (cos.shape[-1] != q.shape[3] and cos.stride() == sin.stride()):
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _split(parts: Sequence[Any], *tables: Tensor | None) -> Iterator[tuple[slice, Sequence[Any], list[Any]]]:
    """For each stream: its tokens in the result, (q, k, q_weight, k_weight), and its rows of the tables."""
    start = 0
    for n in range(0, len(parts), 4):
        stop = start + parts[n].shape[1]
        yield slice(start, stop), parts[n : n + 4], [None if t is None else t[..., start:stop, :] for t in tables]
        start = stop


def _run(
    eps: float, interleaved: bool, groups: int, cos: Tensor | None, sin: Tensor | None, *parts: Any
) -> tuple[Tensor, Tensor]:
    """Queries and keys of the streams (q, k, q_weight, k_weight, …)."""
    batch, _, heads, dim = parts[0].shape
    tokens = sum(q.shape[1] for q in parts[::4])
    shape = (batch, tokens, heads, dim) if groups == 1 else (groups, tokens, batch, heads // groups, dim)
    q_out = parts[0].new_empty(shape)
    k_out = parts[0].new_empty(shape)
    by_token = [_by_token(out, groups) for out in (q_out, k_out)]
    for place, stream, tables in _split(parts, cos, sin):
        _norm_rope(*stream, *tables, eps, interleaved, *(out[:, place] for out in by_token))
    return q_out, k_out


class _NormRope(torch.autograd.Function):
    """`_run`, differentiable in queries, keys and weights."""

    @staticmethod
    def forward(ctx: Any, eps: float, interleaved: bool, groups: int, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.options = (eps, interleaved)
        ctx.groups = groups
        ctx.save_for_backward(*tensors)
        return _run(eps, interleaved, groups, *tensors)

    @staticmethod
    def backward(ctx: Any, gq: Tensor, gk: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("qk_norm_rope cannot be differentiated twice")
        cos, sin, *parts = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        by_token = [_by_token(grad, ctx.groups) for grad in (gq, gk)]
        grads: list[Tensor | None] = []
        for place, stream, tables in _split(parts, cos, sin):
            q, k, *weights = stream
            of_stream = wanted[len(grads) : len(grads) + 4]
            wants_weights = any(of_stream[2:])
            made = [t.new_empty(t.shape) if wants_weights or wants else None for t, wants in zip((q, k), of_stream)]
            made += [w.new_empty(w.shape) if wants_weights else None for w in weights]
            if any(of_stream):
                _grad(*stream, *tables, *ctx.options, *(grad[:, place] for grad in by_token), *made)
            grads += made
        return None, None, None, None, None, *grads


# ---- public function
Streams = Tensor | Sequence[Tensor]
NormWeights = Tensor | None | Sequence[Tensor | None]


def qk_norm_rope(
    q: Streams, k: Streams, q_weight: NormWeights, k_weight: NormWeights, cos: Tensor | None, sin: Tensor | None,
    eps: float = 1e-6, *, use_real_unbind_dim: int = -1, groups: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys after RMS norm and rotary embedding, contiguous [B, S, H, D]; differentiable once, in all but
    the tables.

    q, k: [B, S, H, D] bf16 or fp32 (fp16 and fp64: in torch); slices of a wider projection are read in place. Sequences
    of them are streams with weights of their own, which are joined along S, as by torch.cat. Weights in q's dtype or in
    fp32: [D], or [H·D] for a norm over all heads (Wan), or both None for no norm. cos, sin: fp32 [S, D] or, with one
    value per pair, [S, D/2], over all streams; [B, S, …] if they differ between samples; None for no rotation. For a
    complex table (Qwen-Image, Z-Image) pass .real and .imag. `use_real_unbind_dim` as in diffusers' apply_rotary_emb:
    −1 pairs neighbouring channels, −2 channels d and d + D/2. `groups` above 1: the results are contiguous
    [groups, S, B, H / groups, D], as Ulysses sends them: one group of heads per process. Raises ValueError for
    arguments that do not fit together.
    """
    joined = ([q], [k], [q_weight], [k_weight]) if isinstance(q, Tensor) else (q, k, q_weight, k_weight)
    parts: list[Any] = [t for stream in zip(*joined, strict=True) for t in stream]
    _check(parts, cos, sin, use_real_unbind_dim, groups)
    first = parts[0]
    if triton_or_torch(first.device, first.dtype) == "torch":
        return reference_norm_rope(parts, cos, sin, eps, use_real_unbind_dim, groups)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)
    run: Any = _NormRope.apply if needs_grad else _run
    return run(eps, use_real_unbind_dim == -1, groups, cos, sin, *parts)


def _check(parts: list[Any], cos: Tensor | None, sin: Tensor | None, use_real_unbind_dim: int, groups: int) -> None:
    """Raise ValueError unless the streams (q, k, q_weight, k_weight, …) and the tables fit together."""
    q, _, weight, _ = parts[:4]
    if q.dim() != 4 or q.dtype not in DTYPES:
        raise ValueError(f"q: expected fp32, bf16, fp16 or fp64 [B, S, H, D], got {q.dtype} {list(q.shape)}")
    batch, _, heads, dim = q.shape
    width = dim if weight is None or weight.shape == (dim,) else heads * dim
    for n, t in enumerate(parts):
        name = ("q", "k", "q_weight", "k_weight")[n % 4]
        want = (batch, parts[n - n % 4].shape[1], heads, dim) if n % 4 < 2 else (width,)
        if (t is None) != (n % 4 > 1 and weight is None):
            raise ValueError(
                f"{name}: expected a weight for every q and k, or none; got {'none' if t is None else 'one'}"
            )
        allowed = (q.dtype,) if n % 4 < 2 else (q.dtype, torch.float32)
        if t is not None and (t.dtype not in allowed or (t.shape, t.device) != (want, q.device)):
            found = f"{t.dtype} {list(t.shape)} on {t.device}"
            raise ValueError(f"{name}: expected {q.dtype} {list(want)} on {q.device}, got {found}")
    tokens = sum(t.shape[1] for t in parts[::4])
    dtype = torch.promote_types(q.dtype, torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        if (table is None) != (cos is None):
            raise ValueError("cos and sin: expected both or none")
        if table is None:
            continue
        is_shaped = table.shape[-2:] in ((tokens, dim), (tokens, dim // 2)) and table.shape[:-2] in ((), (batch,))
        if not is_shaped or (table.dtype, table.device, table.requires_grad) != (dtype, q.device, False):
            found = f"{table.dtype} {list(table.shape)} on {table.device}"
            want_table = f"{dtype} [{tokens}, {dim}] or [{tokens}, {dim // 2}] on {q.device} without gradient"
            raise ValueError(f"{name}: expected {want_table}, got {found}")
    if use_real_unbind_dim not in (-1, -2):
        raise ValueError(f"use_real_unbind_dim: expected -1 or -2, got {use_real_unbind_dim}")
    if groups < 1 or heads % groups:
        raise ValueError(f"groups: expected a divisor of the {heads} heads, got {groups}")
