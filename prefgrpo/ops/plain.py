"""The torch backend: the functions that every backend has, over `reference` and `reference_small`.

Invariant: what a compiled backend returns is what this module returns, up to the rounding that docs/ops.md states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.ops import reference, reference_small
from prefgrpo.ops.args import Affine, NoiseAddress, rows_of

group_advantage = reference_small.group_advantage
winrate_advantage = reference_small.winrate_advantage


def normal(seed: int, sample: Tensor, step: Tensor, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Addressed noise [B, numel]."""
    return reference.philox_normal(seed, sample, step, numel, offset, dtype)


def _velocity(a: Affine) -> Tensor:
    g = a.guidance
    return a.v if g is None else reference.guided(a.v, g.uncond, g.scale, g.from_cond, g.rescale)


def step(
    a: Affine,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype,
    want_mean: bool,
    sigma: Tensor | None,
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(x', logp, mean, x0, copy)."""
    x, rows, v = a.x, rows_of(a), _velocity(a)
    eps = noise
    if isinstance(noise, NoiseAddress):
        assert noise.step is not None
        numel = x[0].numel() if x.shape[0] else 0
        eps = reference.philox_normal(noise.seed, noise.sample, noise.step, numel, noise.offset).view(x.shape)
    assert eps is None or isinstance(eps, Tensor)
    x_next, logp = reference.affine_step(x, v, rows, eps, out_dtype)
    mean = reference.affine_mean(x, v, rows).to(logp.dtype) if want_mean else None
    x0 = None
    if sigma is not None:
        column = reference.expand((sigma if a.row is None else sigma.index_select(0, a.row)).to(logp.dtype), x)
        x0 = (x.to(logp.dtype) - column * v.to(logp.dtype)).to(out_dtype)
    copy = None if copy_dtype is None else x_next.to(logp.dtype).to(copy_dtype)
    return x_next, logp, mean, x0, copy


def logp(
    a: Affine, x_next: Tensor, v_ref: Tensor | None, v_old: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp, kl, Guard log-ratio), [B] each."""
    rows, v = rows_of(a), _velocity(a)
    kl = None if v_ref is None else reference.affine_kl(v, v_ref, rows)
    guard = None if v_old is None else reference.guard_log_ratio(a.x, v, x_next, v_old, rows)
    return reference.affine_logp(a.x, v, x_next, rows), kl, guard


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
    dv = reference.affine_grad(a.x, _velocity(a), x_next, rows_of(a), v_ref, v_old, g_logp, g_kl, g_guard)
    g = a.guidance
    if g is None:
        return dv.to(a.v.dtype), None
    dc, du = reference.guided_grad(dv, a.v, g.uncond, g.scale, g.from_cond, g.rescale)
    return dc.to(a.v.dtype), du.to(g.uncond.dtype)


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
    """(loss, metrics, d loss/d log-ratio, d loss/d kl); the log-ratio is `log_ratio` or logp − logp_old."""
    with torch.enable_grad():
        delta = (logp - logp_old if log_ratio is None else log_ratio).detach().requires_grad_()
        kl = None if kl is None else kl.detach().requires_grad_()
        loss, metrics = reference_small.policy(
            logp, logp_old, advantage, clip_low, clip_high, adv_clip, weight, mask, kl, kl_coef, delta, denominator
        )
        wanted = (delta,) if kl is None else (delta, kl)
        grads = torch.autograd.grad(loss, wanted)
    return loss.detach(), metrics, grads[0], grads[1] if kl is not None else None
