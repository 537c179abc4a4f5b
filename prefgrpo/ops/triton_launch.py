"""The triton backend: the functions that every backend has, over the kernels of `prefgrpo.kernels`.

Outputs are allocated here. Invariant: every launch switches floating-point contraction off, so that a·x + b·v rounds
as in C++ and in torch, whatever Triton's default is.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from prefgrpo.kernels import affine, noise, small
from prefgrpo.ops import plain, reference_small
from prefgrpo.ops.args import Affine, NoiseAddress

BLOCK = 2048
_EXACT = {"enable_fp_fusion": False}
_STD = {"group": 0, "global": 1, "none": 2}


def _packed(t: Tensor) -> Tensor:
    return t if t.is_contiguous() or (t.shape[0] > 0 and t[0].is_contiguous()) else t.contiguous()


def _words(seed: int) -> tuple[int, int]:
    """The two words of the key."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def normal(seed: int, sample: Tensor, step: Tensor, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Addressed noise [B, numel]."""
    out = torch.empty(sample.numel(), numel, dtype=torch.float32, device=sample.device)
    if out.numel():
        grid = (out.shape[0] * triton.cdiv(numel, BLOCK),)
        noise.normal_kernel[grid](
            out, sample.contiguous(), step.contiguous(), numel, offset, *_words(seed), BLOCK, offset % 4 == 0, **_EXACT
        )
    return out.to(dtype)


def _last(a: Affine) -> int:
    """Length of the dimension whose norm is restored, or 0."""
    return a.x.shape[-1] if a.guidance is not None and a.guidance.rescale and a.x.dim() > 1 else 0


def _slopes(a: Affine) -> tuple[float, float]:
    """d v/d c and d v/d u of the guidance."""
    if a.guidance is None:
        return 1.0, 0.0
    g = a.guidance.scale
    return (1.0 + g, -g) if a.guidance.from_cond else (g, 1.0 - g)


def _guide(a: Affine, dv: Tensor | None, out: Tensor, du: Tensor | None) -> None:
    assert a.guidance is not None
    c, u, length = _packed(a.v), _packed(a.guidance.uncond), _last(a)
    dim = a.x.numel() // a.x.shape[0]
    block = triton.next_power_of_2(length)
    rows, per = dim // length, max(1, 512 // block)
    total = rows * c.shape[0]
    affine.guide_kernel[(triton.cdiv(total, per),)](
        c, u, dv if dv is not None else c, out, du if du is not None else out, dim, rows, total, length,
        c.stride(0), u.stride(0), a.guidance.scale, *_slopes(a), a.guidance.from_cond, dv is not None, per, block,
        **_EXACT,
    )  # fmt: skip


def _guided(a: Affine) -> Affine:
    """Norms are restored in a launch of its own; v is then the velocity itself."""
    if not _last(a) or not a.x.numel():
        return a
    v = torch.empty(a.x.shape, dtype=torch.float32, device=a.x.device)
    _guide(a, None, v, None)
    return a._replace(v=v, guidance=None)


def _inputs(a: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x, v, u, coef, index) as the kernels take them; absent ones are stand-ins that no kernel reads."""
    x, v = _packed(a.x), _packed(a.v)
    u = v if a.guidance is None else _packed(a.guidance.uncond)
    coef = a.coef.float().contiguous()
    return x, v, u, coef, coef if a.row is None else a.row.contiguous()


def _pair(a: Affine) -> dict[str, Any]:
    g = a.guidance
    return {
        "HAS_INDEX": a.row is not None,
        "PAIR": g is not None,
        "FROM_COND": g is not None and g.from_cond,
        "BLOCK": BLOCK,
    }


def _finish(
    a: Affine, partial: Tensor, coef: Tensor, index: Tensor, dim: int, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, chunks = a.x, triton.cdiv(dim, BLOCK)
    first = torch.empty(x.shape[0], device=x.device)
    kl, guard = (torch.empty_like(first) if want else None for want in wanted)
    affine.finish_kernel[(x.shape[0],)](
        partial, coef, index, *(first if t is None else t for t in (first, kl, guard)), dim, chunks, coef.shape[0],
        x.shape[0] * chunks, a.row is not None, *wanted, 1024, **_EXACT,
    )  # fmt: skip
    return first, kl, guard


def step(
    a: Affine,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype,
    want_mean: bool,
    sigma: Tensor | None,
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(x', logp, mean, x0, copy)."""
    if not a.x.numel():
        return plain.step(a, noise, out_dtype, want_mean, sigma, copy_dtype)
    a = _guided(a)
    x, v, u, coef, index = _inputs(a)
    address = noise if isinstance(noise, NoiseAddress) else None
    eps = _packed(noise) if isinstance(noise, Tensor) else x
    batch, dim = x.shape[0], x.numel() // x.shape[0]
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    kinds = (torch.float32 if want_mean else None, None if sigma is None else out_dtype, copy_dtype)
    more = [None if kind is None else torch.empty(x.shape, dtype=kind, device=x.device) for kind in kinds]
    chunks = triton.cdiv(dim, BLOCK)
    partial = torch.empty(batch * chunks, device=x.device)
    ids = (index, index)
    if address is not None and address.step is not None:
        ids = (address.sample.contiguous(), address.step.contiguous())
    offset = 0 if address is None else address.offset
    affine.step_kernel[(batch * chunks,)](
        x, v, u, eps, out, *(out if t is None else t for t in more), coef, index,
        coef if sigma is None else sigma.float().contiguous(), *ids,
        partial, dim, coef.shape[0], x.stride(0), v.stride(0), u.stride(0), eps.stride(0),
        0.0 if a.guidance is None else a.guidance.scale, offset, *_words(0 if address is None else address.seed),
        NOISE=2 if address is not None else int(noise is not None), ALIGNED=offset % 4 == 0,
        MEAN=want_mean, X0=sigma is not None, COPY=copy_dtype is not None, **_pair(a), **_EXACT,
    )  # fmt: skip
    logp = _finish(a, partial, coef, index, dim, (False, False))[0]
    return out, logp, more[0], more[1], more[2]


def logp(
    a: Affine, x_next: Tensor, v_ref: Tensor | None, v_old: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp, kl, Guard log-ratio), [B] each."""
    if not a.x.numel():
        return plain.logp(a, x_next, v_ref, v_old)
    a = _guided(a)
    x, v, u, coef, index = _inputs(a)
    y, ref, old = (x if t is None else _packed(t) for t in (x_next, v_ref, v_old))
    batch, dim = x.shape[0], x.numel() // x.shape[0]
    chunks, wanted = triton.cdiv(dim, BLOCK), (v_ref is not None, v_old is not None)
    partial = torch.empty(3 * batch * chunks, device=x.device)
    affine.logp_kernel[(batch * chunks,)](
        x, v, u, y, ref, old, coef, index, partial, dim, coef.shape[0], batch * chunks,
        *(t.stride(0) for t in (x, v, u, y, ref, old)), 0.0 if a.guidance is None else a.guidance.scale,
        KL=wanted[0], GUARD=wanted[1], **_pair(a), **_EXACT,
    )  # fmt: skip
    return _finish(a, partial, coef, index, dim, wanted)


def grad(
    a: Affine,
    x_next: Tensor,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    g_logp: Tensor | None,
    g_kl: Tensor | None,
    g_guard: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(dv, None), or (dc, du) of a guidance pair, in the dtypes of v and u."""
    if not a.x.numel():
        return torch.empty_like(a.v), None if a.guidance is None else torch.empty_like(a.guidance.uncond)
    if (guided := _guided(a)) is not a and a.guidance is not None:
        inner, _ = grad(guided, x_next, v_ref, v_old, g_logp, g_kl, g_guard)
        dc, du = (torch.empty(inner.shape, dtype=t.dtype, device=t.device) for t in (a.v, a.guidance.uncond))
        _guide(a, inner, dc, du)
        return dc, du
    x, v, u, coef, index = _inputs(a)
    y, ref, old = (x if t is None else _packed(t) for t in (x_next, v_ref, v_old))
    upstream = [coef if g is None else g.float().contiguous() for g in (g_logp, g_kl, g_guard)]
    batch, dim = x.shape[0], x.numel() // x.shape[0]
    dv, du = (torch.empty(x.shape, dtype=t.dtype, device=x.device) for t in (a.v, u))
    affine.grad_kernel[(batch * triton.cdiv(dim, BLOCK),)](
        x, v, u, y, ref, old, coef, index, *upstream, dv, du, dim, coef.shape[0],
        *(t.stride(0) for t in (x, v, u, y, ref, old)), 0.0 if a.guidance is None else a.guidance.scale, *_slopes(a),
        LOGP=g_logp is not None, KL=g_kl is not None and v_ref is not None,
        GUARD=g_guard is not None and v_old is not None, **_pair(a), **_EXACT,
    )  # fmt: skip
    return dv, None if a.guidance is None else du


def policy(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    weight: Tensor | None,
    mask: Tensor | None,
    kl: Tensor | None,
    kl_coef: float,
    log_ratio: Tensor | None,
    denominator: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(loss, metrics, d loss/d log-ratio, d loss/d kl)."""
    batch, device = logp.numel(), logp.device
    given = (logp, logp_old, advantage, weight, None if mask is None else mask.view(torch.uint8), kl, log_ratio)
    loss, metrics, d_delta = (
        torch.empty((), device=device),
        torch.empty(8, device=device),
        torch.empty(batch, device=device),
    )
    d_kl = None if kl is None else torch.empty(batch, device=device)
    small.policy_kernel[(1,)](
        *(logp if t is None else t.contiguous() for t in given), loss, metrics, d_delta,
        d_delta if d_kl is None else d_kl, batch, clip_low, clip_high, adv_clip, kl_coef, denominator or 0.0,
        weight is not None, mask is not None, kl is not None, log_ratio is not None, denominator is not None,
        max(16, triton.next_power_of_2(batch)), **_EXACT,
    )  # fmt: skip
    return loss, metrics, d_delta, d_kl


def _normalised(values: Tensor, ids: Tensor, weights: Tensor, std: str, eps: float, ddof: int, rank: bool) -> Tensor:
    """Σ_r weight_r · normalised(values_r), fp64 [B], of fp64 [R, B]."""
    rewards, batch = values.shape
    out = torch.empty(batch, dtype=torch.float64, device=values.device)
    rows, block = 8, min(128, triton.next_power_of_2(max(batch, 16)))
    grid = (triton.cdiv(batch, rows),)
    if rank:
        ranked = torch.empty_like(values)
        for r in range(rewards):
            small.rank_kernel[grid](values[r], ids, ranked[r], batch, rows, block, **_EXACT)
        values = ranked
    small.normalise_kernel[grid](values, ids, weights, out, rewards, batch, eps, ddof, _STD[std], rows, block, **_EXACT)
    return out


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    combine: str,
    std: str,
    eps: float,
    ddof: int,
    rank: bool,
    batch_norm: bool,
) -> Tensor:
    """Advantage fp32 [B] of rewards [R, B]."""
    if not rewards.numel():
        return torch.zeros(rewards.shape[1], device=rewards.device)
    r, w, ids = rewards.double(), weights.double(), group_ids.contiguous()
    r = torch.where((w != 0)[:, None], r, 0.0)
    missing = torch.isnan(r).any(0)
    if combine != "weighted_advantage_sum":
        r, w = reference_small.combined(r, w, combine)[None], (w != 0).any().double().view(1)
    r = torch.where(missing, torch.nan, r).contiguous()
    out = _normalised(r, ids, w, std, eps, ddof, rank)
    if batch_norm:
        lost = torch.where(torch.isnan(r).any(0), torch.nan, out)[None]
        out = _normalised(lost, torch.zeros_like(ids), torch.ones_like(w[:1]), "group", eps, ddof, False)
    return out.float()


def winrate_advantage(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), fp32 [P, G]."""
    rate = reference_small.win_rate(wins, counts)
    if not rate.numel():
        return rate.float(), rate.float()
    ids = torch.arange(rate.shape[0], device=rate.device).repeat_interleave(rate.shape[1])
    one = torch.ones(1, dtype=torch.float64, device=rate.device)
    return rate.float(), _normalised(rate.reshape(1, -1), ids, one, std, eps, ddof, False).float().view(rate.shape)
