"""LayerNorm and modulation in Triton: one program per token, which reads x once and writes once.

Invariants: as in sde_step.py, 16-bit values are fp32 from load to store, nothing is contracted, and kernels are not
autotuned, so that a result depends on a token alone: not on the batch, nor on whether a gradient is wanted. The
gradients of shift and scale are sums of a fixed number of tokens each, added in a fixed order.
"""

import torch
import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import load_fp32, store_rounded

ROWS = 32
"""Tokens of one partial sum."""
FEWER_ROWS = 16
"""The same where a program has whole tokens, of which few fit on a GPU: FLUX's 2 × 4,608 are 48 in a row on an H100's
264 places, not 64."""


@triton.jit
def rows_of(tokens, ROWS: tl.constexpr):
    """(sample, first token) of a program that has ROWS tokens of one sample."""
    chunks = tl.cdiv(tokens, ROWS)
    pid = tl.program_id(0).to(tl.int64)
    return pid // chunks, pid % chunks * ROWS


@triton.jit
def normalised(x, mask, eps, C: tl.constexpr):
    """((x − mean)/√(variance + eps), 1/√(variance + eps)) of one token."""
    d = tl.where(mask, x - tl.div_rn(tl.sum(x, axis=0), C * 1.0), 0.0)
    variance = tl.div_rn(tl.sum(d * d, axis=0), C * 1.0)
    r = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return d * r, r


@triton.jit(do_not_specialize=["tokens"])
def modulate_kernel(
    x_ptr, shift_ptr, scale_ptr, y_ptr, tokens, x_batch, x_token, shift_batch, scale_batch, eps,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one token."""
    row = tl.program_id(0).to(tl.int64)
    b = row // tokens
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = load_fp32(x_ptr + b * x_batch + row % tokens * x_token + c, mask)
    n, _ = normalised(x, mask, eps, C)
    scale = load_fp32(scale_ptr + b * scale_batch + c, mask)  # late: fewer registers
    shift = load_fp32(shift_ptr + b * shift_batch + c, mask)
    store_rounded(y_ptr + row * C + c, n * (1.0 + scale) + shift, mask)


@triton.jit(do_not_specialize=["tokens"])
def modulate_grad_kernel(
    x_ptr, scale_ptr, g_ptr, dx_ptr, partial_ptr, tokens, x_batch, x_token, scale_batch, g_batch, g_token, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """dx of ROWS tokens of one sample; VECTORS: also their sums of the gradients of shift and scale."""
    b, first = rows_of(tokens, ROWS)
    c = tl.arange(0, BLOCK)
    mask = c < C
    scale = 1.0 + load_fp32(scale_ptr + b * scale_batch + c, mask)
    d_shift = tl.zeros((BLOCK,), tl.float32)
    d_scale = tl.zeros((BLOCK,), tl.float32)
    for s in range(first, tl.minimum(first + ROWS, tokens)):
        g = load_fp32(g_ptr + b * g_batch + s * g_token + c, mask)
        n, r = normalised(load_fp32(x_ptr + b * x_batch + s * x_token + c, mask), mask, eps, C)
        q = g * scale
        mean_q = tl.div_rn(tl.sum(q, axis=0), C * 1.0)
        mean_qn = tl.div_rn(tl.sum(q * n, axis=0), C * 1.0)
        store_rounded(dx_ptr + (b * tokens + s) * C + c, r * (q - mean_q - n * mean_qn), mask)
        if VECTORS:
            d_shift += g
            d_scale += g * n
    if VECTORS:
        at = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * C + c
        tl.store(at, d_shift, mask=mask)
        tl.store(at + C, d_scale, mask=mask)


def blocks_of(channels):
    """BLOCK of a row, and the warps that give each thread 16 of its elements."""
    block = triton.next_power_of_2(channels)
    return {"C": channels, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def layernorm_modulate(x, shift, scale, eps, y):
    """y [B, S, C]."""
    batch, tokens, channels = x.shape
    modulate_kernel[(batch * tokens,)](
        x, shift, scale, y, tokens, *x.stride()[:2], shift.stride(0), scale.stride(0), eps,
        **blocks_of(channels), **FLAGS,
    )  # fmt: skip


def launch_grad(kernel, columns, rows, tensors, strides, vectors, **options):
    """Run a gradient's kernel over the tokens of tensors[-1] [B, S, C], in programs of C / columns channels, and add up
    the partial sums, over `rows` tokens each, of the gradients of vectors [B, C], unless they are None."""
    batch, tokens, channels = tensors[-1].shape
    wanted = any(out is not None for out in vectors)
    rows = rows if wanted else 1
    chunks = triton.cdiv(tokens, rows)
    sizes = (batch, chunks, len(vectors), channels) if wanted else 1
    partial = tensors[-1].new_empty(sizes, dtype=torch.float32)
    kernel[(batch * chunks, columns)](
        *tensors, partial, tokens, *strides, ROWS=rows, VECTORS=wanted, **options, **FLAGS
    )
    for n, out in enumerate(vectors):
        if out is not None:
            out.copy_(partial[:, :, n].sum(1))


def layernorm_modulate_grad(x, scale, g, eps, dx, d_shift, d_scale):
    """dx [B, S, C] and, unless they are None, the gradients of shift and scale [B, C]."""
    vectors = (d_shift, d_scale)
    strides = (*x.stride()[:2], scale.stride(0), *g.stride()[:2], eps)
    options = blocks_of(x.shape[2])
    if (d_shift is not None or d_scale is not None) and not torch.version.hip:  # an option of Triton for NVIDIA only
        options["maxnreg"] = 128
    launch_grad(modulate_grad_kernel, 1, FEWER_ROWS, (x, scale, g, dx), strides, vectors, **options)
