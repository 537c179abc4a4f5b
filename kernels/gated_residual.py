"""x + gate·y in Triton, and its gradient; rounded as in layernorm_modulate.py, whose invariants hold here too."""

import torch
import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import load_fp32, store_rounded

BLOCK = 1024
"""Channels of a program; 16 per thread."""
ROWS = 32
"""Tokens of one partial sum of the gate's gradient."""


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
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """dy of ROWS tokens of one sample; GATE: also their sum of the gradient of the gate."""
    chunks = tl.cdiv(tokens, ROWS)
    pid = tl.program_id(0).to(tl.int64)
    b = pid // chunks
    first = pid % chunks * ROWS
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gate = load_fp32(gate_ptr + b * gate_batch + c, mask)
    d_gate = tl.zeros((BLOCK,), tl.float32)
    for s in range(first, tl.minimum(first + ROWS, tokens)):
        g = load_fp32(g_ptr + b * g_batch + s * g_token + c, mask)
        store_rounded(dy_ptr + (b * tokens + s) * C + c, gate * g, mask)
        if GATE:
            d_gate += g * load_fp32(y_ptr + b * y_batch + s * y_token + c, mask)
    if GATE:
        tl.store(partial_ptr + pid * C + c, d_gate, mask=mask)


def gated_residual(x, y, gate, out):
    """out [B, S, C]."""
    batch, tokens, channels = x.shape
    residual_kernel[(batch * tokens, triton.cdiv(channels, BLOCK))](
        x, y, gate, out, tokens, *x.stride()[:2], *y.stride()[:2], gate.stride(0), C=channels, BLOCK=BLOCK,
        num_warps=2, **FLAGS,
    )  # fmt: skip


def gated_residual_grad(y, gate, g, dy, d_gate):
    """dy [B, S, C] and, unless it is None, the gradient of the gate [B, C], for which y is read."""
    batch, tokens, channels = g.shape
    rows = 1 if d_gate is None else ROWS
    chunks = triton.cdiv(tokens, rows)
    partial = gate if d_gate is None else g.new_empty(batch, chunks, channels, dtype=torch.float32)
    y = g if d_gate is None else y
    residual_grad_kernel[(batch * chunks, triton.cdiv(channels, BLOCK))](
        y, gate, g, dy, partial, tokens, *y.stride()[:2], gate.stride(0), *g.stride()[:2], C=channels, BLOCK=BLOCK,
        ROWS=rows, GATE=d_gate is not None, num_warps=2, **FLAGS,
    )  # fmt: skip
    if d_gate is not None:
        d_gate.copy_(partial.sum(1))
