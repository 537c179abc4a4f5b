"""The clipped policy loss in Triton: one program, in chunks of 512 samples; the counterpart of csrc/small.cu."""

import math

import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS


@triton.jit
def policy_kernel(
    logp_ptr, old_ptr, adv_ptr, weight_ptr, kl_ptr, loss_ptr, metrics_ptr, d_logp_ptr, d_kl_ptr, batch,
    low: tl.float64, high: tl.float64, log_low: tl.float64, log_high: tl.float64, adv_clip: tl.float64,
    kl_coef: tl.float64, norm: tl.float64,
    OLD: tl.constexpr, WEIGHT: tl.constexpr, KL: tl.constexpr, PER_SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, metrics and the gradients of logp and kl; log_low, log_high: the clip bounds of the log-ratio."""
    zero = tl.zeros((BLOCK,), tl.float64)
    losses = zero
    squares = zero
    deltas = zero
    shifts = zero
    spreads = zero
    ratios = zero
    kls = zero
    aboves = zero
    belows = zero
    lowest = zero + float("inf")
    highest = zero - float("inf")
    for first in range(0, batch, BLOCK):
        i = first + tl.arange(0, BLOCK)
        keep = i < batch
        delta = tl.load(logp_ptr + i, mask=keep, other=0.0)
        if OLD:
            delta = delta - tl.load(old_ptr + i, mask=keep, other=0.0)
        delta = delta.to(tl.float64)
        a = tl.load(adv_ptr + i, mask=keep, other=0.0).to(tl.float64)
        a = tl.where(a > adv_clip, adv_clip, tl.where(a < -adv_clip, -adv_clip, a))
        ratio = tl.exp(delta)
        above, below = delta > log_high, delta < log_low
        clipped = tl.where(a > 0, above, tl.where(a < 0, below, a > 0))
        term = -a * tl.where(clipped, tl.where(above, high, low), ratio)
        if WEIGHT:
            term = term * tl.load(weight_ptr + i, mask=keep, other=0.0).to(tl.float64)
        loss = term
        if KL:
            kl = tl.load(kl_ptr + i, mask=keep, other=0.0).to(tl.float64)
            tl.store(d_kl_ptr + i, (zero + kl_coef / norm).to(tl.float32), mask=keep)
            loss = term + kl_coef * kl
            kls += kl
        if PER_SAMPLE:
            tl.store(loss_ptr + i, (loss / norm).to(tl.float32), mask=keep)
        tl.store(d_logp_ptr + i, (tl.where(clipped, 0.0, term) / norm).to(tl.float32), mask=keep)
        losses += tl.where(keep, term, 0.0)
        squares += tl.where(keep, delta * delta, 0.0)
        deltas += tl.where(keep, delta, 0.0)
        ratios += tl.where(keep, ratio, 0.0)
        shift = tl.where(keep, ratio - 1.0, 0.0)  # near 1 a variance of ratios would cancel
        shifts += shift
        spreads += shift * shift
        aboves += tl.where(keep & above, 1.0, 0.0)
        belows += tl.where(keep & below, 1.0, 0.0)
        lowest = tl.minimum(lowest, tl.where(keep, ratio, float("inf")))
        highest = tl.maximum(highest, tl.where(keep, ratio, float("-inf")))
    count = tl.maximum(batch, 1).to(tl.float64)
    mean = tl.sum(ratios, axis=0) / count
    bad = mean != mean  # ratios are positive: their sum is NaN only if one is
    above, below = tl.sum(aboves, axis=0) / count, tl.sum(belows, axis=0) / count
    kl = tl.sum(kls, axis=0)
    if not PER_SAMPLE:
        loss = tl.sum(losses, axis=0)
        if KL:
            loss += kl_coef * kl
        tl.store(loss_ptr, (loss / norm).to(tl.float32))
    tl.store(metrics_ptr, (0.5 * tl.sum(squares, axis=0) / count).to(tl.float32))
    tl.store(metrics_ptr + 1, (above + below).to(tl.float32))
    tl.store(metrics_ptr + 2, above.to(tl.float32))
    tl.store(metrics_ptr + 3, below.to(tl.float32))
    tl.store(metrics_ptr + 4, tl.where(bad, float("nan"), tl.min(lowest, axis=0)).to(tl.float32))
    tl.store(metrics_ptr + 5, mean.to(tl.float32))
    tl.store(metrics_ptr + 6, tl.where(bad, float("nan"), tl.max(highest, axis=0)).to(tl.float32))
    tl.store(metrics_ptr + 7, (kl / count).to(tl.float32))
    shift = tl.sum(shifts, axis=0)
    spread = (tl.sum(spreads, axis=0) - shift * shift / count) / tl.maximum(count - 1.0, 1.0)
    std = tl.sqrt(tl.where(spread < 0.0, 0.0, spread))
    tl.store(metrics_ptr + 8, tl.where(batch > 1, std, float("nan")).to(tl.float32))
    tl.store(metrics_ptr + 9, (0.0 - tl.sum(deltas, axis=0) / count).to(tl.float32))


def policy_loss(
    *, batch, logp, logp_old, advantage, weight, kl, epsilon_low, epsilon_high, adv_clip, kl_coef, denominator,
    per_sample, loss, metrics, d_logp, d_kl,
):  # fmt: skip
    """The loss over [B], its metrics and gradients."""
    log_low = math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf
    numbers = (1 - epsilon_low, 1 + epsilon_high, log_low, math.log1p(epsilon_high), adv_clip, kl_coef, denominator)
    tensors = (logp, logp_old, advantage, weight, kl, loss, metrics, d_logp, d_kl)
    block = min(512, max(16, triton.next_power_of_2(batch)))
    flags = (logp_old is not None, weight is not None, kl is not None, per_sample)
    present = [logp if t is None else t for t in tensors]
    policy_kernel[(1,)](*present, batch, *map(float, numbers), *flags, block, **FLAGS)
