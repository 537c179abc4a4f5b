"""Coefficient rows of SDE steps in Triton: the rules of prefgrpo/sde/rules.py in fp64, one row per lane.

Operation for operation in the order of the Python functions, whose fp64 values a GPU repeats (its log and sin to their
last bit), so that the rows in fp32 are those of a schedule.
"""

import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS

BLOCK = 64
HALF_LOG_2PI = tl.constexpr(0.9189385332046727)
PI = tl.constexpr(3.141592653589793)
ALMOST_1 = tl.constexpr(1.0 - 2e-6)


@triton.jit
def read(ptr, stride, number, i, mask, IS_TENSOR: tl.constexpr):
    """A number of each step in fp64, of a tensor or the same for all."""
    if IS_TENSOR:
        return tl.load(ptr + i * stride, mask=mask, other=0.5).to(tl.float64)
    else:
        return tl.zeros(i.shape, tl.float64) + number


@triton.jit
def flow_with_std(sigma, delta, st):
    """(a, b, s) of Flow-GRPO's reverse SDE with diffusion coefficient st."""
    a = 1.0 + st * st * delta / (2.0 * sigma)
    b = (1.0 + st * st * (1.0 - sigma) / (2.0 * sigma)) * delta
    return a, b, st * tl.sqrt(-delta)


SIZES = ["count", "sigma_stride", "next_stride", "eta_stride", "max_stride", "min_stride"]
"""Arguments whose values change no code."""


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    coef_ptr, count: tl.int64, sigma_ptr, next_ptr, eta_ptr, max_ptr, min_ptr,
    sigma_stride: tl.int64, next_stride: tl.int64, eta_stride: tl.int64, max_stride: tl.int64, min_stride: tl.int64,
    eta: tl.float64, sigma_max: tl.float64, sigma_min: tl.float64,
    RULE: tl.constexpr, ETA: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """coef[B, 5] fp32; ETA, MAX, MIN: whether η and the ends of the schedule are tensors."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    sigma = read(sigma_ptr, sigma_stride, 0.0, i, mask, True)
    after = read(next_ptr, next_stride, 0.0, i, mask, True)
    eta = read(eta_ptr, eta_stride, eta, i, mask, ETA)
    top = read(max_ptr, max_stride, sigma_max, i, mask, MAX)
    low = read(min_ptr, min_stride, sigma_min, i, mask, MIN)
    one = tl.full(sigma.shape, 1.0, tl.float64)
    delta = after - sigma
    if RULE == "flow":
        below_1 = tl.where(sigma > tl.full(sigma.shape, ALMOST_1, tl.float64), top, sigma)
        a, b, s = flow_with_std(sigma, delta, eta * tl.sqrt(sigma / (1.0 - below_1)))
    elif RULE == "wan":
        a, b, s = flow_with_std(sigma, delta, low + (top - low) * sigma)
    elif RULE == "dance":
        k = eta * eta / (2.0 * sigma * sigma)
        a = 1.0 + k * sigma * delta
        b = (1.0 + k * sigma * (1.0 - sigma)) * delta
        s = eta * tl.sqrt(-delta)
    elif RULE == "ode":
        a = one
        b = delta
        s = 0.0 * one
    else:
        s = after * tl.sin(eta * tl.full(sigma.shape, PI, tl.float64) / 2.0)
        left = after * after - s * s
        r = tl.sqrt(tl.where(left > 0.0, left, 0.0 * one))
        a = (1.0 - after) + r
        b = -sigma * (1.0 - after) + (1.0 - sigma) * r
    noisy = s != 0.0
    safe = tl.where(noisy, s, one)
    w = tl.where(noisy, -1.0 / (2.0 * safe * safe), 0.0 * one)
    c = tl.where(noisy, -tl.log(safe) - tl.full(s.shape, HALF_LOG_2PI, tl.float64), 0.0 * one)
    if RULE == "cps":
        w = tl.where(noisy, -one, 0.0 * one)
        c = 0.0 * one
    row_ptr = coef_ptr + 5 * i
    tl.store(row_ptr, a.to(tl.float32), mask=mask)
    tl.store(row_ptr + 1, b.to(tl.float32), mask=mask)
    tl.store(row_ptr + 2, s.to(tl.float32), mask=mask)
    tl.store(row_ptr + 3, w.to(tl.float32), mask=mask)
    tl.store(row_ptr + 4, c.to(tl.float32), mask=mask)


def sde_rows(*, rule, coef, tensors, numbers):
    """Rows [B, 5]; tensors: (σ, σ', η, σ_1, the last σ), each [B] or None, then the last three are `numbers`."""
    count = coef.shape[0]
    if not count:
        return
    sigma = tensors[0]
    given = [sigma if t is None else t for t in tensors]
    are_tensors = [t is not None for t in tensors[2:]]
    rows_kernel[(triton.cdiv(count, BLOCK),)](
        coef, count, *given, *(t.stride(0) for t in given), *numbers, rule, *are_tensors, BLOCK, **FLAGS
    )  # fmt: skip
