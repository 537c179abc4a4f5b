"""The cpu and cuda backends: calls into prefgrpo._C with pointers, strides and dtype enums.

The arguments' `results` allocates outputs; the kernels own no memory. Invariant: a tensor whose samples are not
contiguous is copied first, so the kernels see a single layout; a CUDA call runs on torch's current stream for the
tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prefgrpo.ops import args, plain
from prefgrpo.ops.args import Affine, Results, contiguous_samples, rescaled_dim
from prefgrpo.ops.backend import extension

_DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_C: Any = extension()


def _view(t: Tensor | None) -> tuple[int, int, int] | None:
    return None if t is None else (t.data_ptr(), t.stride(0), _DTYPE_CODE[t.dtype])


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _contiguous_samples(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else contiguous_samples(t) for t in tensors]


def _on_cpu(t: Tensor) -> bool:
    return t.is_cpu


def _stream(t: Tensor) -> int:
    return torch.cuda.current_stream(t.device).cuda_stream


def _launch(function: Callable[..., None], like: Tensor, *arguments: Any, num_sums: int = 0) -> None:
    """Call `function` with 0 (cpu) or 1 (cuda), `arguments`, scratch for `num_sums` sums, and threads or stream."""
    if _on_cpu(like):
        function(0, *arguments, *((0,) if num_sums else ()), torch.get_num_threads())
        return
    with torch.cuda.device_of(like):
        scratch = [_scratch(like, num_sums)] if num_sums else []
        function(1, *arguments, *map(_ptr, scratch), _stream(like))


def _scratch(x: Tensor, num_sums: int) -> Tensor:
    """Partial sums of a CUDA reduction."""
    batch, dim = x.shape[0], x.numel() // max(x.shape[0], 1)
    return torch.empty(num_sums * batch * _C.partials(dim), dtype=torch.float64, device=x.device)


def _norm_dim_too_large(a: Affine) -> bool:
    """Whether the norm's dimension is larger than the CPU kernels' tile; plain torch then runs the op."""
    return a.rescale and _on_cpu(a.x) and rescaled_dim(a) > _C.max_rescale_dim


def _precompute_guidance(a: Any) -> Any:
    """On CUDA, if the affine kernels cannot restore the norm: compute the guided velocity in a separate launch."""
    if not (length := a.rescale and rescaled_dim(a)) or _on_cpu(a.x) or _C.fuses_norm(length):
        return a
    v = torch.empty_like(a.x, dtype=torch.float32, memory_format=torch.contiguous_format)
    _launch_guide(a, None, v, None)
    return a._replace(v=v, uncond=None)


def _launch_guide(a: Affine, dv: Tensor | None, out: Tensor | None, du: Tensor | None) -> None:
    c, u = _contiguous_samples(a.v, a.uncond)
    guidance, batch = (a.scale, a.from_cond, rescaled_dim(a)), a.v.shape[0]
    views = (_view(c), _view(u), guidance, _view(dv), _view(out), _view(du))
    _launch(_C.guide, a.v, batch, a.v.numel() // max(batch, 1), *views)


def _leading_args(a: Affine) -> tuple[list[Any], list[Tensor | None]]:
    """Leading arguments of an affine launch (up to `index`), and the tensors to keep alive until it is done."""
    x, coef = a.x, a.coef if a.coef.dtype == torch.float32 else a.coef.float()
    keep = [*_contiguous_samples(x, a.v, a.uncond), coef.contiguous(), None if a.row is None else a.row.contiguous()]
    size = (batch := x.shape[0]), x.numel() // max(batch, 1)
    guidance = (a.scale, a.from_cond, rescaled_dim(a) if a.rescale else 0)
    return [*size, *map(_view, keep[:3]), guidance, _ptr(keep[3]), coef.shape[0], _ptr(keep[4])], keep


def philox_normal(a: args.Normal) -> Results:
    """`Normal.results`."""
    (out,) = results = a.results()
    sample, step = _contiguous(a.sample, a.step)
    _launch(_C.normal, a.sample, *out.shape, (a.seed, _ptr(sample), _ptr(step), a.offset), _view(out))
    return results


def affine_step(a: args.Step) -> Results:
    """`Step.results`."""
    if _norm_dim_too_large(a):
        return plain.affine_step(a)
    a = _precompute_guidance(a)
    leading, _alive = _leading_args(a)
    out, logp, mean = results = a.results()
    (eps,) = _contiguous_samples(a.eps)
    sample, step = _contiguous(a.sample, a.step)
    address = None if sample is None else (a.seed, _ptr(sample), _ptr(step), a.offset)
    more = (address, _view(mean), _ptr(logp))
    _launch(_C.affine_step, a.x, *leading, _view(out), _view(eps), *more, num_sums=1)
    return results


def affine_logp(a: args.Replay) -> Results:
    """`Replay.results`."""
    if _norm_dim_too_large(a):
        return plain.affine_logp(a)
    a = _precompute_guidance(a)
    leading, _alive = _leading_args(a)
    inputs, results = _contiguous_samples(a.x_next, a.v_ref, a.v_old), a.results()
    _launch(_C.affine_logp, a.x, *leading, *map(_view, inputs), *map(_ptr, results), num_sums=3)
    return results


def affine_grad(a: args.Replay) -> Results:
    """`Replay.gradients`."""
    if _norm_dim_too_large(a):
        return plain.affine_grad(a)
    if (guided := _precompute_guidance(a)) is not a:
        (inner, _), results = affine_grad(guided), a.gradients()
        _launch_guide(a, inner, *results)
        return results
    leading, _alive = _leading_args(a)
    inputs = _contiguous_samples(a.x_next, None if a.g_kl is None else a.v_ref, None if a.g_guard is None else a.v_old)
    upstream = _contiguous(*(None if g is None else g.float() for g in (a.g_logp, a.g_kl, a.g_guard)))
    results = a.gradients()
    _launch(_C.affine_grad, a.x, *leading, *map(_view, inputs), *map(_ptr, upstream), *map(_view, results))
    return results


def policy_loss(a: args.Policy) -> Results:
    """`Policy.results`."""
    inputs = _contiguous(a.logp, a.logp_old, a.advantage, a.weight, a.kl, a.log_ratio)
    results = a.results()
    scalars = (a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator or 0.0)
    _launch(_C.policy, a.logp, a.logp.shape[0], *map(_ptr, inputs), *scalars, *map(_ptr, results))
    return results


def _fp32_or_fp64(t: Tensor) -> Tensor:
    """`t` in fp32 or fp64, contiguous."""
    return (t if t.dtype in (torch.float32, torch.float64) else t.double()).contiguous()


def winrate_advantage(a: args.Winrate) -> Results:
    """`Winrate.results`."""
    wins = _fp32_or_fp64(a.wins)
    counts = _fp32_or_fp64(a.counts).to(wins.dtype)
    results = a.results()
    values = (wins.data_ptr(), counts.data_ptr(), _DTYPE_CODE[wins.dtype], a.use_std, a.eps, a.ddof)
    _launch(_C.winrate_advantage, wins, *wins.shape[:2], *values, *map(_ptr, results))
    return results
