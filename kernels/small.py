"""Policy loss and group-wise normalisation in Triton; counterparts of csrc/cuda_small.cu.

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
def span(span_ptr, batch, SORTED: tl.constexpr):
    """(start, end) of the samples to search for this program's groups: `span_ptr` [2, programs] if sorted, else all."""
    if SORTED:
        ptr = span_ptr + tl.program_id(0)
        return tl.load(ptr), tl.load(ptr + tl.num_programs(0))
    else:
        return tl.zeros((), tl.int64), tl.zeros((), tl.int64) + batch


@triton.jit
def members(v_ptr, id_ptr, group, first, end, ALL: tl.constexpr, BLOCK: tl.constexpr):
    """(values [BLOCK] from `first` on, whether each is known and in each `group` (ALL: in any) [ROWS, BLOCK])."""
    j = first + tl.arange(0, BLOCK)
    v = tl.load(v_ptr + j, mask=j < end, other=float("nan"))
    ok = (v == v)[None, :] & (group == group)[:, None]
    if not ALL:
        ok = ok & (tl.load(id_ptr + j, mask=j < end, other=0)[None, :] == group[:, None])
    return v, ok


@triton.jit
def moments(v_ptr, id_ptr, group, start, end, ddof, ALL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(mean, standard deviation, whether values differ) [ROWS] over the members of each `group`, or over all."""
    n = tl.zeros((ROWS,), tl.float64)
    sums = tl.zeros((ROWS,), tl.float64)
    low = tl.full((ROWS,), float("inf"), tl.float64)
    high = tl.full((ROWS,), float("-inf"), tl.float64)
    for first in range(start, end, BLOCK):
        v, ok = members(v_ptr, id_ptr, group, first, end, ALL, BLOCK)
        n += tl.sum(ok.to(tl.float64), axis=1)
        sums += tl.sum(tl.where(ok, v[None, :], 0.0), axis=1)
        low = tl.minimum(low, tl.min(tl.where(ok, v[None, :], float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(ok, v[None, :], float("-inf")), axis=1))
    mean = sums / tl.maximum(n, 1.0)
    squares = tl.zeros((ROWS,), tl.float64)
    for first in range(start, end, BLOCK):
        v, ok = members(v_ptr, id_ptr, group, first, end, ALL, BLOCK)
        d = tl.where(ok, v[None, :] - mean[:, None], 0.0)
        squares += tl.sum(d * d, axis=1)
    return mean, tl.sqrt(squares / tl.maximum(n - ddof, 1.0)), high > low


@triton.jit
def normalise_kernel(
    v_ptr, id_ptr, span_ptr, weight_ptr, out_ptr, rewards, batch, eps, ddof,
    STD: tl.constexpr, SORTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = Σ_r weight_r · (v_ri − mean of i's group) / scale; STD: 0 group, 1 global, 2 none."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_batch = i < batch
    group = tl.load(id_ptr + i, mask=in_batch, other=0)
    start, end = span(span_ptr, batch, SORTED)
    acc = tl.zeros((ROWS,), tl.float64)
    for r in range(rewards):
        row = v_ptr + r * batch
        v = tl.load(row + i, mask=in_batch, other=float("nan"))
        mean, deviation, varies = moments(row, id_ptr, group, start, end, ddof, False, ROWS, BLOCK)
        scale = tl.full((ROWS,), 1.0, tl.float64)
        if STD == 0:
            scale = deviation + eps
        if STD == 1:
            _, global_deviation, _ = moments(row, id_ptr, group, 0, batch, ddof, True, ROWS, BLOCK)
            scale = global_deviation + eps
        valid = (v == v) & varies
        acc += tl.where(valid, tl.load(weight_ptr + r) * ((v - mean) / tl.where(valid, scale, 1.0)), 0.0)
    tl.store(out_ptr + i, acc, mask=in_batch)


@triton.jit
def rank_kernel(v_ptr, id_ptr, span_ptr, out_ptr, batch, SORTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rank within the group, scaled to [0, 1]; tied values get their mean rank, and NaN stays NaN."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_batch = i < batch
    group = tl.load(id_ptr + i, mask=in_batch, other=0)
    value = tl.load(v_ptr + i, mask=in_batch, other=float("nan"))
    start, end = span(span_ptr, batch, SORTED)
    n = tl.zeros((ROWS,), tl.float64)
    below = tl.zeros((ROWS,), tl.float64)
    equal = tl.zeros((ROWS,), tl.float64)
    for first in range(start, end, BLOCK):
        v, ok = members(v_ptr, id_ptr, group, first, end, False, BLOCK)
        n += tl.sum(ok.to(tl.float64), axis=1)
        below += tl.sum((ok & (v[None, :] < value[:, None])).to(tl.float64), axis=1)
        equal += tl.sum((ok & (v[None, :] == value[:, None])).to(tl.float64), axis=1)
    rank = (below + 0.5 * (equal - 1.0)) / tl.maximum(n - 1.0, 1.0)
    tl.store(out_ptr + i, tl.where(value == value, rank, value), mask=in_batch)
