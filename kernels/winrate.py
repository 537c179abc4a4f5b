"""Win rates and their advantages in Triton, one program per prompt; the counterpart of csrc/small.cu."""

import triton
import triton.language as tl

from prefgrpo.kernels.noise import FLAGS


@triton.jit
def winrate_kernel(
    wins_ptr, counts_ptr, rate_ptr, advantage_ptr, group, eps: tl.float64, ddof,
    USE_STD: tl.constexpr, BLOCK: tl.constexpr,
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


def winrate(*, prompts, group, wins, counts, use_std, ddof, eps, rate, advantage):
    """Win rates and advantages [P, G] from wins and counts [P, G, G]."""
    if rate.numel():
        block = triton.next_power_of_2(group)
        winrate_kernel[(prompts,)](wins, counts, rate, advantage, group, eps, ddof, use_std, block, **FLAGS)
