"""The SDE step, its replay and its gradient in Triton; counterparts of csrc/sde_step.cu.

    x' = a·x + b·v + s·ε      logp = w · mean_D (x' − a·x − b·v)² + c

One program handles BLOCK elements of one sample; a second kernel adds the partial sums in a fixed order. Invariants:
16-bit values become fp32 right after the load and are rounded only by `store_rounded`, also in the interpreter; every
launch disables floating-point contraction, so that a·x + b·v rounds as in C++ and in torch; a sum's order depends on D
and the dtypes alone, not on where tensors begin in memory. Kernels are not autotuned: autotuning would synchronise, and
could give a step and its replay different orders of summation.
"""

import torch
import triton
import triton.language as tl

from prefgrpo.kernels.noise import BLOCK, COUNTERS, FLAGS, counter_noise, counters, place

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
    """Load fp32 or bf16 as fp32."""
    if ptr.dtype.element_ty == tl.bfloat16:  # a shift of the bits: shorter when compiled, correct when interpreted
        word = tl.load(ptr, mask=mask, other=0.0).to(tl.uint16, bitcast=True)
        return (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX: tl.constexpr):
    """(a, b, s, w, c) of sample i; NaN if its index is outside the table."""
    row = tl.minimum(i, rows - 1)  # row i, or the only one
    if HAS_INDEX:
        row = tl.load(index_ptr + i)
    ok = (row >= 0) & (row < rows)
    row_ptr = coef_ptr + 5 * row
    a = tl.load(row_ptr, mask=ok, other=float("nan"))
    b = tl.load(row_ptr + 1, mask=ok, other=float("nan"))
    s = tl.load(row_ptr + 2, mask=ok, other=float("nan"))
    w = tl.load(row_ptr + 3, mask=ok, other=float("nan"))
    c = tl.load(row_ptr + 4, mask=ok, other=float("nan"))
    return a, b, s, w, c


@triton.jit(do_not_specialize=COUNTERS)
def step_kernel(
    x_ptr, v_ptr, eps_ptr, out_ptr, mean_ptr, logp_ptr, coef_ptr, index_ptr, rows, partial_ptr, dim,
    sample_ptr, step_ptr, number: tl.int64, counter: tl.int64, seed_low: tl.uint32, seed_high: tl.uint32,
    HAS_STEP: tl.constexpr, HAS_INDEX: tl.constexpr, NOISE: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step. NOISE: 0 none, 1 given, 2 counter-based."""
    i, start, at, mask = place(dim, BLOCK)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    mean = a * load_fp32(x_ptr + at, mask) + b * load_fp32(v_ptr + at, mask)
    y = mean
    if NOISE == 1:
        y = mean + s * load_fp32(eps_ptr + at, mask)
    if NOISE == 2:
        z = counter_noise(i, start, sample_ptr, step_ptr, number, counter, seed_low, seed_high, HAS_STEP, BLOCK)
        y = mean + s * z
    y = store_rounded(out_ptr + at, y, mask)
    if MEAN:
        tl.store(mean_ptr + at, mean, mask=mask)
    if NOISE == 0:
        tl.store(logp_ptr + i, c, mask=start == 0)
    else:
        d = tl.where(mask, y - mean, 0.0)
        tl.store(partial_ptr + tl.program_id(0), tl.sum(d * d, axis=0))


@triton.jit
def logp_kernel(
    x_ptr, v_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, rows, partial_ptr, dim, partial_stride,
    HAS_INDEX: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of the squared residual, of (v − v_ref)² and of (x' − μ_old)·(v − v_old)."""
    i, start, at, mask = place(dim, BLOCK)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    x = load_fp32(x_ptr + at, mask)
    y = load_fp32(y_ptr + at, mask)
    v = load_fp32(v_ptr + at, mask)
    d = tl.where(mask, y - (a * x + b * v), 0.0)
    sum_ptr = partial_ptr + tl.program_id(0)
    tl.store(sum_ptr, tl.sum(d * d, axis=0))
    if KL:
        d = tl.where(mask, v - load_fp32(ref_ptr + at, mask), 0.0)
        tl.store(sum_ptr + partial_stride, tl.sum(d * d, axis=0))
    if GUARD:
        old = load_fp32(old_ptr + at, mask)
        d = tl.where(mask, (y - (a * x + b * old)) * (v - old), 0.0)
        tl.store(sum_ptr + 2 * partial_stride, tl.sum(d, axis=0))


@triton.jit
def sum_partials(partial_ptr, i, chunks, BLOCK: tl.constexpr):
    """Sum of a sample's partial sums, in fp64."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, chunks, BLOCK):
        k = first + tl.arange(0, BLOCK)
        acc += tl.load(partial_ptr + i * chunks + k, mask=k < chunks, other=0.0).to(tl.float64)
    return tl.sum(acc, axis=0)


@triton.jit
def store_result(ptr, total, result):
    """Store the result, or in fp64 the sum that it is made of."""
    if ptr.dtype.element_ty == tl.float64:
        tl.store(ptr, total)
    else:
        tl.store(ptr, result.to(tl.float32))


@triton.jit
def finish_kernel(
    partial_ptr, coef_ptr, index_ptr, rows, logp_ptr, kl_ptr, ratio_ptr, size, chunks, partial_stride,
    HAS_INDEX: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one sample's logp, KL and Guard log-ratio from its partial sums."""
    i = tl.program_id(0).to(tl.int64)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    total = sum_partials(partial_ptr, i, chunks, BLOCK)
    store_result(logp_ptr + i, total, tl.where(w == 0, c, w * (total / size).to(tl.float32) + c))
    noisy = s > 0
    b64, s64 = b.to(tl.float64), tl.where(noisy, s, 1.0).to(tl.float64)
    if KL:
        total = sum_partials(partial_ptr + partial_stride, i, chunks, BLOCK)
        store_result(kl_ptr + i, total, tl.where(noisy, b64 * b64 / (2.0 * s64 * s64) * (total / size), 0.0))
    if GUARD:
        total = sum_partials(partial_ptr + 2 * partial_stride, i, chunks, BLOCK)
        store_result(ratio_ptr + i, total, tl.where(noisy, b64 / s64 * (total / size), 0.0))


@triton.jit
def scaled(factor, residual):
    """factor · residual; exactly 0 where the factor is 0, even if the residual is NaN or infinite."""
    return tl.where(factor == 0, 0.0, factor * residual)


@triton.jit
def grad_kernel(
    x_ptr, v_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, rows, g_logp_ptr, g_kl_ptr, g_ratio_ptr, dv_ptr, dim,
    share: tl.float64,
    HAS_INDEX: tl.constexpr, LOGP: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dv from the upstream gradients [B]; share: 1 / size."""
    i, start, at, mask = place(dim, BLOCK)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    x = load_fp32(x_ptr + at, mask)
    y = load_fp32(y_ptr + at, mask)
    v = load_fp32(v_ptr + at, mask)
    noisy = s > 0
    d = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        g = -2.0 * w.to(tl.float64) * b.to(tl.float64) * share * tl.load(g_logp_ptr + i)
        d = scaled(tl.where(w == 0, 0.0, g).to(tl.float32), y - (a * x + b * v))
    if KL or GUARD:
        b_over_s = b.to(tl.float64) / tl.where(noisy, s, 1.0).to(tl.float64)
    if KL:
        g = b_over_s * b_over_s * share * tl.load(g_kl_ptr + i)
        d += scaled(tl.where(noisy, g, 0.0).to(tl.float32), v - load_fp32(ref_ptr + at, mask))
    if GUARD:
        g = b_over_s * share * tl.load(g_ratio_ptr + i)
        d += scaled(tl.where(noisy, g, 0.0).to(tl.float32), y - (a * x + b * load_fp32(old_ptr + at, mask)))
    store_rounded(dv_ptr + at, d, mask)


# ---- launches, by the names of csrc/kernels.h; an absent tensor is replaced by one that the kernel then does not read
def _or(t, other):
    return other if t is None else t


def _rows(coef, rows, index):
    return {"coef_ptr": coef, "index_ptr": _or(index, coef), "rows": rows, "HAS_INDEX": index is not None}


def _aligned(t, dim):
    """`t`, copied if it does not begin on 16 bytes: a thread would read fewer elements, and add them in another order.

    Without that, where `dim` is no multiple of 16, every tensor is read by single elements.
    """
    return t if t is None or dim % 16 or t.data_ptr() % 16 == 0 else t.clone()


def _finish(partial, batch, dim, size, logp, kl, log_ratio, **table):
    chunks = triton.cdiv(dim, BLOCK)
    finish_kernel[(batch,)](
        partial, logp_ptr=logp, kl_ptr=_or(kl, logp), ratio_ptr=_or(log_ratio, logp), size=size, chunks=chunks,
        partial_stride=batch * chunks, KL=kl is not None, GUARD=log_ratio is not None, BLOCK=512, **table, **FLAGS,
    )  # fmt: skip


def sde_step(*, batch, dim, size, x, v, coef, rows, index, y, eps, mean, logp, kl, log_ratio, partial, sample, **noise):
    """One step; without noise it sums nothing."""
    table = _rows(coef, rows, index)
    programs = batch * triton.cdiv(dim, BLOCK)
    kind = 2 if sample is not None else int(eps is not None)
    if kind:
        x = _aligned(x, dim)
        v = _aligned(v, dim)
        eps = _aligned(eps, dim)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device) if kind else logp
    step_kernel[(programs,)](
        x, v, _or(eps, x), y, _or(mean, y), logp, partial_ptr=partial, dim=dim, NOISE=kind, MEAN=mean is not None,
        BLOCK=BLOCK, **table, **counters(sample=_or(sample, coef), **noise), **FLAGS,
    )  # fmt: skip
    if kind:
        _finish(partial, batch, dim, size, logp, None, None, **table)


def sde_logp(*, batch, dim, size, x, v, coef, rows, index, y, v_ref, v_old, logp, kl, log_ratio, partial):
    """A replay."""
    table = _rows(coef, rows, index)
    programs = batch * triton.cdiv(dim, BLOCK)
    x, v, y, v_ref, v_old = (_aligned(t, dim) for t in (x, v, y, v_ref, v_old))
    partial = torch.empty(3 * programs, dtype=torch.float32, device=x.device)
    logp_kernel[(programs,)](
        x, v, y, _or(v_ref, v), _or(v_old, v), partial_ptr=partial, dim=dim, partial_stride=programs,
        KL=kl is not None, GUARD=log_ratio is not None, BLOCK=BLOCK, **table, **FLAGS,
    )  # fmt: skip
    _finish(partial, batch, dim, size, logp, kl, log_ratio, **table)


def sde_grad(*, batch, dim, size, x, v, coef, rows, index, y, v_ref, v_old, g_logp, g_kl, g_log_ratio, dv):
    """The gradient."""
    grad_kernel[(batch * triton.cdiv(dim, BLOCK),)](
        x, v, y, _or(v_ref, v), _or(v_old, v), g_logp_ptr=_or(g_logp, coef), g_kl_ptr=_or(g_kl, coef),
        g_ratio_ptr=_or(g_log_ratio, coef), dv_ptr=dv, dim=dim, share=1.0 / size, LOGP=g_logp is not None,
        KL=g_kl is not None, GUARD=g_log_ratio is not None, BLOCK=BLOCK, **_rows(coef, rows, index), **FLAGS,
    )  # fmt: skip
