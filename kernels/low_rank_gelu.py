"""gelu(x + small · upᵀ) in Triton, and its gradient: one program per tile, which reads x once and writes once.

Invariants as in layernorm_modulate.py: an element depends on its row and its column alone.
"""

import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import INTERPRETED, load_fp32, store_rounded

DEPTH = 64
"""Channels of `small` in one step of its product."""


@triton.jit
def load_factor(ptr, mask):
    """Load a factor of a product as it is; the interpreter multiplies bf16 as integers."""
    if INTERPRETED:
        return load_fp32(ptr, mask)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def low_rank_gelu_kernel(
    x_ptr, small_ptr, up_ptr, g_ptr, out_ptr, rows, small_row,
    C: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """A tile [BM, BN] of gelu(z), or with GRAD of g · gelu'(z); R is 0 where nothing is added."""
    m = (tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    mask = (m < rows) & (n < C)
    z = load_fp32(x_ptr + m * C + n, mask)
    if R > 0:
        k = tl.arange(0, BK)
        low = tl.zeros((BM, BN), tl.float32)
        for start in range(0, R, BK):
            of_row = start + k[None, :]
            of_column = start + k[:, None]
            a = load_factor(small_ptr + m * small_row + of_row, (m < rows) & (of_row < R))
            b = load_factor(up_ptr + n * R + of_column, (n < C) & (of_column < R))
            low = tl.dot(a, b, low, input_precision="ieee")
        z += low
    square = z * z
    turn = z * (1.5957691216057308 + 0.07135481627159929 * square)  # 2 √(2/π) (z + .044715 z³)
    s = 1.0 / (1.0 + tl.exp(-turn))  # (1 + tanh(turn / 2)) / 2
    if GRAD:
        slope = 1.5957691216057308 + 0.21406444881479785 * square
        y = load_fp32(g_ptr + m * C + n, mask) * (s + z * s * (1.0 - s) * slope)
    else:
        y = z * s
    store_rounded(out_ptr + m * C + n, y, mask)


def _launch(x, small, up, g, out):
    rows, channels = x.shape
    rank = 0 if small is None else small.shape[1]
    side = 128 if x.element_size() == 2 else 32
    warps = 8 if x.element_size() == 2 else 4
    low = (x, x) if small is None else (small, up)
    low_rank_gelu_kernel[(triton.cdiv(channels, side), triton.cdiv(rows, side))](
        x, *low, g, out, rows, low[0].stride(0), C=channels, R=rank, BM=side, BN=side,
        BK=min(DEPTH, max(16, triton.next_power_of_2(rank))), GRAD=g is not x, num_warps=warps, **FLAGS,
    )  # fmt: skip


def low_rank_gelu(x, small, up, out):
    """out [N, C]."""
    _launch(x, small, up, x, out)


def low_rank_gelu_grad(x, small, up, g, dz):
    """dz [N, C], the gradient of x + small · upᵀ."""
    _launch(x, small, up, g, dz)
