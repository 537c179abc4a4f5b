"""Code shared by the drop-in step functions: coefficient rows, look-up of timesteps, and a single transition.

    x' = μ + s·ε,  μ = a·x + b·v          logp = w · mean_D (x' − μ)² + c

Rows are computed in fp64 on the latents' device, once per schedule. Invariant: no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.rules import sde_row


def rows(
    rule: str, sigma: Tensor, sigma_next: Tensor, eta: float | Tensor, sigma_max: Tensor | float, sigma_min: Any = 0
) -> Tensor:
    """Coefficients (a, b, s, w, c), fp64 [n, 5], of steps σ → σ' (fp64 [n]) under a rule of prefgrpo.sde.rules.

    For `cps`, w = −1 also where s = 0, as in the peers. Nothing is checked, because that would wait for the device.
    """
    row = sde_row(rule, sigma, sigma_next, eta, sigma_max, sigma_min)
    if rule == "cps":
        row = row._replace(w=-1.0)
    return torch.stack([torch.zeros_like(sigma) + number for number in row], 1)


class Steps(NamedTuple):
    """n steps of a schedule; fp32 on the latents' device, computed in fp64 and rounded once."""

    coef: Tensor
    """[T, 5] rows (a, b, s, w, c) of the whole schedule."""
    sigma: Tensor
    """[n], as all that follows."""
    s: Tensor
    std_dev_t: Tensor
    """s / √(σ − σ')."""
    sqrt_dt: Tensor
    """√(σ − σ')."""
    delta: Tensor
    """σ' − σ."""


_CACHE = WeakTensorKeyDictionary()
"""What was computed from a host's `sigmas` or `timesteps`, as long as it keeps that tensor unchanged."""


def cached(source: Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` returns, computed once per key and version of `source`."""
    version = 0 if source.is_inference() else source._version
    entries = _CACHE.setdefault(source, {})
    key = (version, *key)
    if key not in entries:
        with torch.inference_mode(False), torch.no_grad():  # for calls in other modes too
            entries[key] = make()
    return entries[key]


def _table(sigmas: Tensor, device: torch.device, rule: str, eta: float, with_normalizer: bool) -> tuple[Tensor, Tensor]:
    """(rows [T, 5], the other numbers of `Steps` [T, 5])."""
    sigmas = sigmas.to(device, torch.float64, non_blocking=True)
    sigma = sigmas[:-1]
    sigma_next = sigmas[1:]
    coef = rows(rule, sigma, sigma_next, eta, sigmas[1], sigmas[-1])
    if not with_normalizer:
        coef[:, 4] = 0.0
    s = coef[:, 2]
    sqrt_dt = (sigma - sigma_next).sqrt()
    numbers = torch.stack((sigma, s, s / sqrt_dt, sqrt_dt, sigma_next - sigma), 1)
    return coef.float(), numbers.float()


def scheduled(sigmas: Tensor, index: Tensor, rule: str, eta: float, with_normalizer: bool = True) -> Steps:
    """The steps `index` int64 [n] of a schedule `sigmas` [T + 1], computed once per rule, η and device.

    with_normalizer: False leaves c out of the log-prob.
    """
    key = (index.device, rule, eta, with_normalizer)
    coef, numbers = cached(sigmas, key, lambda: _table(sigmas, *key))
    return Steps(coef, *numbers.index_select(0, index).unbind(1))


def _lookup(timesteps: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(timesteps on the device, whether each is the one to find: of equal ones the second; the next of each, or 0)."""
    timesteps = timesteps.to(device, non_blocking=True)
    equal = timesteps[:, None] == timesteps
    earlier = equal.tril(-1).sum(1)
    return timesteps, earlier == (equal.sum(1) - 1).clamp_max(1), F.pad(timesteps[1:], (0, 1))


def index_of(timesteps: Tensor, timestep: Any, device: torch.device, timestep_next: Any = None) -> Tensor:
    """Step index int64 [n] of n timesteps (or of one number) in a scheduler's `timesteps` [T].

    Of equal timesteps it is the second, as in diffusers. An unknown one raises RuntimeError, on a GPU asynchronously,
    as does a `timestep_next` that is not the next one.
    """
    known, is_chosen, following = cached(timesteps, (device,), lambda: _lookup(timesteps, device))
    wanted, after = (t.to(device).reshape(-1, 1) if isinstance(t, Tensor) else t for t in (timestep, timestep_next))
    match = (known[None] == wanted) & is_chosen
    if after is not None:
        match = match & (following == after)
    found, index = match.max(1)
    torch._assert_async(found.all(), "timestep: not one of the scheduler's timesteps, or timestep_next not the next")
    return index


def noise_like(t: Tensor, generator: Any) -> Tensor | PhiloxNoise:
    """A PhiloxNoise as it is; otherwise ε like `t`, drawn with torch's generators as in diffusers."""
    if isinstance(generator, PhiloxNoise):
        return generator
    return randn_tensor(t.shape, generator, t.device, t.dtype)


def column(values: Tensor, ndim: int) -> Tensor:
    """`values` [n] as fp32 [n, 1, …] with `ndim` dimensions."""
    return values.float().view(-1, *([1] * (ndim - 1)))


def transition(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor,
    x_next: Tensor | None,
    noise: Tensor | PhiloxNoise | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x', logp, μ) of one step: x' sampled with `noise` and rounded to `out_dtype`, or a stored x' scored.

    x, v: [B, …]; coef: fp32 [T, 5] with index int64 [1] or [B]. In grad mode μ and logp are differentiable in v; x' is
    a constant.
    """
    each = index.expand(x.shape[0])
    if x_next is None:
        step = sde_step(x, v, coef, each, noise=noise, out_dtype=out_dtype, want_mean=True)
        if step.mean is not None and not (torch.is_grad_enabled() and v.requires_grad):
            return step.x_next, step.logp, step.mean
        x_next = step.x_next
    a, b = (column(t, x.dim()) for t in coef.index_select(0, index)[:, :2].unbind(1))
    return x_next, sde_logp(x, v, x_next, coef, each).logp, a * x + b * v  # which the kernels round likewise


def scheduler_step(
    scheduler: Any,
    rule: str,
    eta: float,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    prev_sample: Tensor | None,
    generator: Any,
    out_dtype: torch.dtype | None,
    *,
    is_ode: bool = False,
    with_normalizer: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor], Steps]:
    """(x', logp, μ) and the steps, at n timesteps of a scheduler (None: its own step index).

    prev_sample: score this x' instead of sampling. out_dtype: of x' (None: fp32). is_ode: score the ODE's step; its
    noise is drawn and discarded, as in Flow-GRPO. with_normalizer: False leaves c out of the log-prob.
    """
    x = sample.float()
    v = model_output.float()
    if timestep is None:
        index = torch.full((1,), scheduler.step_index, dtype=torch.int64, device=x.device)
    else:
        index = index_of(scheduler.timesteps, timestep, x.device)
    steps = scheduled(scheduler.sigmas, index, rule, eta, with_normalizer)
    dtype = out_dtype or torch.float32
    noise = noise_like(v, generator) if prev_sample is None else None
    if is_ode:
        prev_sample = (x + column(steps.delta, x.dim()) * v.detach()).to(dtype)
    x_next, logp, mean = transition(x, v, steps.coef, index, prev_sample, noise, dtype)
    return (x_next.to(dtype), logp, mean), steps
