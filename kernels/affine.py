"""The affine step, its replay and its gradient in Triton; counterparts of csrc/cuda_affine.cu.

    x' = a·x + b·v + s·ε      logp = w · mean_D (x' − a·x − b·v)² + c

One program handles BLOCK elements of one sample; a second kernel adds the partial sums in a fixed order. Invariant:
16-bit values become fp32 right after the load and are rounded only by `store_rounded`, also in the interpreter.
"""

import triton
import triton.language as tl

from prefgrpo.kernels.noise import addressed_noise

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter's conversion to bf16 truncates


@triton.jit
def store_rounded(ptr, y, mask):
    """Store fp32 `y` in the dtype of `ptr`, rounded to nearest even (NaN stays); returns the stored value in fp32."""
    if ptr.dtype.element_ty == tl.bfloat16 and INTERPRETED:
        u = y.to(tl.uint32, bitcast=True)
        word = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        word = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, word).to(tl.uint16)
        tl.store(ptr, word.to(tl.bfloat16, bitcast=True), mask=mask)
        return (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        stored = y.to(ptr.dtype.element_ty)
        tl.store(ptr, stored, mask=mask)
        return stored.to(tl.float32)


@triton.jit
def load_fp32(ptr, mask):
    """Load any dtype as fp32."""
    if ptr.dtype.element_ty == tl.bfloat16:  # a shift of the bits: shorter when compiled, correct when interpreted
        word = tl.load(ptr, mask=mask, other=0.0).to(tl.uint16, bitcast=True)
        return (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX: tl.constexpr):
    """(a, b, s, w, c) of sample i; NaN if its index is outside the table."""
    if HAS_INDEX:
        row = tl.load(index_ptr + i)
    else:
        row = i
    ok = (row >= 0) & (row < rows)
    row_ptr = coef_ptr + 5 * tl.where(ok, row, 0)
    a = tl.where(ok, tl.load(row_ptr), float("nan"))
    b = tl.where(ok, tl.load(row_ptr + 1), float("nan"))
    s = tl.where(ok, tl.load(row_ptr + 2), float("nan"))
    w = tl.where(ok, tl.load(row_ptr + 3), float("nan"))
    c = tl.where(ok, tl.load(row_ptr + 4), float("nan"))
    return a, b, s, w, c


@triton.jit
def velocity(v_ptr, u_ptr, v_offset, u_offset, mask, scale, PAIR: tl.constexpr, FROM_COND: tl.constexpr):
    """v, or for a guidance pair the guided velocity."""
    v = load_fp32(v_ptr + v_offset, mask)
    if PAIR:
        u = load_fp32(u_ptr + u_offset, mask)
        step = scale * (v - u)
        if FROM_COND:
            return v + step
        else:
            return u + step
    else:
        return v


@triton.jit(do_not_specialize=["offset", "seed_low", "seed_high"])
def step_kernel(
    x_ptr, v_ptr, u_ptr, eps_ptr, out_ptr, mean_ptr, coef_ptr, index_ptr, sample_ptr, step_ptr,
    partial_ptr, dim, rows, x_stride, v_stride, u_stride, eps_stride, scale, offset, seed_low, seed_high,
    NOISE: tl.constexpr, ALIGNED: tl.constexpr, HAS_INDEX: tl.constexpr, PAIR: tl.constexpr, FROM_COND: tl.constexpr,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One affine step. NOISE: 0 none, 1 given, 2 addressed."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i, start = pid // chunks, (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    mask = k < dim
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    x = load_fp32(x_ptr + i * x_stride + k, mask)
    v = velocity(v_ptr, u_ptr, i * v_stride + k, i * u_stride + k, mask, scale, PAIR, FROM_COND)
    mean = a * x + b * v
    y = mean
    if NOISE == 1:
        y = mean + s * load_fp32(eps_ptr + i * eps_stride + k, mask)
    if NOISE == 2:
        step, sample = tl.load(step_ptr + i), tl.load(sample_ptr + i)
        y = mean + s * addressed_noise(start, offset, step, sample, seed_low, seed_high, BLOCK, ALIGNED)
    out_offset = i * dim + k
    y = store_rounded(out_ptr + out_offset, y, mask)
    if MEAN:
        tl.store(mean_ptr + out_offset, mean, mask=mask)
    d = tl.where(mask, y - mean, 0.0)
    tl.store(partial_ptr + pid, tl.sum(d * d, axis=0))


@triton.jit
def logp_kernel(
    x_ptr, v_ptr, u_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, partial_ptr, dim, rows, partial_stride,
    x_stride, v_stride, u_stride, y_stride, ref_stride, old_stride, scale,
    HAS_INDEX: tl.constexpr, PAIR: tl.constexpr, FROM_COND: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of the squared residual, of (v − v_ref)² and of (x' − μ_old)·(v − v_old)."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i, start = pid // chunks, (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    mask = k < dim
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    x = load_fp32(x_ptr + i * x_stride + k, mask)
    y = load_fp32(y_ptr + i * y_stride + k, mask)
    v = velocity(v_ptr, u_ptr, i * v_stride + k, i * u_stride + k, mask, scale, PAIR, FROM_COND)
    d = tl.where(mask, y - (a * x + b * v), 0.0)
    tl.store(partial_ptr + pid, tl.sum(d * d, axis=0))
    if KL:
        d = tl.where(mask, v - load_fp32(ref_ptr + i * ref_stride + k, mask), 0.0)
        tl.store(partial_ptr + partial_stride + pid, tl.sum(d * d, axis=0))
    if GUARD:
        old = load_fp32(old_ptr + i * old_stride + k, mask)
        d = tl.where(mask, (y - (a * x + b * old)) * (v - old), 0.0)
        tl.store(partial_ptr + 2 * partial_stride + pid, tl.sum(d, axis=0))


@triton.jit
def sum_partials(partial_ptr, i, chunks, BLOCK: tl.constexpr):
    """Sum of a sample's partial sums, in fp64."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, chunks, BLOCK):
        k = first + tl.arange(0, BLOCK)
        acc += tl.load(partial_ptr + i * chunks + k, mask=k < chunks, other=0.0).to(tl.float64)
    return tl.sum(acc, axis=0)


@triton.jit
def finish_kernel(
    partial_ptr, coef_ptr, index_ptr, logp_ptr, kl_ptr, guard_ptr, dim, chunks, rows, partial_stride,
    HAS_INDEX: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one sample's logp, KL and Guard log-ratio from its partial sums."""
    i = tl.program_id(0).to(tl.int64)
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    mean = (sum_partials(partial_ptr, i, chunks, BLOCK) / dim).to(tl.float32)
    tl.store(logp_ptr + i, tl.where(w == 0, c, w * mean + c))
    noisy = s > 0
    b64, s64 = b.to(tl.float64), tl.where(noisy, s, 1.0).to(tl.float64)
    if KL:
        kl = b64 * b64 / (2.0 * s64 * s64) * (sum_partials(partial_ptr + partial_stride, i, chunks, BLOCK) / dim)
        tl.store(kl_ptr + i, tl.where(noisy, kl, 0.0).to(tl.float32))
    if GUARD:
        guard = b64 / s64 * (sum_partials(partial_ptr + 2 * partial_stride, i, chunks, BLOCK) / dim)
        tl.store(guard_ptr + i, tl.where(noisy, guard, 0.0).to(tl.float32))


@triton.jit
def scaled(factor, residual):
    """factor · residual; exactly 0 where the factor is 0, even if the residual is NaN or infinite."""
    return tl.where(factor == 0, 0.0, factor * residual)


@triton.jit
def grad_kernel(
    x_ptr, v_ptr, u_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, g_logp_ptr, g_kl_ptr, g_guard_ptr, dv_ptr,
    du_ptr, dim, rows, x_stride, v_stride, u_stride, y_stride, ref_stride, old_stride, scale, to_c, to_u,
    HAS_INDEX: tl.constexpr, PAIR: tl.constexpr, FROM_COND: tl.constexpr, LOGP: tl.constexpr, KL: tl.constexpr,
    GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dv (or dc and du) from the upstream gradients [B]."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i, start = pid // chunks, (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    mask = k < dim
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    x = load_fp32(x_ptr + i * x_stride + k, mask)
    y = load_fp32(y_ptr + i * y_stride + k, mask)
    v = velocity(v_ptr, u_ptr, i * v_stride + k, i * u_stride + k, mask, scale, PAIR, FROM_COND)
    b64, s64 = b.to(tl.float64), tl.where(s > 0, s, 1.0).to(tl.float64)
    d = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        g = tl.where(w == 0, 0.0, -2.0 * w.to(tl.float64) * b64 / dim * tl.load(g_logp_ptr + i)).to(tl.float32)
        d = scaled(g, y - (a * x + b * v))
    if KL:
        g = tl.where(s > 0, b64 * b64 / (s64 * s64) / dim * tl.load(g_kl_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, v - load_fp32(ref_ptr + i * ref_stride + k, mask))
    if GUARD:
        g = tl.where(s > 0, b64 / (s64 * dim) * tl.load(g_guard_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, y - (a * x + b * load_fp32(old_ptr + i * old_stride + k, mask)))
    out_offset = i * dim + k
    if PAIR:
        store_rounded(du_ptr + out_offset, to_u * d, mask)
        d = to_c * d
    store_rounded(dv_ptr + out_offset, d, mask)


@triton.jit
def guide_kernel(
    c_ptr, u_ptr, g_ptr, out_ptr, du_ptr, dim, rows, total_rows, length, c_stride, u_stride, scale, to_c, to_u,
    FROM_COND: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The guided velocity, its norm over the last dimension restored to ‖c‖; BACKWARD: gradients dc, du from g = dv."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    i = r // rows
    k = (r % rows * length)[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = (r < total_rows)[:, None] & (tl.arange(0, BLOCK) < length)[None, :]
    c = load_fp32(c_ptr + (i * c_stride)[:, None] + k, mask)
    u = load_fp32(u_ptr + (i * u_stride)[:, None] + k, mask)
    if FROM_COND:
        q = c + scale * (c - u)
    else:
        q = u + scale * (c - u)
    c64, q64 = c.to(tl.float64), q.to(tl.float64)
    cc, qq = tl.sum(c64 * c64, axis=1), tl.sum(q64 * q64, axis=1)
    safe_q, safe_c = tl.where(qq > 0, qq, 1.0), tl.where(cc > 0, cc, 1.0)
    ratio = tl.where(qq > 0, tl.sqrt(cc / safe_q), 0.0)
    out_offset = (i * dim)[:, None] + k
    if BACKWARD:
        g = load_fp32(g_ptr + out_offset, mask)
        projection = tl.where(qq > 0, tl.sum(g.to(tl.float64) * q64, axis=1) / safe_q, 0.0)
        through_norm = tl.where(cc > 0, projection * tl.sqrt(qq / safe_c), 0.0)
        dq = ratio.to(tl.float32)[:, None] * g - (ratio * projection).to(tl.float32)[:, None] * q
        used = (tl.max(tl.abs(tl.where(g == g, g, 1.0)), axis=1) > 0)[:, None]  # a row whose dv is 0 gets 0
        dc = tl.where(used, to_c * dq + through_norm.to(tl.float32)[:, None] * c, 0.0)
        store_rounded(out_ptr + out_offset, dc, mask)
        store_rounded(du_ptr + out_offset, tl.where(used, to_u * dq, 0.0), mask)
    else:
        tl.store(out_ptr + out_offset, q * ratio.to(tl.float32)[:, None], mask=mask)
