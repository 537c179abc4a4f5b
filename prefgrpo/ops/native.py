"""The cpu and cuda backends: calls into prefgrpo._C with pointers, strides and dtype enums.

Outputs are allocated here; the kernels own nothing. Invariant: a tensor that is not [B, contiguous …] is made so
first, hence the kernels see one layout; a CUDA call runs on torch's current stream of the tensors' device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.ops import plain
from prefgrpo.ops.args import Affine, NoiseAddress
from prefgrpo.ops.backend import extension

_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_STD = {"group": 0, "global": 1, "none": 2}
_COMBINE = {"weighted_sum": 0, "weighted_advantage_sum": 1, "geometric_mean": 2, "harmonic_mean": 3}
_C: Any = extension()
_TICKETS: dict[tuple[int, int], Tensor] = {}


def _packed(t: Tensor) -> Tensor:
    """`t` itself if each sample is contiguous, else a contiguous copy."""
    return t if t.is_contiguous() or (t.shape[0] > 0 and t[0].is_contiguous()) else t.contiguous()


def _optional(t: Tensor | None) -> Tensor | None:
    return None if t is None else _packed(t)


def _view(t: Tensor | None) -> tuple[int, int, int] | None:
    return None if t is None else (t.data_ptr(), t.stride(0), _CODE[t.dtype])


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _on_cpu(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _launch_on(device: torch.device) -> tuple[int, int]:
    """(library, stream): CUDA's stream, or for the CPU the number of threads."""
    if device.type == "cpu":
        return 0, torch.get_num_threads()
    return 1, torch.cuda.current_stream(device).cuda_stream


def _scratch(x: Tensor, planes: int) -> tuple[Tensor | None, Tensor | None]:
    """(partial sums, tickets) of a CUDA reduction; tickets are 0 before and after every launch."""
    if _on_cpu(x):
        return None, None
    batch, dim = x.shape[0], x.numel() // max(x.shape[0], 1)
    partial = torch.empty(planes * batch * _C.partials(dim), dtype=torch.float64, device=x.device)
    if torch.cuda.is_current_stream_capturing():
        return partial, torch.zeros(batch, dtype=torch.int32, device=x.device)
    key = (x.device.index, torch.cuda.current_stream(x.device).cuda_stream)
    ticket = _TICKETS.get(key)
    if ticket is None or ticket.numel() < batch:
        ticket = _TICKETS[key] = torch.zeros(max(batch, 256), dtype=torch.int32, device=x.device)
    return partial, ticket


def _too_wide(a: Affine) -> bool:
    """Whether the norm's dimension exceeds the CPU kernels' tile, which leaves the op to plain torch."""
    return _on_cpu(a.x) and _rescaled(a) > _C.max_rescale_dim


def _rescaled(a: Affine) -> int:
    """Length of the dimension whose norm is restored, or 0."""
    return a.x.shape[-1] if a.guidance is not None and a.guidance.rescale and a.x.dim() > 1 else 0


def _guided(a: Affine) -> Affine:
    """On CUDA a norm is restored in a launch of its own, and v is then the velocity itself."""
    if not _rescaled(a) or _on_cpu(a.x):
        return a
    v = _empty(a.x, torch.float32)
    _guide(a, None, v, None)
    return a._replace(v=v, guidance=None)


def _guide(a: Affine, dv: Tensor | None, out: Tensor, du: Tensor | None) -> None:
    assert a.guidance is not None
    c, u = _packed(a.v), _packed(a.guidance.uncond)
    pair, batch = (a.guidance.scale, a.guidance.from_cond, _rescaled(a)), c.shape[0]
    with torch.cuda.device_of(c):
        _, stream = _launch_on(c.device)
        views = [_view(t) for t in (c, u)]
        _C.guide(batch, c.numel() // max(batch, 1), *views, pair, _view(dv), _view(out), _view(du), stream)


def _head(a: Affine) -> tuple[list[Any], list[Tensor]]:
    """Leading arguments of an affine launch (up to `index`), and the tensors that must outlive it."""
    g, x, v = a.guidance, _packed(a.x), _packed(a.v)
    u = None if g is None else _packed(g.uncond)
    coef = a.coef if a.coef.dtype == torch.float32 and a.coef.is_contiguous() else a.coef.float().contiguous()
    index = None if a.row is None else a.row.contiguous()
    dim = x.numel() // max(x.shape[0], 1)
    pair = (0.0, False, 0) if g is None else (g.scale, g.from_cond, _rescaled(a))
    keep = [t for t in (x, v, u, coef, index) if t is not None]
    head = [x.shape[0], dim, _view(x), _view(v), _view(u), pair, coef.data_ptr(), coef.shape[0], _ptr(index)]
    return head, keep


def _address(noise: NoiseAddress) -> tuple[int, int, int, int]:
    assert noise.step is not None
    return noise.seed, noise.sample.contiguous().data_ptr(), noise.step.contiguous().data_ptr(), noise.offset


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def normal(seed: int, sample: Tensor, step: Tensor, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Addressed noise [B, numel]."""
    out = torch.empty(sample.numel(), numel, dtype=dtype, device=sample.device)
    address = NoiseAddress(seed, sample.contiguous(), step.contiguous(), offset)
    with torch.cuda.device_of(out):
        library, stream = _launch_on(out.device)
        _C.normal(library, out.shape[0], numel, _address(address), _view(out), stream)
    return out


def step(
    a: Affine,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype,
    want_mean: bool,
    sigma: Tensor | None,
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(x', logp, mean, x0, copy)."""
    if _too_wide(a):
        return plain.step(a, noise, out_dtype, want_mean, sigma, copy_dtype)
    a = _guided(a)
    head, keep = _head(a)
    x = keep[0]
    eps = _packed(noise) if isinstance(noise, Tensor) and not isinstance(noise, NoiseAddress) else None
    if isinstance(noise, NoiseAddress):
        assert noise.step is not None
        noise = noise._replace(sample=noise.sample.contiguous(), step=noise.step.contiguous())
    address = _address(noise) if isinstance(noise, NoiseAddress) else None
    out, logp = _empty(x, out_dtype), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = _empty(x, torch.float32) if want_mean else None
    x0 = None if sigma is None else _empty(x, out_dtype)
    sigma = None if sigma is None else sigma.float().contiguous()
    copy = None if copy_dtype is None else _empty(x, copy_dtype)
    with torch.cuda.device_of(x):
        library, stream = _launch_on(x.device)
        partial, ticket = _scratch(x, 1)
        _C.affine_step(
            library,
            *head,
            _view(out),
            _view(eps),
            address,
            _view(mean),
            _view(x0),
            _ptr(sigma),
            _view(copy),
            logp.data_ptr(),
            _ptr(partial),
            _ptr(ticket),
            stream,
        )
    return out, logp, mean, x0, copy


def logp(
    a: Affine, x_next: Tensor, v_ref: Tensor | None, v_old: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp, kl, Guard log-ratio), [B] each."""
    if _too_wide(a):
        return plain.logp(a, x_next, v_ref, v_old)
    a = _guided(a)
    head, keep = _head(a)
    x = keep[0]
    x_next = _packed(x_next)
    ref, old = _optional(v_ref), _optional(v_old)
    wanted = (True, ref is not None, old is not None)
    out = [torch.empty(x.shape[0], dtype=torch.float32, device=x.device) if want else None for want in wanted]
    with torch.cuda.device_of(x):
        library, stream = _launch_on(x.device)
        partial, ticket = _scratch(x, 3)
        _C.affine_logp(
            library,
            *head,
            _view(x_next),
            _view(ref),
            _view(old),
            *(_ptr(t) for t in out),
            _ptr(partial),
            _ptr(ticket),
            stream,
        )
    assert out[0] is not None
    return out[0], out[1], out[2]


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
    if _too_wide(a):
        return plain.grad(a, x_next, v_ref, v_old, g_logp, g_kl, g_guard)
    if (guided := _guided(a)) is not a and a.guidance is not None:
        inner, _ = grad(guided, x_next, v_ref, v_old, g_logp, g_kl, g_guard)
        pair = _empty(inner, a.v.dtype), _empty(inner, a.guidance.uncond.dtype)
        _guide(a, inner, *pair)
        return pair
    head, keep = _head(a)
    x, x_next = keep[0], _packed(x_next)
    ref, old = _optional(None if g_kl is None else v_ref), _optional(None if g_guard is None else v_old)
    upstream = [None if g is None else g.float().contiguous() for g in (g_logp, g_kl, g_guard)]
    dv = _empty(x, a.v.dtype)
    du = None if a.guidance is None else _empty(x, a.guidance.uncond.dtype)
    with torch.cuda.device_of(x):
        library, stream = _launch_on(x.device)
        _C.affine_grad(
            library,
            *head,
            _view(x_next),
            _view(ref),
            _view(old),
            *(_ptr(g) for g in upstream),
            _view(dv),
            _view(du),
            stream,
        )
    return dv, du


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
    given = [None if t is None else t.contiguous() for t in (logp, logp_old, advantage, weight, mask, kl, log_ratio)]
    device, batch = logp.device, logp.numel()
    loss, metrics = torch.empty((), device=device), torch.empty(8, device=device)
    d_delta, d_kl = torch.empty(batch, device=device), None if kl is None else torch.empty(batch, device=device)
    with torch.cuda.device_of(loss):
        library, stream = _launch_on(device)
        _C.policy(
            library,
            batch,
            *(_ptr(t) for t in given),
            clip_low,
            clip_high,
            adv_clip,
            kl_coef,
            denominator or 0.0,
            loss.data_ptr(),
            metrics.data_ptr(),
            d_delta.data_ptr(),
            _ptr(d_kl),
            stream,
        )
    return loss, metrics, d_delta, d_kl


def _real(t: Tensor) -> Tensor:
    """fp32 or fp64, contiguous."""
    return (t if t.dtype in (torch.float32, torch.float64) else t.double()).contiguous()


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
    r, ids, w = _real(rewards), group_ids.contiguous(), weights.double().contiguous()
    out = torch.empty(r.shape[1], dtype=torch.float32, device=r.device)
    scratch = None if _on_cpu(r) else torch.empty(2 * r.shape[1], dtype=torch.float64, device=r.device)
    with torch.cuda.device_of(r):
        library, stream = _launch_on(r.device)
        _C.group_advantage(
            library,
            *r.shape,
            r.data_ptr(),
            _CODE[r.dtype],
            ids.data_ptr(),
            w.data_ptr(),
            _COMBINE[combine],
            _STD[std],
            eps,
            ddof,
            rank,
            batch_norm,
            _ptr(scratch),
            out.data_ptr(),
            stream,
        )
    return out


def winrate_advantage(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """(win rate, advantage), fp32 [P, G]."""
    wins, counts = _real(wins), _real(counts)
    counts = counts.to(wins.dtype)
    rate = torch.empty(wins.shape[:2], dtype=torch.float32, device=wins.device)
    advantage = torch.empty_like(rate)
    scratch = None if _on_cpu(wins) else torch.empty(rate.shape, dtype=torch.float64, device=wins.device)
    with torch.cuda.device_of(wins):
        library, stream = _launch_on(wins.device)
        _C.winrate_advantage(
            library,
            *rate.shape,
            wins.data_ptr(),
            counts.data_ptr(),
            _CODE[wins.dtype],
            _STD[std],
            eps,
            ddof,
            rate.data_ptr(),
            advantage.data_ptr(),
            _ptr(scratch),
            stream,
        )
    return rate, advantage
