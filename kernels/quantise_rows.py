"""Rows in fp8 in Triton, and back: one program per row, which reads it once and writes it once.

Invariants: as in layernorm_modulate.py; the largest element of a row does not depend on an order.
"""

import triton
import triton.language as tl

from prefgrpo.kernels.layernorm_modulate import blocks_of
from prefgrpo.kernels.noise import FLAGS
from prefgrpo.kernels.sde_step import INTERPRETED, load_fp32, store_rounded


@triton.jit
def e4m3(x):
    """fp32 of at most 448 in e4m3, rounded to nearest even; NaN stays."""
    if INTERPRETED:  # its conversion rounds otherwise
        bits = x.to(tl.uint32, bitcast=True)
        u = bits & 0x7FFFFFFF
        normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120 << 3)
        steps = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # of 2⁻⁹, which subnormal numbers have
        word = tl.where(u < 0x3C800000, steps, tl.where(u > 0x7F800000, 0x7F, normal))
        return (word | ((bits >> 31) << 7)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def quantise_kernel(x_ptr, y_ptr, scale_ptr, x_row, C: tl.constexpr, BLOCK: tl.constexpr):
    """y and the scale of one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = load_fp32(x_ptr + row * x_row + c, mask)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30), 448.0)
    scale = tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), scale)  # which tl.max ignores
    tl.store(y_ptr + row * C + c, e4m3(tl.div_rn(x, scale)), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantise_rows(x, y, scale):
    """y [N, K] in e4m3, scale [N, 1]."""
    rows, channels = x.shape
    quantise_kernel[(rows,)](x, y, scale, x.stride(0), **blocks_of(channels), **FLAGS)


@triton.jit
def from_e4m3(byte):
    """The number of e4m3 as fp32, exactly, also where the GPU has no instructions for it."""
    low = byte.to(tl.uint32) & 0x7F
    x = ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    x = tl.where(low < 8, low.to(tl.float32) * 0.001953125, x)  # subnormal: steps of 2⁻⁹
    x = tl.where(low == 0x7F, float("nan"), x)
    return tl.where(byte > 0x7F, -x, x)


@triton.jit
def dequantise_kernel(byte_ptr, scale_ptr, x_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    """One row times its scale."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    byte = tl.load(byte_ptr + row * C + c, mask=mask, other=0)
    store_rounded(x_ptr + row * C + c, from_e4m3(byte) * tl.load(scale_ptr + row), mask)


def dequantise_rows(bytes_, scale, x):
    """x [N, K] from the bytes of y [N, K] in e4m3 and scale [N, 1]."""
    rows, channels = x.shape
    dequantise_kernel[(rows,)](bytes_, scale, x, **blocks_of(channels), **FLAGS)
