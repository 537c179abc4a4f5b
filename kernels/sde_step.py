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

from prefgrpo.kernels.noise import FLAGS, counter_noise, seed_words

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
    """Load fp32 or bf16 as fp32."""
    if ptr.dtype.element_ty == tl.bfloat16:  # a shift of the bits: shorter when compiled, correct when interpreted
        word = tl.load(ptr, mask=mask, other=0.0).to(tl.uint16, bitcast=True)
        return (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def place(dim, BLOCK: tl.constexpr):
    """(sample, first element in it, element numbers, which of them exist) of this program."""
    chunks = tl.cdiv(dim, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    i = pid // chunks
    start = (pid % chunks) * BLOCK
    k = start + tl.arange(0, BLOCK)
    return i, start, i * dim + k, k < dim


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


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def step_kernel(
    x_ptr, v_ptr, eps_ptr, out_ptr, mean_ptr, coef_ptr, index_ptr, rows, sample_ptr, step_ptr, partial_ptr, dim,
    seed_low, seed_high,
    HAS_INDEX: tl.constexpr, NOISE: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step. NOISE: 0 none, 1 given, 2 counter-based."""
    i, start, at, mask = place(dim, BLOCK)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    mean = a * load_fp32(x_ptr + at, mask) + b * load_fp32(v_ptr + at, mask)
    y = mean
    if NOISE == 1:
        y = mean + s * load_fp32(eps_ptr + at, mask)
    if NOISE == 2:
        step, sample = tl.load(step_ptr + i), tl.load(sample_ptr + i)
        y = mean + s * counter_noise(start, step, sample, seed_low, seed_high, BLOCK)
    y = store_rounded(out_ptr + at, y, mask)
    if MEAN:
        tl.store(mean_ptr + at, mean, mask=mask)
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
def finish_kernel(
    partial_ptr, coef_ptr, index_ptr, rows, logp_ptr, kl_ptr, ratio_ptr, dim, chunks, partial_stride,
    HAS_INDEX: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one sample's logp, KL and Guard log-ratio from its partial sums."""
    i = tl.program_id(0).to(tl.int64)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
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
    x_ptr, v_ptr, y_ptr, ref_ptr, old_ptr, coef_ptr, index_ptr, rows, g_logp_ptr, g_kl_ptr, g_ratio_ptr, dv_ptr, dim,
    HAS_INDEX: tl.constexpr, LOGP: tl.constexpr, KL: tl.constexpr, GUARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dv from the upstream gradients [B]."""
    i, start, at, mask = place(dim, BLOCK)
    a, b, s, w, c = row_of(coef_ptr, index_ptr, rows, i, HAS_INDEX)
    x = load_fp32(x_ptr + at, mask)
    y = load_fp32(y_ptr + at, mask)
    v = load_fp32(v_ptr + at, mask)
    b64, s64 = b.to(tl.float64), tl.where(s > 0, s, 1.0).to(tl.float64)
    d = tl.zeros((BLOCK,), tl.float32)
    if LOGP:
        g = tl.where(w == 0, 0.0, -2.0 * w.to(tl.float64) * b64 / dim * tl.load(g_logp_ptr + i)).to(tl.float32)
        d = scaled(g, y - (a * x + b * v))
    if KL:
        g = tl.where(s > 0, b64 * b64 / (s64 * s64) / dim * tl.load(g_kl_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, v - load_fp32(ref_ptr + at, mask))
    if GUARD:
        g = tl.where(s > 0, b64 / (s64 * dim) * tl.load(g_ratio_ptr + i), 0.0).to(tl.float32)
        d += scaled(g, y - (a * x + b * load_fp32(old_ptr + at, mask)))
    store_rounded(dv_ptr + at, d, mask)


# ---- launches: the arguments of csrc/kernels.h; an absent tensor is replaced by one that the kernel then does not read
def _or(t, other):
    return other if t is None else t


def _finish(partial, batch, dim, coef, rows, index, logp, kl, log_ratio):
    chunks = triton.cdiv(dim, BLOCK)
    finish_kernel[(batch,)](
        partial, coef, _or(index, coef), rows, logp, _or(kl, logp), _or(log_ratio, logp), dim, chunks,
        batch * chunks, HAS_INDEX=index is not None, KL=kl is not None, GUARD=log_ratio is not None, BLOCK=512, **FLAGS,
    )  # fmt: skip


def sde_step(batch, dim, x, v, coef, rows, index, out, eps, seed, sample, step, logp, mean, _):
    """One step."""
    programs = batch * triton.cdiv(dim, BLOCK)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    step_kernel[(programs,)](
        x, v, _or(eps, x), out, _or(mean, out), coef, _or(index, coef), rows, _or(sample, coef), _or(step, coef),
        partial, dim, *seed_words(seed), HAS_INDEX=index is not None,
        NOISE=2 if sample is not None else int(eps is not None), MEAN=mean is not None, BLOCK=BLOCK, **FLAGS,
    )  # fmt: skip
    _finish(partial, batch, dim, coef, rows, index, logp, None, None)


def sde_logp(batch, dim, x, v, coef, rows, index, y, v_ref, v_old, logp, kl, log_ratio, _):
    """A replay."""
    programs = batch * triton.cdiv(dim, BLOCK)
    partial = torch.empty(3 * programs, dtype=torch.float32, device=x.device)
    logp_kernel[(programs,)](
        x, v, y, _or(v_ref, v), _or(v_old, v), coef, _or(index, coef), rows, partial, dim, programs,
        HAS_INDEX=index is not None, KL=kl is not None, GUARD=log_ratio is not None, BLOCK=BLOCK, **FLAGS,
    )  # fmt: skip
    _finish(partial, batch, dim, coef, rows, index, logp, kl, log_ratio)


def sde_grad(batch, dim, x, v, coef, rows, index, y, v_ref, v_old, g_logp, g_kl, g_log_ratio, dv):
    """The gradient."""
    grad_kernel[(batch * triton.cdiv(dim, BLOCK),)](
        x, v, y, _or(v_ref, v), _or(v_old, v), coef, _or(index, coef), rows, _or(g_logp, coef), _or(g_kl, coef),
        _or(g_log_ratio, coef), dv, dim, HAS_INDEX=index is not None, LOGP=g_logp is not None, KL=v_ref is not None,
        GUARD=v_old is not None, BLOCK=BLOCK, **FLAGS,
    )  # fmt: skip
