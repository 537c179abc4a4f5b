"""Counter-based noise in Triton: Philox4x32-10 and, operation by operation, the map to N(0, 1) of csrc/math.h.

Invariant: launches use enable_fp_fusion=False and every fused multiply-add is explicit, so a GPU is bitwise equal to
the C++ kernels; the interpreter rounds an fma twice and stays within 1e-6 of them.
"""

import triton
import triton.language as tl

FLAGS = {"enable_fp_fusion": False}
"""Of every launch."""
BLOCK = 2048


@triton.jit
def uniform(word):
    """((w >> 9) + ½)·2⁻²³, built from the bits of 1 + (w >> 9)·2⁻²³."""
    return ((word >> 9) + 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def minus_two_ln(u):
    """−2 ln u for u in (0, 1): Cephes' logf with every constant multiplied by −2."""
    word = u.to(tl.int32, bitcast=True)
    exponent = (word - 0x3F3504F3) & -0x800000
    k = exponent.to(tl.float32)  # times 2²³
    z = (word - exponent).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(tl.full(z.shape, -1.40753672584e-1, tl.float32), z, tl.full(z.shape, 2.302922062e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, -2.335399748e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, 2.4840281692e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, -2.8498645574e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, 3.333611533e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, -4.000142953e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, 4.9999987986e-1, tl.float32))
    p = tl.fma(p, z, tl.full(z.shape, -6.6666662348e-1, tl.float32))
    z2 = z * z
    y = tl.fma(z * z2, p, k * 5.0591097283669839157e-11) + z2
    y = tl.fma(z, tl.full(z.shape, -2.0, tl.float32), y)
    return tl.fma(k, tl.full(z.shape, -1.6530975699424743652e-07, tl.float32), y)


@triton.jit
def normal_pair(w0, w1):
    """√(−2 ln u₀)·(cos, sin)(2π u₁)."""
    radius = tl.sqrt_rn(minus_two_ln(uniform(w0)))
    t = uniform(w1)
    shifted = tl.fma(t, tl.full(t.shape, 4.0, tl.float32), tl.full(t.shape, 12582912.0, tl.float32))
    quadrant = shifted.to(tl.int32, bitcast=True)  # in the lowest bits
    x = tl.fma(shifted - 12582912.0, tl.full(t.shape, -0.25, tl.float32), t) * 6.283185307179586
    z = x * x
    s = tl.fma(tl.full(z.shape, -1.9515295891e-4, tl.float32), z, tl.full(z.shape, 8.3321608736e-3, tl.float32))
    s = tl.fma(s, z, tl.full(z.shape, -1.6666654611e-1, tl.float32))
    s = tl.fma(s * z, x, x)
    c = tl.fma(
        tl.full(z.shape, 2.443315711809948e-5, tl.float32), z, tl.full(z.shape, -1.388731625493765e-3, tl.float32)
    )
    c = tl.fma(c, z, tl.full(z.shape, 4.166664568298827e-2, tl.float32))
    half = tl.fma(z, tl.full(z.shape, -0.5, tl.float32), tl.full(z.shape, 1.0, tl.float32))
    c = tl.fma(c * z, z, half)
    odd = (quadrant & 1) == 1
    cos_part, sin_part = tl.where(odd, s, c), tl.where(odd, c, s)
    cos_part = tl.where(((quadrant + 1) & 2) == 2, -cos_part, cos_part)
    sin_part = tl.where((quadrant & 2) == 2, -sin_part, sin_part)
    return radius * cos_part, radius * sin_part


@triton.jit
def four_normals(block, step, sample, seed_low, seed_high):
    """The four normal numbers of each counter block; block int64 [n], step and sample int64 scalars."""
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (sample & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((sample >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, zero + seed_low.to(tl.uint32), zero + seed_high.to(tl.uint32))
    z0, z1 = normal_pair(w0, w1)
    z2, z3 = normal_pair(w2, w3)
    return z0, z1, z2, z3


@triton.jit
def counter_noise(
    i, start, sample_ptr, step_ptr, number, counter, seed_low, seed_high, HAS_STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Noise of elements start … start + BLOCK − 1 of sample i; start is a multiple of 4, `counter` the first block."""
    step = number.to(tl.int64)
    if HAS_STEP:
        step = tl.load(step_ptr + i)
    block = counter.to(tl.int64) + start // 4 + tl.arange(0, BLOCK // 4)
    z0, z1, z2, z3 = four_normals(block, step, tl.load(sample_ptr + i), seed_low, seed_high)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def chunk_of(program, dim, BLOCK: tl.constexpr):
    """(sample, first element in it) of a program, int64; dim is at least 1."""
    chunks = (dim - 1) // BLOCK + 1  # dim + BLOCK − 1 may be above int32
    i = program // chunks  # int32 up to 2³¹ elements: a short division
    return i.to(tl.int64), (program - i * chunks).to(tl.int64) * BLOCK


@triton.jit
def place(dim, BLOCK: tl.constexpr):
    """(sample, first element in it, element numbers, which of them exist) of this program; all but the last int64."""
    i, start = chunk_of(tl.program_id(0), dim, BLOCK)
    k = start + tl.arange(0, BLOCK)
    return i, start, i * dim + k, k < dim


COUNTERS = ["number", "counter", "seed_low", "seed_high"]
"""Arguments whose values and sizes change no code."""


@triton.jit(do_not_specialize=COUNTERS)
def normal_kernel(
    out_ptr, sample_ptr, step_ptr, dim, number: tl.int64, counter: tl.int64, seed_low: tl.uint32, seed_high: tl.uint32,
    HAS_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[B, D] fp32; one program per sample and block."""
    i, start, at, mask = place(dim, BLOCK)
    z = counter_noise(i, start, sample_ptr, step_ptr, number, counter, seed_low, seed_high, HAS_STEP, BLOCK)
    tl.store(out_ptr + at, z, mask=mask)


def counters(seed, sample, step, number, offset):
    """The arguments of a kernel for counter-based noise."""
    return {
        "sample_ptr": sample, "step_ptr": sample if step is None else step, "number": number, "counter": offset // 4,
        "seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32 & 0xFFFFFFFF, "HAS_STEP": step is not None,
    }  # fmt: skip


def normal(*, batch, dim, out, **noise):
    """Noise into `out` [B, D] fp32."""
    if out.numel():
        normal_kernel[(batch * triton.cdiv(dim, BLOCK),)](out, dim=dim, **counters(**noise), BLOCK=BLOCK, **FLAGS)
