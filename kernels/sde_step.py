"""The SDE step, its replay and its gradient in Triton; counterparts of csrc/sde_step.cu.

    x' = a·x + b·v + s·ε      logp = w · mean_D (x' − a·x − b·v)² + c

One program handles BLOCK elements of one sample; a second kernel adds the partial sums in a fixed order. Invariants:
16-bit values become fp32 right after the load and are rounded only by `store_rounded`, also in the interpreter; every
launch disables floating-point contraction, so that a·x + b·v rounds as in C++ and in torch. Kernels are not autotuned:
autotuning would synchronise, and could give a step and its replay different orders of summation.
"""

import torch
import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS, counter_noise

BLOCK = 2048
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


@triton.jit(do_not_specialize=["offset", "seed_low", "seed_high"])
def step_kernel(
    x_ptr, v_ptr, eps_ptr, out_ptr, mean_ptr, coef_ptr, index_ptr, sample_ptr, step_ptr, partial_ptr, dim, rows,
    x_stride, v_stride, eps_stride, offset, seed_low, seed_high,
    NOISE: tl.constexpr, ALIGNED: tl.constexpr, HAS_INDEX: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step. NOISE: 0 none, 1 given, 2 counter-based."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i, start = pid // chunks, (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    mask = k < dim
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    x = load_fp32(x_ptr + i * x_stride + k, mask)
    v = load_fp32(v_ptr + i * v_stride + k, mask)
    mean = a * x + b * v
    y = mean
    if NOISE == 1:
        y = mean + s * load_fp32(eps_ptr + i * eps_stride + k, mask)
    if NOISE == 2:
        step, sample = tl.load(step_ptr + i), tl.load(sample_ptr + i)
        y = mean + s * counter_noise(start, offset, step, sample, seed_low, seed_high, BLOCK, ALIGNED)
    out_offset = i * dim + k
    y = store_rounded(out_ptr + out_offset, y, mask)
    if MEAN:
        tl.store(mean_ptr + out_offset, mean, mask=mask)
    d = tl.where(mask, y - mean, 0.0)
    tl.store(partial_ptr + pid, tl.sum(d * d, axis=0))


@triton.jit
def logp_kernel(
    x_ptr, v_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, partial_ptr, dim, rows, partial_stride,
    x_stride, v_stride, y_stride, ref_stride, old_stride,
    HAS_INDEX: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
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
    v = load_fp32(v_ptr + i * v_stride + k, mask)
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
    partial_ptr, coef_ptr, index_ptr, logp_ptr, kl_ptr, ratio_ptr, dim, chunks, rows, partial_stride,
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
        ratio = b64 / s64 * (sum_partials(partial_ptr + 2 * partial_stride, i, chunks, BLOCK) / dim)
        tl.store(ratio_ptr + i, tl.where(noisy, ratio, 0.0).to(tl.float32))


@triton.jit
def scaled(factor, residual):
    """factor · residual; exactly 0 where the factor is 0, even if the residual is NaN or infinite."""
    return tl.where(factor == 0, 0.0, factor * residual)


@triton.jit
def grad_kernel(
    x_ptr, v_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, g_logp_ptr, g_kl_ptr, g_ratio_ptr, dv_ptr, dim, rows,
    x_stride, v_stride, y_stride, ref_stride, old_stride,
    HAS_INDEX: tl.constexpr, LOGP: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dv from the upstream gradients [B]."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i, start = pid // chunks, (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    mask = k < dim
    a, b, s, w, c = coefficients(coef_ptr, index_ptr, i, rows, HAS_INDEX)
    x = load_fp32(x_ptr + i * x_stride + k, mask)
    y = load_fp32(y_ptr + i * y_stride + k, mask)
    v = load_fp32(v_ptr + i * v_stride + k, mask)
    b64, s64 = b.to(tl.float64), tl.where(s > 0, s, 1.0).to(tl.float64)
    d = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        g = tl.where(w == 0, 0.0, -2.0 * w.to(tl.float64) * b64 / dim * tl.load(g_logp_ptr + i)).to(tl.float32)
        d = scaled(g, y - (a * x + b * v))
    if KL:
        g = tl.where(s > 0, b64 * b64 / (s64 * s64) / dim * tl.load(g_kl_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, v - load_fp32(ref_ptr + i * ref_stride + k, mask))
    if GUARD:
        g = tl.where(s > 0, b64 / (s64 * dim) * tl.load(g_ratio_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, y - (a * x + b * load_fp32(old_ptr + i * old_stride + k, mask)))
    store_rounded(dv_ptr + i * dim + k, d, mask)


# ---- launches; an absent tensor is replaced by another one, which the kernel then does not read
def _sizes(x):
    """(elements per sample, programs)."""
    dim = x.numel() // x.shape[0]
    return dim, x.shape[0] * triton.cdiv(dim, BLOCK)


def _finish(x, partial, coef, index, logp, kl, log_ratio):
    dim, programs = _sizes(x)
    results = (logp, logp if kl is None else kl, logp if log_ratio is None else log_ratio)
    finish_kernel[(x.shape[0],)](
        partial, coef, coef if index is None else index, *results, dim, triton.cdiv(dim, BLOCK), coef.shape[0],
        programs, index is not None, kl is not None, log_ratio is not None, 512, **FLAGS,
    )  # fmt: skip


def step(x, v, coef, index, eps, seed_words, sample, step, offset, out, logp, mean):
    """One step; arguments as of torch.ops.prefgrpo.sde_step."""
    with torch.cuda.device_of(x):
        dim, programs = _sizes(x)
        partial = torch.empty(programs, dtype=torch.float32, device=x.device)
        table = coef if index is None else index
        given = x if eps is None else eps
        step_kernel[(programs,)](
            x, v, given, out, out if mean is None else mean, coef, table, table if sample is None else sample,
            table if step is None else step, partial, dim, coef.shape[0], x.stride(0), v.stride(0), given.stride(0),
            offset, *seed_words, NOISE=2 if sample is not None else int(eps is not None), ALIGNED=offset % 4 == 0,
            HAS_INDEX=index is not None, MEAN=mean is not None, BLOCK=BLOCK, **FLAGS,
        )  # fmt: skip
        _finish(x, partial, coef, index, logp, None, None)


def logp(x, v, y, coef, index, v_ref, v_old, logp, kl, log_ratio):
    """A replay; arguments as of torch.ops.prefgrpo.sde_logp."""
    with torch.cuda.device_of(x):
        dim, programs = _sizes(x)
        partial = torch.empty(3 * programs, dtype=torch.float32, device=x.device)
        tensors = [x if t is None else t for t in (x, v, y, v_ref, v_old)]
        logp_kernel[(programs,)](
            *tensors, coef, coef if index is None else index, partial, dim, coef.shape[0], programs,
            *(t.stride(0) for t in tensors), HAS_INDEX=index is not None, KL=kl is not None,
            GUARD=log_ratio is not None, BLOCK=BLOCK, **FLAGS,
        )  # fmt: skip
        _finish(x, partial, coef, index, logp, kl, log_ratio)


def grad(x, v, y, coef, index, v_ref, v_old, upstream, dv):
    """The gradient; arguments as of torch.ops.prefgrpo.sde_grad."""
    with torch.cuda.device_of(x):
        dim, programs = _sizes(x)
        tensors = [x if t is None else t for t in (x, v, y, v_ref, v_old)]
        grad_kernel[(programs,)](
            *tensors, coef, coef if index is None else index, *(coef if g is None else g for g in upstream), dv, dim,
            coef.shape[0], *(t.stride(0) for t in tensors), HAS_INDEX=index is not None, LOGP=upstream[0] is not None,
            KL=v_ref is not None, GUARD=v_old is not None, BLOCK=BLOCK, **FLAGS,
        )  # fmt: skip
