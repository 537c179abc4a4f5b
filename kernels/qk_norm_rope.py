"""RMS norm and rotary position embedding of queries and keys in Triton, and their gradient, in one launch each.

A program has the queries and the keys of some heads of one token, so that a row of the tables is read once for both.
Heads are read and written in 128-bit accesses, and the pairs that are rotated are separated in registers. Invariants as
in layernorm_modulate.py.
"""

import torch
import triton
import triton.language as tl

from prefgrpo.kernels.layernorm_modulate import ROWS
from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import load_fp32, store_rounded


@triton.jit
def load_pairs(ptr, keep, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second channels of all pairs, [N, HALF] each, of the rows at `ptr` [N, 1]."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * HALF)[None, :]
        return tl.split(tl.reshape(load_fp32(ptr + c, keep & (c < D)), (keep.shape[0], HALF, 2)))
    else:
        c = tl.arange(0, HALF)[None, :]
        mask = keep & (c < D // 2)
        return load_fp32(ptr + c, mask), load_fp32(ptr + D // 2 + c, mask)


@triton.jit
def store_pairs(ptr, a, b, keep, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store what `load_pairs` loads."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * HALF)[None, :]
        store_rounded(ptr + c, tl.interleave(a, b), keep & (c < D))
    else:
        c = tl.arange(0, HALF)[None, :]
        mask = keep & (c < D // 2)
        store_rounded(ptr + c, a, mask)
        store_rounded(ptr + D // 2 + c, b, mask)


@triton.jit
def load_table(
    ptr, stride, keep, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr
):  # fmt: skip
    """A token's row of cos or sin for the first and the second channels, of every head."""
    if PER_PAIR:
        c = tl.arange(0, HALF)[None, :]
        t = tl.load(ptr + c * stride, mask=keep & (c < D // 2), other=0.0)
        return t, t
    else:
        return load_pairs(ptr, keep, D, HALF, INTERLEAVED)


@triton.jit
def mean(t, D: tl.constexpr, H: tl.constexpr, ACROSS: tl.constexpr):
    """Sum of [N, HALF] over the pairs of each head divided by D, [N, 1], or over all heads by H·D."""
    sums = tl.sum(t, axis=1)
    if ACROSS:
        return tl.div_rn(tl.sum(sums, axis=0), H * D * 1.0)
    else:
        return tl.div_rn(sums, D * 1.0)[:, None]


@triton.jit
def norm_and_rotate(
    a, b, ga, gb, w_ptr, out_ptr, ca, cb, sa, sb, h, keep, eps, dwa, dwb,
    D: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    ACROSS: tl.constexpr, ROPE: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """Store the queries or the keys of one token at `out_ptr` [N, 1], or with GRAD their gradient; dwa and dwb with its
    summands added."""
    if GRAD and ROPE:
        turned = ga * ca + gb * sb
        gb = gb * cb - ga * sa
        ga = turned
    if NORM:
        r = tl.div_rn(1.0, tl.sqrt_rn(mean(a * a + b * b, D, H, ACROSS) + eps))
        a = a * r
        b = b * r
        wa, wb = load_pairs(w_ptr + (h * D if ACROSS else h * 0), keep, D, HALF, INTERLEAVED)
        if GRAD:
            dwa += ga * a
            dwb += gb * b
            ga = ga * wa
            gb = gb * wb
            dot = mean(ga * a + gb * b, D, H, ACROSS)
            ga = r * (ga - a * dot)
            gb = r * (gb - b * dot)
        else:
            a = a * wa
            b = b * wb
    if GRAD:
        a = ga
        b = gb
    elif ROPE:
        turned = a * ca - b * sa
        b = b * cb + a * sb
        a = turned
    store_pairs(out_ptr, a, b, keep, D, HALF, INTERLEAVED)
    return dwa, dwb


@triton.jit(do_not_specialize=["rows", "tokens"])
def qk_kernel(
    q_ptr, k_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, gq_ptr, gk_ptr, q_out_ptr, k_out_ptr, partial_ptr, rows, tokens,
    q_batch, q_token, k_batch, k_token, table_batch, table_token, table_pair,
    gq_batch, gq_token, gk_batch, gk_token, qo_batch, qo_token, ko_batch, ko_token, q_group, k_group, eps,
    D: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, ACROSS: tl.constexpr, ROPE: tl.constexpr, PER_PAIR: tl.constexpr, GRAD: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of ROWS tokens, of queries, keys or both. WEIGHTS: also their sum [H, D] of the weights' gradient.

    Results, or with GRAD their gradients, have GROUP heads of a token side by side, and the next ones q_group on.
    """
    pid = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    keep = h < H
    q_head = h * D
    k_head = h * D
    if GROUP < H:
        q_head = (h // GROUP).to(tl.int64) * q_group + h % GROUP * D
        k_head = (h // GROUP).to(tl.int64) * k_group + h % GROUP * D
    dwa = tl.zeros((HEADS, HALF), tl.float32)
    dwb = tl.zeros((HEADS, HALF), tl.float32)
    for row in range(pid * ROWS, tl.minimum(pid * ROWS + ROWS, rows)):
        i = row // tokens
        s = row % tokens
        ca = 0.0
        cb = 0.0
        sa = 0.0
        sb = 0.0
        if ROPE:
            at = i * table_batch + s * table_token + h * 0  # of tiles of one layout, none is exchanged between threads
            ca, cb = load_table(cos_ptr + at, table_pair, keep, D, HALF, INTERLEAVED, PER_PAIR)
            sa, sb = load_table(sin_ptr + at, table_pair, keep, D, HALF, INTERLEAVED, PER_PAIR)
        q_at = q_ptr + i * q_batch + s * q_token + h * D
        k_at = k_ptr + i * k_batch + s * k_token + h * D
        gq_at = gq_ptr + i * gq_batch + s * gq_token + q_head
        gk_at = gk_ptr + i * gk_batch + s * gk_token + k_head
        q_out_at = q_out_ptr + i * qo_batch + s * qo_token + (h * D if GRAD else q_head)
        k_out_at = k_out_ptr + i * ko_batch + s * ko_token + (h * D if GRAD else k_head)
        # all of a token's loads before the first store, which waits for a norm
        qa, qb = load_pairs(q_at, keep & QUERIES, D, HALF, INTERLEAVED)
        ka, kb = load_pairs(k_at, keep & KEYS, D, HALF, INTERLEAVED)
        gqa, gqb = load_pairs(gq_at, keep & QUERIES, D, HALF, INTERLEAVED) if GRAD else (qa, qb)
        gka, gkb = load_pairs(gk_at, keep & KEYS, D, HALF, INTERLEAVED) if GRAD else (ka, kb)
        if QUERIES:
            dwa, dwb = norm_and_rotate(
                qa, qb, gqa, gqb, qw_ptr, q_out_at, ca, cb, sa, sb, h, keep, eps, dwa, dwb, D, H, HALF, INTERLEAVED,
                NORM, ACROSS, ROPE, GRAD,
            )  # fmt: skip
        if KEYS:
            dwa, dwb = norm_and_rotate(
                ka, kb, gka, gkb, kw_ptr, k_out_at, ca, cb, sa, sb, h, keep, eps, dwa, dwb, D, H, HALF, INTERLEAVED,
                NORM, ACROSS, ROPE, GRAD,
            )  # fmt: skip
    if WEIGHTS:
        store_pairs(partial_ptr + (pid * H + h) * D, dwa, dwb, keep, D, HALF, INTERLEAVED)


def _launch(q, k, q_weight, k_weight, cos, sin, eps, interleaved, grads, outs, rows, partials):
    """Run the kernel, once for queries and keys or, with their weights' partial sums, once for each."""
    batch, tokens, heads, dim = q.shape
    norm = q_weight is not None
    across = norm and q_weight.numel() != dim
    block = triton.next_power_of_2(heads) if across else min(8, triton.next_power_of_2(heads))
    width = max(2, triton.next_power_of_2(dim))
    interleaved = interleaved or cos is None
    threads = block * width // (8 if interleaved and not across else 16)  # which load 128 bits each
    table = (0, 0, 1) if cos is None else (cos.stride(0) if cos.dim() == 3 else 0, *cos.stride()[-2:])
    is_grad = grads[0] is not q
    wants_q, wants_k = (out is not None for out in outs)
    outs = (outs[0] if wants_q else q, outs[1] if wants_k else k)
    grouped = grads if is_grad else outs
    strides = [stride for t in (*grads, *outs) for stride in t.stride()[:2]] + [t.stride(2) for t in grouped]
    # an absent tensor is replaced by one that the kernel then does not read
    weights = (q_weight, k_weight) if norm else (q, q)
    tables = (q, q) if cos is None else (cos, sin)
    for n, partial in enumerate(partials or [None]):
        qk_kernel[(triton.cdiv(batch * tokens, rows), triton.cdiv(heads, block))](
            q, k, *weights, *tables, *grads, *outs, q if partial is None else partial, batch * tokens, tokens,
            *q.stride()[:2], *k.stride()[:2], *table, *strides, eps,
            D=dim, H=heads, GROUP=grouped[0].shape[3], HALF=width // 2, HEADS=block, INTERLEAVED=interleaved, NORM=norm,
            ACROSS=across, ROPE=cos is not None, PER_PAIR=cos is not None and cos.shape[-1] != dim,
            GRAD=is_grad, ROWS=rows, QUERIES=n == 0 and wants_q, KEYS=(n == 1 or not partials) and wants_k,
            WEIGHTS=partial is not None, num_warps=min(16, max(1, threads // 32)), **FLAGS,
        )  # fmt: skip


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved, q_out, k_out):
    """q_out and k_out [B, S, G, H / G, D], which may be some of the tokens of longer tensors."""
    _launch(q, k, q_weight, k_weight, cos, sin, eps, interleaved, (q, k), (q_out, k_out), 1, ())


def qk_norm_rope_grad(q, k, q_weight, k_weight, cos, sin, eps, interleaved, gq, gk, dq, dk, d_q_weight, d_k_weight):
    """dq, dk and both gradients of the weights, each unless None; gq and gk as q_out and k_out."""
    batch, tokens, heads, dim = q.shape
    wanted = () if d_q_weight is None else (d_q_weight, d_k_weight)
    chunks = triton.cdiv(batch * tokens, ROWS)
    partials = [q.new_empty(chunks, heads, dim, dtype=torch.float32) for _ in wanted]
    rows = ROWS if wanted else 1
    _launch(q, k, q_weight, k_weight, cos, sin, eps, interleaved, (gq, gk), (dq, dk), rows, partials)
    for out, partial in zip(wanted, partials, strict=True):
        out.copy_(partial.sum((0, 1)) if out.numel() == dim else partial.sum(0).flatten())
