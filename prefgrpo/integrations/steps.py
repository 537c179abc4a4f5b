"""Code shared by the drop-in step functions: coefficient tables, look-up of steps, and a single transition.

    x' = μ + s·ε,  μ = a·x + b·v          logp = w · mean_D (x' − μ)² + c

A table is a pure function of a schedule's values, computed once and cached on the device. Invariant: no call syncs with
the device, except the first one with a new schedule whose tensors are on it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from prefgrpo.ops import SdeStep, sde_logp, sde_step
from prefgrpo.sde.schedule import make_schedule

_HOST_VALUES: Any = WeakTensorKeyDictionary()


class Table(NamedTuple):
    """Coefficients of a T-step schedule for one rule, all fp32 on the device."""

    coef: Tensor
    """[T, 5] rows (a, b, s, w, c)."""
    sigma: Tensor
    """[T + 1]."""
    dt: Tensor
    """[T] σ' − σ < 0."""


def to_host(t: Tensor) -> tuple[float, ...]:
    """The values of a schedule tensor [n]; read back from a device once per tensor and version."""
    if t.device.type == "cpu" or t.is_inference():
        return tuple(t.tolist())
    version, values = _HOST_VALUES.get(t, (None, ()))
    if version != t._version:
        values = tuple(t.tolist())
        _HOST_VALUES[t] = (t._version, values)
    return values


def table(sigmas: Tensor, rule: str, eta: float, device: torch.device) -> Table:
    """Table of the schedule `sigmas` [T + 1] on `device`.

    rule: a key of prefgrpo.sde.rules.RULES, or `dance_mean_ode`: dance's noise around the ODE's mean. For `cps`, w = −1
    also where s = 0, as in the peers. Raises ValueError for sigmas not decreasing within [0, 1], or η out of range.
    """
    return _table(to_host(sigmas), rule, float(eta), device)


@lru_cache(maxsize=256)
def _table(values: tuple[float, ...], rule: str, eta: float, device: torch.device) -> Table:
    with torch.inference_mode(False):  # else autograd could not save the table for a backward
        sigmas = torch.tensor(values, dtype=torch.float32)
        coef = make_schedule(sigmas, "dance" if rule == "dance_mean_ode" else rule, eta).coef
        dt = sigmas.double().diff()
        if rule == "dance_mean_ode":
            coef[:, 0], coef[:, 1] = 1.0, dt
        if rule == "cps":
            coef[:, 3] = -1.0
        return Table(*(t.to(device, torch.float32) for t in (coef, sigmas, dt)))


@lru_cache(maxsize=256)
def _step_of_timestep(values: tuple[float, ...]) -> dict[float, int]:
    """Timestep → step index; for equal timesteps the second one, as in diffusers."""
    places: dict[float, list[int]] = {}
    for i, t in enumerate(values):
        places.setdefault(t, []).append(i)
    return {t: of[:2][-1] for t, of in places.items()}


@lru_cache(maxsize=256)
def _keys(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Timesteps for look-up on a device; NaN where an equal timestep takes precedence."""
    places = _step_of_timestep(values)
    with torch.inference_mode(False):
        keys = [t if places[t] == i else float("nan") for i, t in enumerate(values)]
        return torch.tensor(keys, dtype=torch.float32, device=device)


def index_of(timesteps: Tensor, timestep: Any, device: torch.device) -> Tensor:
    """Step index int64 [n] of each of the n given timesteps (a tensor, or numbers) in a scheduler's `timesteps` [T].

    An unknown timestep raises ValueError on a CPU, and fails a device assertion on a GPU.
    """
    if isinstance(timestep, (list, tuple)):
        timestep = torch.stack([torch.as_tensor(t) for t in timestep])
    if not isinstance(timestep, Tensor):
        timestep = torch.full((1,), timestep, device=device)  # a copy to the device would sync
    wanted = timestep.reshape(-1).to(device)
    if device.type == "cpu":
        places, given = _step_of_timestep(to_host(timesteps)), wanted.tolist()
        if unknown := [t for t in given if t not in places]:
            raise ValueError(
                f"timestep: expected values of the scheduler's timesteps {to_host(timesteps)}, got {unknown}; pass "
                "them unchanged, in fp32"
            )
        return torch.tensor([places[t] for t in given], dtype=torch.int64)
    hit = wanted[:, None] == _keys(to_host(timesteps), device)[None, :]  # [n, T]
    torch._assert_async(hit.any(1).all(), "prefgrpo: a timestep is not one of the scheduler's timesteps")
    return hit.int().argmax(1)


def column(values: Tensor, index: Tensor, ndim: int) -> Tensor:
    """values[index] as [n, 1, …] with `ndim` dimensions."""
    return values.index_select(0, index).view(-1, *([1] * (ndim - 1)))


class _Mean(torch.autograd.Function):
    """μ = a·x + b·v in one launch, bitwise as in the sampling step; nothing of size D is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, coef: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(coef, index)
        ctx.dtypes = x.dtype, v.dtype
        dtype = torch.float64 if torch.float64 in ctx.dtypes else torch.float32
        return sde_step(x, v, coef, index, noise=None, out_dtype=dtype).x_next

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        coef, index = ctx.saved_tensors
        a, b = (column(coef[:, k], index, grads[0].dim()) for k in (0, 1))
        dx, dv = ((k * grads[0]).to(dtype) for k, dtype in zip((a, b), ctx.dtypes, strict=True))
        return (dx if ctx.needs_input_grad[0] else None), dv, None, None


def transition(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor,
    *,
    x_next: Tensor | None = None,
    noise: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    want_mean: bool = True,
) -> SdeStep:
    """One step with its mean: x' sampled with `noise` (rounded to `out_dtype`, default: x's), or a given x' scored.

    x, v: [B, …]; coef [T, 5] and index int64 [B]. In grad mode μ and logp are differentiable in x and v; the log-prob
    treats x' as a constant. want_mean: False if μ may be None.
    """
    out_dtype = out_dtype or x.dtype
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or v.requires_grad)
    if x_next is None and not needs_grad:
        return sde_step(x, v, coef, index, noise=noise, out_dtype=out_dtype, want_mean=want_mean)
    of_x = needs_grad and x.requires_grad
    mean: Any = _Mean.apply(x, v, coef, index) if want_mean or x_next is None or of_x else None
    if x_next is None:
        x_next = (mean if noise is None else mean + column(coef[:, 2], index, x.dim()) * noise).to(out_dtype)
    if of_x:  # scored given μ, as a step with a = 0 and b = 1
        on_mean = coef.clone()
        on_mean[:, 0], on_mean[:, 1] = 0.0, 1.0
        logp = sde_logp(x.detach(), mean, x_next.detach(), on_mean, index).logp
    else:
        logp = sde_logp(x, v, x_next.detach(), coef, index).logp
    return SdeStep(x_next, logp, mean)
