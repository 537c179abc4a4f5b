"""The cpu and cuda backends: calls into prefgrpo._C with pointers, strides and dtype enums.

The arguments' `results` allocates outputs; the kernels own no memory. Invariant: a tensor whose samples are not
contiguous is copied first, so the kernels see a single layout; a CUDA call runs on torch's current stream for the
tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from prefgrpo.ops import args, plain
from prefgrpo.ops.args import Affine, Combine, Results, Std, packed, rescaled_dim
from prefgrpo.ops.backend import extension

_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_STD, _COMBINE = get_args(Std).index, get_args(Combine).index
_C: Any = extension()
_TICKETS: dict[tuple[int, int], Tensor] = {}


def _view(t: Tensor | None) -> tuple[int, int, int] | None:
    return None if t is None else (t.data_ptr(), t.stride(0), _CODE[t.dtype])


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _contiguous(*given: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in given]


def _packed(*given: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else packed(t) for t in given]


def _on_cpu(t: Tensor) -> bool:
    return t.is_cpu


def _stream(t: Tensor) -> int:
    return torch.cuda.current_stream(t.device).cuda_stream


def _launch(function: Callable[..., None], on: Tensor, *given: Any, planes: int = 0) -> None:
    """Call prefgrpo._C's `function` with the library number, `given`, scratch for `planes` sums, stream or threads."""
    if _on_cpu(on):
        function(0, *given, *((0, 0) if planes else ()), torch.get_num_threads())
        return
    with torch.cuda.device_of(on):
        scratch = _scratch(on, planes) if planes else ()
        function(1, *given, *map(_ptr, scratch), _stream(on))


def _scratch(x: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """(partial sums, tickets) for a CUDA reduction; tickets are 0 before and after every launch."""
    batch, dim = x.shape[0], x.numel() // max(x.shape[0], 1)
    partial = torch.empty(planes * batch * _C.partials(dim), dtype=torch.float64, device=x.device)
    if torch.cuda.is_current_stream_capturing():
        return partial, torch.zeros(batch, dtype=torch.int32, device=x.device)
    key = (x.device.index, _stream(x))
    ticket = _TICKETS.get(key)
    if ticket is None or ticket.numel() < batch:
        ticket = _TICKETS[key] = torch.zeros(max(batch, 256), dtype=torch.int32, device=x.device)
    return partial, ticket


def _too_wide(a: Affine) -> bool:
    """Whether the dimension of the norm exceeds the CPU kernels' tile; plain torch then runs the op."""
    return a.rescale and _on_cpu(a.x) and rescaled_dim(a) > _C.max_rescale_dim


def _guided(a: Any) -> Any:
    """On CUDA, if the kernels cannot restore the norm, a separate launch does, and v becomes the guided velocity."""
    if not (length := a.rescale and rescaled_dim(a)) or _on_cpu(a.x) or _C.fuses_norm(length):
        return a
    v = torch.empty_like(a.x, dtype=torch.float32, memory_format=torch.contiguous_format)
    _guide(a, None, v, None)
    return a._replace(v=v, uncond=None)


def _guide(a: Affine, dv: Tensor | None, out: Tensor | None, du: Tensor | None) -> None:
    c, u = _packed(a.v, a.uncond)
    pair, batch = (a.scale, a.from_cond, rescaled_dim(a)), a.v.shape[0]
    views = (_view(c), _view(u), pair, _view(dv), _view(out), _view(du))
    _launch(_C.guide, a.v, batch, a.v.numel() // max(batch, 1), *views)


def _head(a: Affine) -> tuple[list[Any], list[Tensor | None]]:
    """Leading arguments of an affine launch (up to `index`), and the tensors to keep alive until it is done."""
    x, coef = a.x, a.coef if a.coef.dtype == torch.float32 else a.coef.float()
    keep = [*_packed(x, a.v, a.uncond), coef.contiguous(), None if a.row is None else a.row.contiguous()]
    size = (batch := x.shape[0]), x.numel() // max(batch, 1)
    pair = (a.scale, a.from_cond, rescaled_dim(a) if a.rescale else 0)
    return [*size, *map(_view, keep[:3]), pair, _ptr(keep[3]), coef.shape[0], _ptr(keep[4])], keep


def philox_normal(a: args.Normal) -> Results:
    """`Normal.results`."""
    (out,) = results = a.results()
    sample, step = _contiguous(a.sample, a.step)
    _launch(_C.normal, a.sample, *out.shape, (a.seed, _ptr(sample), _ptr(step), a.offset), _view(out))
    return results


def affine_step(a: args.Step) -> Results:
    """`Step.results`."""
    if _too_wide(a):
        return plain.affine_step(a)
    a = _guided(a)
    head, _alive = _head(a)
    out, logp, mean, x0 = results = a.results()
    (eps,) = _packed(a.eps)
    sample, step, sigma = _contiguous(a.sample, a.step, None if a.sigma is None else a.sigma.float())
    address = None if sample is None else (a.seed, _ptr(sample), _ptr(step), a.offset)
    more = (address, _view(mean), _view(x0), _ptr(sigma), _ptr(logp))
    _launch(_C.affine_step, a.x, *head, _view(out), _view(eps), *more, planes=1)
    return results


def affine_logp(a: args.Replay) -> Results:
    """`Replay.results`."""
    if _too_wide(a):
        return plain.affine_logp(a)
    a = _guided(a)
    head, _alive = _head(a)
    read, results = _packed(a.x_next, a.v_ref, a.v_old), a.results()
    _launch(_C.affine_logp, a.x, *head, *map(_view, read), *map(_ptr, results), planes=3)
    return results


def affine_grad(a: args.Replay) -> Results:
    """`Replay.gradients`."""
    if _too_wide(a):
        return plain.affine_grad(a)
    if (guided := _guided(a)) is not a:
        (inner, _), results = affine_grad(guided._replace(out=None)), a.gradients()
        _guide(a, inner, *results)
        return results
    head, _alive = _head(a)
    read = _packed(a.x_next, None if a.g_kl is None else a.v_ref, None if a.g_guard is None else a.v_old)
    upstream = _contiguous(*(None if g is None else g.float() for g in (a.g_logp, a.g_kl, a.g_guard)))
    results = a.gradients()
    _launch(_C.affine_grad, a.x, *head, *map(_view, read), *map(_ptr, upstream), *map(_view, results))
    return results


def policy_loss(a: args.Policy) -> Results:
    """`Policy.results`."""
    read, results = _contiguous(a.logp, a.logp_old, a.advantage, a.weight, a.mask, a.kl, a.log_ratio), a.results()
    numbers = (a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator or 0.0)
    _launch(_C.policy, a.logp, a.logp.shape[0], results[0].numel(), *map(_ptr, read), *numbers, *map(_ptr, results))
    return results


def _real(t: Tensor) -> Tensor:
    """`t` in fp32 or fp64, contiguous."""
    return (t if t.dtype in (torch.float32, torch.float64) else t.double()).contiguous()


def group_advantage(a: args.Group) -> Results:
    """`Group.results`."""
    if _on_cpu(a.rewards) or a.rewards.shape[1] <= args.SCANNED:
        return _group_advantage(a)
    return args.sorted_groups(a, lambda ordered: _group_advantage(ordered, is_sorted=True))


def _group_advantage(a: args.Group, is_sorted: bool = False) -> Results:
    r, ids, w = _real(a.rewards), a.group_ids.contiguous(), a.weights.double().contiguous()
    results, scratch = a.results(), None if _on_cpu(r) else r.new_empty(4, r.shape[1], dtype=torch.float64)
    options = (_COMBINE(a.combine), _STD(a.std), a.eps, a.ddof, a.rank)
    values = (r.data_ptr(), _CODE[r.dtype], ids.data_ptr(), is_sorted, w.data_ptr())
    _launch(_C.group_advantage, r, *r.shape, *values, *options, _ptr(scratch), *map(_ptr, results))
    return results


def winrate_advantage(a: args.Winrate) -> Results:
    """`Winrate.results`."""
    wins = _real(a.wins)
    counts = _real(a.counts).to(wins.dtype)
    (prompts, group, _), results = wins.shape, a.results()
    scratch = None if _on_cpu(wins) else wins.new_empty(prompts, group, dtype=torch.float64)
    values = (wins.data_ptr(), counts.data_ptr(), _CODE[wins.dtype], _STD(a.std), a.eps, a.ddof)
    _launch(_C.winrate_advantage, wins, prompts, group, *values, *map(_ptr, results), _ptr(scratch))
    return results
