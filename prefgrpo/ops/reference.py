"""The ops in plain torch: the specification against which every backend is tested.

    x' = a·x + b·v + s·ε          logp = w · mean_D (x' − a·x − b·v)² + c
    loss = Σ max(−A r, −A clip(r)) / N        A = (reward − mean of its group) / (std + eps)

Coefficient rows are (a, b, s, w, c). Every function computes in the promoted dtype of its inputs, at least fp32, and
runs unchanged in fp64, so tests take their expected values from it. Group statistics are two-pass fp64. Invariants: the
result for one sample depends on that sample's latents alone; a missing value (NaN) enters no statistic, and
a constant group gives exactly 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prefgrpo.ops.args import Policy, Replay, Results, Winrate

_MUL = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox_uint32(seed: int, sample: Tensor, step: Tensor, blocks: Tensor) -> Tensor:
    """Philox4x32-10 words [B, n, 4] (uint32 values in int64) for counters (block, step, sample lo, sample hi).

    `seed` is the 64-bit key; `sample`, `step` are int64 [B]; `blocks` is int64 [n] (element // 4).
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    shape = (sample.numel(), blocks.numel())
    c = [
        blocks[None, :].expand(shape) & _MASK,
        step[:, None].expand(shape) & _MASK,
        sample[:, None].expand(shape) & _MASK,
        (sample[:, None].expand(shape) >> 32) & _MASK,
    ]
    k = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        p0, p1 = _MUL[0] * c[0], _MUL[1] * c[2]  # int64 wraps around: its bits are those of the 64-bit product
        hi0, lo0 = (p0 >> 32) & _MASK, p0 & _MASK
        hi1, lo1 = (p1 >> 32) & _MASK, p1 & _MASK
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
        k = [(k[0] + _KEY[0]) & _MASK, (k[1] + _KEY[1]) & _MASK]
    return torch.stack(c, dim=-1)


def philox_normal(
    seed: int, sample: Tensor, step: Tensor, numel: int, offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Addressed N(0, 1) noise [B, numel] for elements offset … offset + numel − 1 of each sample's latent.

    Element e takes lane e % 4 of counter block e // 4. A word u becomes the uniform ((u >> 9) + ½)·2⁻²³,
    exact in fp32 and never 0 or 1; lanes (0, 1) and (2, 3) are the cosine and sine of Box-Muller on the
    words (0, 1) and (2, 3). Evaluated in fp64, then rounded to `dtype`.
    """
    first, last = offset // 4, (offset + numel + 3) // 4
    blocks = torch.arange(first, last, device=sample.device, dtype=torch.int64)
    words = philox_uint32(seed, sample, step, blocks)  # [B, n, 4]
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    radius = torch.sqrt(-2.0 * torch.log(u[..., 0::2]))  # [B, n, 2]
    angle = (2.0 * math.pi) * u[..., 1::2]
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)  # [B, n, 2, 2]
    start = offset - 4 * first
    return z.flatten(1)[:, start : start + numel].to(dtype, copy=True)  # a new tensor, not a view


def expand(column: Tensor, like: Tensor) -> Tensor:
    """[B] → [B, 1, …], to broadcast over the latent dimensions of `like`."""
    return column.view(-1, *([1] * (like.dim() - 1)))


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if any input is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def mean_d(t: Tensor) -> Tensor:
    """Mean over all but the batch dimension, [B]; one reduction per sample, so that its order suits any batch size."""
    t = t.reshape(t.shape[0], -1 if t.numel() else 0)
    return torch.stack([sample.mean() for sample in t.unbind(0)]) if t.shape[0] else t.mean(1)


def guided(cond: Tensor, uncond: Tensor, scale: float, from_cond: bool, rescale: bool) -> Tensor:
    """u + g·(c − u), or c + g·(c − u) if `from_cond`; `rescale` restores its norm over the last dimension to ‖c‖.

    A row of norm 0 stays 0. `rescale` is the true guidance of Qwen-Image in diffusers.
    """
    dtype = compute_dtype(cond, uncond)
    c, u = cond.to(dtype), uncond.to(dtype)
    q = (c if from_cond else u) + scale * (c - u)
    if not rescale:
        return q
    norm_c, norm_q = (t.square().sum(-1, keepdim=True) for t in (c, q))
    safe = torch.where(norm_q > 0, norm_q, torch.ones_like(norm_q))
    return q * torch.where(norm_q > 0, torch.sqrt(norm_c / safe), torch.zeros_like(norm_q))


def affine_mean(x: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """a·x + b·v in the compute dtype."""
    dtype = compute_dtype(x, v)
    a, b = (expand(rows[:, k].to(dtype), x) for k in (0, 1))
    return a * x.to(dtype) + b * v.to(dtype)


def affine_step(
    x: Tensor, v: Tensor, rows: Tensor, eps: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(x' rounded to `out_dtype`, logp [B] of that rounded x')."""
    mean = affine_mean(x, v, rows)
    x_next = mean if eps is None else mean + expand(rows[:, 2].to(mean.dtype), x) * eps.to(mean.dtype)
    x_next = x_next.to(out_dtype)
    return x_next, affine_logp(x, v, x_next, rows)


def affine_logp(x: Tensor, v: Tensor, x_next: Tensor, rows: Tensor) -> Tensor:
    """w · mean_D (x' − a·x − b·v)² + c, [B]; differentiable in v. Exactly c where w = 0 (a step without log-prob)."""
    mean = affine_mean(x, v, rows)
    w, c = rows[:, 3].to(mean.dtype), rows[:, 4].to(mean.dtype)
    squares = mean_d((x_next.to(mean.dtype) - mean).square())
    return torch.where(w != 0, w * torch.where(w != 0, squares, torch.zeros_like(squares)) + c, c)


def _scaled(factor: Tensor, t: Tensor) -> Tensor:
    """factor · t per sample; exactly 0 where the factor is 0, even if t is NaN or infinite there."""
    factor = expand(factor, t)
    return torch.where(factor != 0, factor * t, torch.zeros_like(t))


def _b_over_s(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """b / s, [B]; 0 where s = 0."""
    b, s = rows[:, 1].to(dtype), rows[:, 2].to(dtype)
    return torch.where(s > 0, b / torch.where(s > 0, s, torch.ones_like(s)), torch.zeros_like(s))


def affine_kl(v: Tensor, v_ref: Tensor, rows: Tensor) -> Tensor:
    """KL of two Gaussian steps with the same std: mean_D (b(v − v_ref))² / (2 s²), [B]; 0 where s = 0."""
    dtype = compute_dtype(v, v_ref)
    kl = _b_over_s(rows, dtype).square() / 2 * mean_d((v.to(dtype) - v_ref.to(dtype)).square())
    return torch.where(rows[:, 2] > 0, kl, torch.zeros_like(kl))


def guard_log_ratio(x: Tensor, v: Tensor, x_next: Tensor, v_old: Tensor, rows: Tensor) -> Tensor:
    """GRPO-Guard's log-ratio per sample: mean_D [ε̂·(μ − μ_old)], ε̂ = (x' − μ_old)/s, [B]; 0 where s = 0."""
    old = affine_mean(x, v_old, rows)
    product = (x_next.to(old.dtype) - old) * (v.to(old.dtype) - v_old.to(old.dtype))
    log_ratio = _b_over_s(rows, old.dtype) * mean_d(product)
    return torch.where(rows[:, 2] > 0, log_ratio, torch.zeros_like(log_ratio))


def affine_grad(a: Replay, v: Tensor, rows: Tensor) -> Tensor:
    """∂/∂v of Σ (g_logp·logp + g_kl·KL + g_guard·Guard), elementwise, in the compute dtype; v: after guidance.

    A term whose factor is 0 (w = 0, s = 0, an upstream gradient of 0) adds exactly 0, whatever the latents hold.
    """
    mean = affine_mean(a.x, v, rows)
    dtype, count = mean.dtype, max(a.x[0].numel(), 1) if a.x.shape[0] else 1
    b, w, b_over_s = rows[:, 1].to(dtype), rows[:, 3].to(dtype), _b_over_s(rows, dtype)
    grad = torch.zeros_like(mean)
    if a.g_logp is not None:
        factor = torch.where(w != 0, -2 * w * b / count * a.g_logp.to(dtype), torch.zeros_like(w))
        grad = _scaled(factor, a.x_next.to(dtype) - mean)
    if a.g_kl is not None and a.v_ref is not None:
        factor = torch.where(b_over_s != 0, b_over_s.square() / count * a.g_kl.to(dtype), torch.zeros_like(w))
        grad = grad + _scaled(factor, v.to(dtype) - a.v_ref.to(dtype))
    if a.g_guard is not None and a.v_old is not None:
        residual = a.x_next.to(dtype) - affine_mean(a.x, a.v_old, rows)
        factor = torch.where(b_over_s != 0, b_over_s / count * a.g_guard.to(dtype), torch.zeros_like(w))
        grad = grad + _scaled(factor, residual)
    return grad


def guided_grad(
    grad: Tensor, cond: Tensor, uncond: Tensor, scale: float, from_cond: bool, rescale: bool
) -> tuple[Tensor, Tensor]:
    """Backward of `guided`: (dc, du) from dv, in the compute dtype; 0 for rows of the last dimension whose dv is 0."""
    c, u = cond.to(grad.dtype), uncond.to(grad.dtype)
    through_norm = torch.zeros_like(c)
    if rescale:  # r = ‖c‖/‖q‖: ∂(r·q)/∂q = r − q·(q·)·r/‖q‖², and through ‖c‖ q·(c·)·r/‖c‖²
        q = guided(c, u, scale, from_cond, False)
        norm_c, norm_q = (t.square().sum(-1, keepdim=True) for t in (c, q))
        safe_c, safe_q = (torch.where(t > 0, t, torch.ones_like(t)) for t in (norm_c, norm_q))
        r = torch.where(norm_q > 0, torch.sqrt(norm_c / safe_q), torch.zeros_like(norm_q))
        along = (grad * q).sum(-1, keepdim=True) * r
        used = (grad != 0).any(-1, keepdim=True)
        through_norm = torch.where(used, along / safe_c * c, torch.zeros_like(c))
        grad = torch.where(used, r * grad - along / safe_q * q, torch.zeros_like(grad))
    dq_dc = 1 + scale if from_cond else scale
    return dq_dc * grad + through_norm, (1 - dq_dc) * grad


# ---- policy loss ----
def policy_loss(a: Policy) -> tuple[Tensor, Tensor]:
    """(loss, metrics [8] in the order of `ops.METRICS`); the loss is differentiable in logp, log_ratio and kl."""
    delta, ratio, unclipped, clipped = _terms(a)
    per_sample = torch.maximum(unclipped, clipped)
    if a.weight is not None:
        per_sample = per_sample * a.weight
    kl = torch.zeros_like(a.logp) if a.kl is None else a.kl
    count = max(len(ratio), 1)
    loss = (per_sample + a.kl_coef * kl).sum() / (count if a.denominator is None else a.denominator)
    with torch.no_grad():
        above, below = ratio > 1.0 + a.clip_high, ratio < 1.0 - a.clip_low
        infinity = ratio.new_full((1,), torch.inf)
        metrics = torch.stack(
            [
                0.5 * delta.square().sum() / count,
                (above | below).sum() / count,
                above.sum() / count,
                below.sum() / count,
                torch.cat([ratio, infinity]).amin(),
                ratio.sum() / count,
                torch.cat([ratio, -infinity]).amax(),
                kl.sum() / count,
            ]
        )
    return loss, metrics


def _terms(a: Policy) -> tuple[Tensor, ...]:
    """Log-ratio, ratio r, −A r and −A clip(r), each like logp."""
    delta = a.logp - a.logp_old if a.log_ratio is None else a.log_ratio
    ratio = torch.exp(delta)
    adv = a.advantage.clamp(-a.adv_clip, a.adv_clip)
    return delta, ratio, -adv * ratio, -adv * ratio.clamp(1.0 - a.clip_low, 1.0 + a.clip_high)


def policy_grad(a: Policy) -> tuple[Tensor, Tensor | None]:
    """(∂ loss / ∂ log-ratio, ∂ loss / ∂ kl) of `policy_loss`, like logp; the first is −A r, or 0 where r is clipped."""
    _, _, unclipped, clipped = _terms(a)
    denominator = max(len(unclipped), 1) if a.denominator is None else a.denominator
    d_delta = torch.where(unclipped < clipped, 0.0, unclipped) / denominator
    if a.weight is not None:
        d_delta = d_delta * a.weight
    return d_delta, None if a.kl is None else torch.full_like(unclipped, a.kl_coef / denominator)


# ---- advantages ----
def _deviation(values: Tensor, ok: Tensor, ddof: int) -> Tensor:
    """Standard deviation of the entries where `ok` is True, 0-d."""
    total = ok.sum()
    mean = torch.where(ok, values, 0.0).sum() / total.clamp_min(1)
    squares = torch.where(ok, values - mean, 0.0).square().sum()
    return (squares / (total - ddof).clamp_min(1)).sqrt()


def _ranks(r: Tensor, ids: Tensor) -> Tensor:
    """Rank of each value in its group, scaled to [0, 1]; tied values get their mean rank, and NaN stays NaN."""
    same = (ids[:, None] == ids[None, :]) & ~torch.isnan(r)[None, :]
    below = (same & (r[None, :] < r[:, None])).sum(1).double()
    equal = (same & (r[None, :] == r[:, None])).sum(1).double()
    rank = (below + 0.5 * (equal - 1)) / (same.sum(1) - 1).clamp_min(1)
    return torch.where(torch.isnan(r), r, rank)


def dense_ids(group_ids: Tensor) -> Tensor:
    """Group numbers 0, 1, … int64 [B] of any integer ids, without reading a value back from the device."""
    order = group_ids.argsort(stable=True)
    ordered = group_ids[order]
    new = torch.ones_like(order)
    new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)


def normalise(r: Tensor, ids: Tensor, std: str, eps: float, ddof: int, rank: bool = False) -> Tensor:
    """(r − group mean) / (std + eps) in fp64, for `dense_ids` [B]; missing entries and constant groups give 0."""
    if rank:
        r = _ranks(r, ids)
    ok = ~torch.isnan(r)
    zeros = torch.zeros_like(r)
    n = zeros.index_add(0, ids, ok.double())
    mean = zeros.index_add(0, ids, torch.where(ok, r, 0.0)) / n.clamp_min(1)
    low = (zeros + torch.inf).scatter_reduce(0, ids, torch.where(ok, r, torch.inf), "amin")
    high = (zeros - torch.inf).scatter_reduce(0, ids, torch.where(ok, r, -torch.inf), "amax")
    centred = torch.where(ok & (high > low)[ids], r - mean[ids], 0.0)
    if std == "none":
        return centred
    if std == "group":
        var = zeros.index_add(0, ids, centred.square()) / (n - ddof).clamp_min(1)
        scale = var.sqrt()[ids] + eps
    else:
        scale = _deviation(r, ok, ddof) + eps
    return torch.where(centred != 0, centred / scale, 0.0)


def win_rate(wins: Tensor, counts: Tensor) -> Tensor:
    """fp64 [P, G], rounded to fp32 so that rates whose sums differ only in order are equal; NaN: no comparison."""
    n = counts.double().sum(-1)
    return torch.where(n > 0, wins.double().sum(-1) / torch.where(n > 0, n, 1.0), torch.nan).float().double()


@torch.no_grad()
def winrate_advantage(a: Winrate) -> Results:
    """`Winrate.results`; the torch backend uses it too."""
    rate = win_rate(a.wins, a.counts)
    p, g = rate.shape
    ids = torch.arange(p, device=rate.device).repeat_interleave(g)
    adv = normalise(rate.reshape(-1), ids, "group" if a.use_std else "none", a.eps, a.ddof)
    return [rate.float(), adv.float().view(p, g)]
