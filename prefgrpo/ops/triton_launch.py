"""The triton backend: the functions common to all backends, on top of `prefgrpo.kernels`.

The arguments' `results` allocates outputs. Invariants: every launch disables floating-point contraction, so that
a·x + b·v rounds as in C++ and in torch, whatever Triton's default; and it runs on the tensors' device, which need not
be the current one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from prefgrpo.kernels import affine, noise, small
from prefgrpo.ops import args, plain
from prefgrpo.ops.args import Affine, Results, contiguous_samples, rescaled_dim

BLOCK = 2048
_FLAGS = {"enable_fp_fusion": False}
A = TypeVar("A", bound=tuple[Any, ...])


def _on_tensor_device(op: Callable[[A], Results]) -> Callable[[A], Results]:
    """Make the first tensor's device current, since Triton launches on the current device."""

    @wraps(op)
    def guarded(a: A) -> Results:
        with torch.cuda.device_of(next(t for t in a if isinstance(t, Tensor))):
            return op(a)

    return guarded


def _seed_words(seed: int) -> tuple[int, int]:
    """Low and high 32 bits of the seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


@_on_tensor_device
def philox_normal(a: args.Normal) -> Results:
    """`Normal.results`."""
    out = a.out if a.dtype == torch.float32 else None
    (out,) = a._replace(dtype=torch.float32, out=out).results()
    if out.numel():
        noise.normal_kernel[(out.shape[0] * triton.cdiv(a.numel, BLOCK),)](
            out, a.sample.contiguous(), a.step.contiguous(), a.numel, a.offset, *_seed_words(a.seed), BLOCK,
            a.offset % 4 == 0, **_FLAGS,
        )  # fmt: skip
    return [out.to(a.dtype)]


def _guidance_grads(a: Affine) -> tuple[float, float]:
    """dv/dc and dv/du of the guided velocity v."""
    if a.uncond is None:
        return 1.0, 0.0
    return (1.0 + a.scale, -a.scale) if a.from_cond else (a.scale, 1.0 - a.scale)


def _launch_guide(a: Any, dv: Tensor | None, out: Tensor, du: Tensor | None) -> None:
    c, u, length = contiguous_samples(a.v), contiguous_samples(a.uncond), rescaled_dim(a)
    dim = _dim(a)
    block = triton.next_power_of_2(length)
    rows, rows_per_program = dim // length, max(1, 512 // block)
    total = rows * c.shape[0]
    affine.guide_kernel[(triton.cdiv(total, rows_per_program),)](
        c, u, dv if dv is not None else c, out, du if du is not None else out, dim, rows, total, length,
        c.stride(0), u.stride(0), a.scale, *_guidance_grads(a), a.from_cond, dv is not None, rows_per_program, block,
        **_FLAGS,
    )  # fmt: skip


def _precompute_guidance(a: Any) -> Any:
    """If guidance restores norms: compute the guided velocity in a separate launch, as v."""
    if not rescaled_dim(a) or not a.x.numel():
        return a
    v = torch.empty_like(a.x, dtype=torch.float32, memory_format=torch.contiguous_format)
    _launch_guide(a, None, v, None)
    return a._replace(v=v, uncond=None)


def _inputs(a: Affine, *more: Tensor | None) -> tuple[list[Tensor], list[int], Tensor, Tensor]:
    """([x, v, u, *more], their strides, coef, index); x stands in for absent tensors, which no kernel reads."""
    x = contiguous_samples(a.x)
    inputs = [x if t is None else contiguous_samples(t) for t in (x, a.v, a.uncond, *more)]
    coef = a.coef.float().contiguous()
    return inputs, [t.stride(0) for t in inputs], coef, coef if a.row is None else a.row.contiguous()


def _dim(a: Affine) -> int:
    return a.x.numel() // a.x.shape[0]


def _constexprs(a: Affine) -> dict[str, Any]:
    pair = a.uncond is not None
    return {"HAS_INDEX": a.row is not None, "PAIR": pair, "FROM_COND": pair and a.from_cond, "BLOCK": BLOCK, **_FLAGS}


def _finish(
    a: Affine, partial: Tensor, coef: Tensor, index: Tensor, first: Tensor | None, *more: Tensor | None
) -> None:
    """Write logp, and for a replay KL and Guard log-ratio."""
    batch, dim = a.x.shape[0], _dim(a)
    chunks = triton.cdiv(dim, BLOCK)
    more = more or (None, None)
    affine.finish_kernel[(batch,)](
        partial, coef, index, first, *(first if t is None else t for t in more), dim, chunks, coef.shape[0],
        batch * chunks, a.row is not None, *(t is not None for t in more), 1024, **_FLAGS,
    )  # fmt: skip


@_on_tensor_device
def affine_step(a: args.Step) -> Results:
    """`Step.results`."""
    if not a.x.numel():
        return plain.affine_step(a)
    a = _precompute_guidance(a)
    inputs, strides, coef, index = _inputs(a, a.eps)
    out, logp, mean = results = a.results()
    grid = a.x.shape[0] * triton.cdiv(_dim(a), BLOCK)
    partial = torch.empty(grid, dtype=torch.float32, device=a.x.device)
    sample, step = (index if t is None else t.contiguous() for t in (a.sample, a.step))
    affine.step_kernel[(grid,)](
        *inputs, out, out if mean is None else mean, coef, index,
        sample, step, partial, _dim(a), coef.shape[0],
        *strides, a.scale, a.offset, *_seed_words(a.seed),
        NOISE=2 if a.sample is not None else int(a.eps is not None), ALIGNED=a.offset % 4 == 0,
        MEAN=a.want_mean, **_constexprs(a),
    )  # fmt: skip
    _finish(a, partial, coef, index, logp)
    return results


@_on_tensor_device
def affine_logp(a: args.Replay) -> Results:
    """`Replay.results`."""
    if not a.x.numel():
        return plain.affine_logp(a)
    a = _precompute_guidance(a)
    inputs, strides, coef, index = _inputs(a, a.x_next, a.v_ref, a.v_old)
    grid, results = a.x.shape[0] * triton.cdiv(_dim(a), BLOCK), a.results()
    partial = torch.empty(3 * grid, dtype=torch.float32, device=a.x.device)
    affine.logp_kernel[(grid,)](
        *inputs, coef, index, partial, _dim(a), coef.shape[0], grid, *strides, a.scale,
        KL=a.v_ref is not None, GUARD=a.v_old is not None, **_constexprs(a),
    )  # fmt: skip
    _finish(a, partial, coef, index, *results)
    return results


@_on_tensor_device
def affine_grad(a: args.Replay) -> Results:
    """`Replay.gradients`."""
    results = a.gradients()
    if not a.x.numel():
        return results
    if (guided := _precompute_guidance(a)) is not a:
        _launch_guide(a, affine_grad(guided)[0], *results)
        return results
    inputs, strides, coef, index = _inputs(a, a.x_next, a.v_ref, a.v_old)
    upstream = [coef if g is None else g.float().contiguous() for g in (a.g_logp, a.g_kl, a.g_guard)]
    dv, du = results
    affine.grad_kernel[(a.x.shape[0] * triton.cdiv(_dim(a), BLOCK),)](
        *inputs, coef, index, *upstream, dv, dv if du is None else du, _dim(a), coef.shape[0], *strides, a.scale,
        *_guidance_grads(a), LOGP=a.g_logp is not None, KL=a.g_kl is not None and a.v_ref is not None,
        GUARD=a.g_guard is not None and a.v_old is not None, **_constexprs(a),
    )  # fmt: skip
    return results


@_on_tensor_device
def policy_loss(a: args.Policy) -> Results:
    """`Policy.results`."""
    batch, results = len(a.logp), a.results()
    inputs = (a.logp, a.logp_old, a.advantage, a.weight, a.kl, a.log_ratio)
    small.policy_kernel[(1,)](
        *(a.logp if t is None else t.contiguous() for t in inputs), *(a.logp if t is None else t for t in results),
        batch, a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator or 0.0,
        *(t is not None for t in (a.weight, a.kl, a.log_ratio, a.denominator)),
        max(16, triton.next_power_of_2(batch)), **_FLAGS,
    )  # fmt: skip
    return results


@_on_tensor_device
def winrate_advantage(a: args.Winrate) -> Results:
    """`Winrate.results`."""
    results, (prompts, group, _) = a.results(), a.wins.shape
    if results[0].numel():
        small.winrate_kernel[(prompts,)](
            a.wins.contiguous(), a.counts.contiguous(), *results, group, a.eps, a.ddof, a.use_std,
            triton.next_power_of_2(group), **_FLAGS,
        )  # fmt: skip
    return results
