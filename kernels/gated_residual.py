"""x + gate·y in Triton, and its gradient; rounded as in layernorm_modulate.py, whose invariants hold here too."""

import triton
import triton.language as tl

from prefgrpo.kernels.layernorm_modulate import ROWS, launch_grad, rows_of
from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import load_fp32, store_rounded

BLOCK = 1024
"""Channels of a program; 16 per thread."""


@triton.jit(do_not_specialize=["tokens"])
def residual_kernel(
    x_ptr, y_ptr, gate_ptr, out_ptr, tokens, x_batch, x_token, y_batch, y_token, gate_batch,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one token."""
    row = tl.program_id(0).to(tl.int64)
    b = row // tokens
    s = row % tokens
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gate = load_fp32(gate_ptr + b * gate_batch + c, mask)
    y = load_fp32(y_ptr + b * y_batch + s * y_token + c, mask)
    x = load_fp32(x_ptr + b * x_batch + s * x_token + c, mask)
    store_rounded(out_ptr + row * C + c, x + gate * y, mask)


@triton.jit(do_not_specialize=["tokens"])
def residual_grad_kernel(
    y_ptr, gate_ptr, g_ptr, dy_ptr, partial_ptr, tokens, y_batch, y_token, gate_batch, g_batch, g_token,
    DY: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """DY: dy of ROWS tokens of one sample; VECTORS: their sum of the gradient of the gate."""
    b, first = rows_of(tokens, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gate = load_fp32(gate_ptr + b * gate_batch + c, mask)
    d_gate = tl.zeros((BLOCK,), tl.float32)
    for s in range(first, tl.minimum(first + ROWS, tokens)):
        g = load_fp32(g_ptr + b * g_batch + s * g_token + c, mask)
        if DY:
            store_rounded(dy_ptr + (b * tokens + s) * C + c, gate * g, mask)
        if VECTORS:
            d_gate += g * load_fp32(y_ptr + b * y_batch + s * y_token + c, mask)
    if VECTORS:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * C + c, d_gate, mask=mask)


def gated_residual(x, y, gate, out):
    """out [B, S, C]."""
    batch, tokens, channels = x.shape
    residual_kernel[(batch * tokens, triton.cdiv(channels, BLOCK))](
        x, y, gate, out, tokens, *x.stride()[:2], *y.stride()[:2], gate.stride(0), C=channels, BLOCK=BLOCK,
        num_warps=2, **FLAGS,
    )  # fmt: skip


def gated_residual_grad(y, gate, g, dy, d_gate):
    """dy [B, S, C] and the gradient of the gate [B, C], for which y is read; each unless it is None."""
    y = g if y is None else y
    strides = (*y.stride()[:2], gate.stride(0), *g.stride()[:2])
    columns = triton.cdiv(g.shape[2], BLOCK)
    options = {"DY": dy is not None, "C": g.shape[2], "BLOCK": BLOCK, "num_warps": 2}
    tensors = (y, gate, g, g if dy is None else dy)
    launch_grad(residual_grad_kernel, columns, ROWS, tensors, strides, (d_gate,), **options)
