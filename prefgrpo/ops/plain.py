"""The torch backend: the functions common to all backends, on top of `reference`.

Invariant: compiled backends return the same as this module, up to the rounding stated in docs/ops.md, in the dtypes and
layout of the arguments' `results`: fp64 inputs are computed in fp64 and then rounded. Gradients are explicit, because
autograd records nothing inside a custom op, where these functions run in a compiled graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefgrpo.ops import args, reference
from prefgrpo.ops.args import Affine, Results, coef_rows

FP32 = torch.float32
winrate_advantage = reference.winrate_advantage


def philox_normal(a: args.Normal) -> Results:
    """`Normal.results`."""
    return [reference.philox_normal(*a[:6]).contiguous()]


def _cast(values: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> Results:
    """The values cast to these dtypes, contiguous."""
    return [t if t is None else t.to(dtype).contiguous() for t, dtype in zip(values, dtypes, strict=True)]


def _velocity(a: Affine) -> Tensor:
    return a.v if a.uncond is None else reference.guided(a.v, a.uncond, a.scale, a.from_cond, a.rescale)


@torch.no_grad()
def affine_step(a: args.Step) -> Results:
    """`Step.results`."""
    x, rows, v, eps = a.x, coef_rows(a), _velocity(a), a.eps
    if a.sample is not None and a.step is not None:
        numel = x[0].numel() if x.shape[0] else 0
        eps = reference.philox_normal(a.seed, a.sample, a.step, numel, a.offset).view(x.shape)
    x_next, logp = reference.affine_step(x, v, rows, eps, a.out_dtype)
    mean = reference.affine_mean(x, v, rows) if a.want_mean else None
    return _cast([x_next, logp, mean], (a.out_dtype, FP32, FP32))


@torch.no_grad()
def affine_logp(a: args.Replay) -> Results:
    """`Replay.results`."""
    rows, v = coef_rows(a), _velocity(a)
    kl = None if a.v_ref is None else reference.affine_kl(v, a.v_ref, rows)
    guard = None if a.v_old is None else reference.guard_log_ratio(a.x, v, a.x_next, a.v_old, rows)
    return _cast([reference.affine_logp(a.x, v, a.x_next, rows), kl, guard], (FP32, FP32, FP32))


@torch.no_grad()
def affine_grad(a: args.Replay) -> Results:
    """`Replay.gradients`."""
    dv = reference.affine_grad(a, _velocity(a), coef_rows(a))
    if a.uncond is None:
        return _cast([dv, None], (a.v.dtype, None))
    grads = reference.guided_grad(dv, a.v, a.uncond, a.scale, a.from_cond, a.rescale)
    return _cast(grads, (a.v.dtype, a.uncond.dtype))


@torch.no_grad()
def policy_loss(a: args.Policy) -> Results:
    """`Policy.results`."""
    return _cast([*reference.policy_loss(a), *reference.policy_grad(a)], (FP32,) * 4)
