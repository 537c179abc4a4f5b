"""The torch backend: the functions that every backend has, over `reference` and `reference_small`.

Invariant: what a compiled backend returns is what this module returns, up to the rounding that docs/ops.md states.
Gradients are written out: inside a custom op, where these functions run in a compiled graph, autograd records nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.ops import args, reference, reference_small
from prefgrpo.ops.args import Affine, Results, rows_of

group_advantage, winrate_advantage = reference_small.group_advantage, reference_small.winrate_advantage


def philox_normal(a: args.Normal) -> Results:
    """`Normal.results`."""
    return [reference.philox_normal(*a)]


def _velocity(a: Affine) -> Tensor:
    return a.v if a.uncond is None else reference.guided(a.v, a.uncond, a.scale, a.from_cond, a.rescale)


@torch.no_grad()
def affine_step(a: args.Step) -> Results:
    """`Step.results`."""
    x, rows, v, eps = a.x, rows_of(a), _velocity(a), a.eps
    if a.sample is not None and a.step is not None:
        numel = x[0].numel() if x.shape[0] else 0
        eps = reference.philox_normal(a.seed, a.sample, a.step, numel, a.offset).view(x.shape)
    x_next, logp = reference.affine_step(x, v, rows, eps, a.out_dtype)
    mean = reference.affine_mean(x, v, rows).to(logp.dtype) if a.want_mean else None
    x0 = None
    if a.sigma is not None:
        sigma = a.sigma if a.row is None else a.sigma.index_select(0, a.row)
        x0 = (x.to(logp.dtype) - reference.expand(sigma.to(logp.dtype), x) * v.to(logp.dtype)).to(a.out_dtype)
    copy = None if a.copy_dtype is None else x_next.to(logp.dtype).to(a.copy_dtype)
    return [x_next, logp, mean, x0, copy]


@torch.no_grad()
def affine_logp(a: args.Replay) -> Results:
    """`Replay.results`."""
    rows, v = rows_of(a), _velocity(a)
    kl = None if a.v_ref is None else reference.affine_kl(v, a.v_ref, rows)
    guard = None if a.v_old is None else reference.guard_log_ratio(a.x, v, a.x_next, a.v_old, rows)
    return [reference.affine_logp(a.x, v, a.x_next, rows), kl, guard]


@torch.no_grad()
def affine_grad(a: args.Replay) -> Results:
    """`Replay.gradients`."""
    dv = reference.affine_grad(a, _velocity(a), rows_of(a))
    if a.uncond is None:
        return [dv.to(a.v.dtype), None]
    dc, du = reference.guided_grad(dv, a.v, a.uncond, a.scale, a.from_cond, a.rescale)
    return [dc.to(a.v.dtype), du.to(a.uncond.dtype)]


@torch.no_grad()
def policy_loss(a: args.Policy) -> Results:
    """`Policy.results`."""
    return [*reference_small.policy_loss(a), *reference_small.policy_grad(a)]
