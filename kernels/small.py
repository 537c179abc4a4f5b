"""Policy loss and win rates in Triton; counterparts of csrc/cuda_small.cu.

Statistics are fp64 and two-pass. Invariant: a missing value (NaN) enters no sum, and a constant group gives exactly 0.
"""

import triton
import triton.language as tl


@triton.jit
def policy_kernel(
    logp_ptr, old_ptr, adv_ptr, weight_ptr, kl_ptr, ratio_ptr, loss_ptr, metrics_ptr, d_delta_ptr, d_kl_ptr,
    batch, clip_low, clip_high, adv_clip, kl_coef, denominator,
    WEIGHT: tl.constexpr, KL: tl.constexpr, RATIO: tl.constexpr, FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, 8 metrics, d loss/d log-ratio and d loss/d kl."""
    i = tl.arange(0, BLOCK)
    keep = i < batch
    if RATIO:
        delta = tl.load(ratio_ptr + i, mask=keep, other=0.0)
    else:
        delta = tl.load(logp_ptr + i, mask=keep, other=0.0) - tl.load(old_ptr + i, mask=keep, other=0.0)
    adv = tl.load(adv_ptr + i, mask=keep, other=0.0)
    adv = tl.where(adv > adv_clip, adv_clip, tl.where(adv < -adv_clip, -adv_clip, adv))
    ratio = tl.exp(delta)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    unclipped = -adv * ratio
    clipped = -adv * tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    use_clipped = clipped > unclipped
    term = tl.where(use_clipped, clipped, unclipped)
    grad = tl.where(use_clipped, 0.0, unclipped)
    if WEIGHT:
        weight = tl.load(weight_ptr + i, mask=keep, other=0.0)
        term, grad = term * weight, grad * weight
    count = tl.maximum(tl.sum(keep.to(tl.float64), axis=0), 1.0)
    norm = count
    if FIXED:
        norm = tl.zeros((), tl.float64) + denominator
    total = tl.sum(tl.where(keep, term, 0.0).to(tl.float64), axis=0)
    kl_sum = tl.zeros((), tl.float64)
    if KL:
        kl_sum = tl.sum(tl.load(kl_ptr + i, mask=keep, other=0.0).to(tl.float64), axis=0)
        total += kl_coef * kl_sum
        tl.store(d_kl_ptr + i, tl.zeros((BLOCK,), tl.float32) + (kl_coef / norm).to(tl.float32), mask=keep)
    tl.store(loss_ptr, (total / norm).to(tl.float32))
    tl.store(d_delta_ptr + i, (grad / norm).to(tl.float32), mask=keep)
    above = tl.sum((keep & (ratio > high)).to(tl.float64), axis=0) / count
    below = tl.sum((keep & (ratio < low)).to(tl.float64), axis=0) / count
    d64 = tl.where(keep, delta, 0.0).to(tl.float64)
    has_nan = tl.sum((keep & (ratio != ratio)).to(tl.int32), axis=0) > 0
    ratio_min = tl.min(tl.where(keep & (ratio == ratio), ratio, float("inf")), axis=0)
    ratio_max = tl.max(tl.where(keep & (ratio == ratio), ratio, float("-inf")), axis=0)
    tl.store(metrics_ptr, (0.5 * tl.sum(d64 * d64, axis=0) / count).to(tl.float32))
    tl.store(metrics_ptr + 1, (above + below).to(tl.float32))
    tl.store(metrics_ptr + 2, above.to(tl.float32))
    tl.store(metrics_ptr + 3, below.to(tl.float32))
    tl.store(metrics_ptr + 4, tl.where(has_nan, float("nan"), ratio_min))
    tl.store(metrics_ptr + 5, (tl.sum(tl.where(keep, ratio, 0.0).to(tl.float64), axis=0) / count).to(tl.float32))
    tl.store(metrics_ptr + 6, tl.where(has_nan, float("nan"), ratio_max))
    tl.store(metrics_ptr + 7, (kl_sum / count).to(tl.float32))


@triton.jit
def winrate_kernel(
    wins_ptr, counts_ptr, rate_ptr, advantage_ptr, group, eps, ddof, USE_STD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Win rates and advantages of one prompt, [G] each, from its wins and counts [G, G]; one program per prompt."""
    p = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < group
    wins = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.float64)
    row = (p * group + i) * group
    for j in range(group):
        wins += tl.load(wins_ptr + row + j, mask=inside, other=0).to(tl.float64)
        count += tl.load(counts_ptr + row + j, mask=inside, other=0).to(tl.float64)
    rate = (wins / tl.where(count > 0, count, 1.0)).to(tl.float32)  # rounded: sums in another order differ in fp64
    ok = inside & (count > 0) & (rate == rate)
    tl.store(rate_ptr + p * group + i, tl.where(ok, rate, float("nan")), mask=inside)
    r = tl.where(ok, rate, 0.0).to(tl.float64)
    n = tl.sum(ok.to(tl.float64), axis=0)
    low = tl.min(tl.where(ok, rate, float("inf")), axis=0)
    high = tl.max(tl.where(ok, rate, float("-inf")), axis=0)
    d = tl.where(ok, r - tl.sum(tl.where(ok, r, 0.0), axis=0) / tl.maximum(n, 1.0), 0.0)
    scale = tl.zeros((), tl.float64) + 1.0
    if USE_STD:
        scale = tl.sqrt(tl.sum(d * d, axis=0) / tl.maximum(n - ddof, 1.0)) + eps
    advantage = tl.where(high > low, d / tl.where(high > low, scale, 1.0), 0.0)
    tl.store(advantage_ptr + p * group + i, advantage.to(tl.float32), mask=inside)
