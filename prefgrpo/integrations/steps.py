"""Code shared by the drop-in step functions: coefficient rows, look-up of timesteps, and a single transition.

    x' = μ + s·ε,  μ = a·x + b·v          logp = w · mean_D (x' − μ)² + c

Rows are computed in fp64 on the latents' device. Invariant: no call waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from prefgrpo.ops import SdeStep, sde_logp, sde_step
from prefgrpo.sde.rules import sde_row


def rows(
    rule: str, sigma: Tensor, sigma_next: Tensor, eta: float | Tensor, sigma_max: Tensor, sigma_min: Tensor | float = 0
) -> Tensor:
    """Coefficients (a, b, s, w, c), fp64 [n, 5], of steps σ → σ' (fp64 [n]).

    rule: a key of prefgrpo.sde.rules.RULES, or `dance_mean_ode`: dance's noise around the ODE's mean. For `cps`, w = −1
    also where s = 0, as in the peers. Values are not checked, because that would wait for the device.
    """
    row = sde_row("dance" if rule == "dance_mean_ode" else rule, sigma, sigma_next, eta, sigma_max, sigma_min)
    if rule == "dance_mean_ode":
        row = row._replace(a=1.0, b=sigma_next - sigma)
    if rule == "cps":
        row = row._replace(w=-1.0)
    return torch.stack([torch.zeros_like(sigma) + number for number in row], 1)


def scheduled(sigmas: Tensor, index: Tensor, rule: str, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, σ, σ') of the steps `index` int64 [n] of a schedule `sigmas` [T + 1]; all fp64."""
    sigmas = sigmas.to(index.device, torch.float64, non_blocking=True)
    sigma, sigma_next = sigmas[index], sigmas[index + 1]
    return rows(rule, sigma, sigma_next, eta, sigmas[1], sigmas[-1]), sigma, sigma_next


def index_of(timesteps: Tensor, timestep: Any, device: torch.device) -> Tensor:
    """Step index int64 [n] of n timesteps (or of one number) in a scheduler's `timesteps` [T].

    Of equal timesteps it is the second, as in diffusers. An unknown one raises RuntimeError, on a GPU asynchronously.
    """
    wanted = timestep if isinstance(timestep, Tensor) else torch.full((1,), timestep, device=device)
    hit = wanted.reshape(-1, 1).to(device) == timesteps.to(device, non_blocking=True)
    torch._assert_async(hit.any(1).all(), "timestep: not one of the scheduler's timesteps; pass them as they are")
    count = torch.where(hit, hit.cumsum(1), 0)
    return torch.where(count <= 2, count, 0).argmax(1)


def column(values: Tensor, ndim: int) -> Tensor:
    """`values` [n] as fp32 [n, 1, …] with `ndim` dimensions."""
    return values.float().view(-1, *([1] * (ndim - 1)))


def transition(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    *,
    x_next: Tensor | None = None,
    noise: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> SdeStep:
    """One step with its mean: x' sampled with `noise` (rounded to `out_dtype`, default: x's), or a stored x' scored.

    x, v: [B, …]; coef: fp64 [1, 5] or [B, 5]. In grad mode μ and logp are differentiable in v; x' is a constant.
    """
    coef = coef.float().expand(x.shape[0], 5)
    if x_next is None:
        step = sde_step(x, v, coef, noise=noise, out_dtype=out_dtype, want_mean=True)
        if not (torch.is_grad_enabled() and v.requires_grad):
            return step
        x_next = step.x_next
    mean = column(coef[:, 0], x.dim()) * x + column(coef[:, 1], x.dim()) * v  # the kernels round it likewise
    return SdeStep(x_next, sde_logp(x, v, x_next, coef).logp, mean)


def scheduler_step(
    scheduler: Any,
    rule: str,
    eta: float,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    prev_sample: Tensor | None,
    generator: Any,
    *,
    is_ode: bool = False,
    with_normalizer: bool = True,
) -> tuple[Tensor, ...]:
    """(x', logp, μ) in fp32 and (s, √(σ − σ')), fp64 [n], at n timesteps of a scheduler (None: its own step index).

    prev_sample: score this x' instead of sampling. is_ode: score the ODE's step; its noise is drawn and discarded, as
    in Flow-GRPO. with_normalizer: False leaves c out of the log-prob.
    """
    x = sample.float()
    v = model_output.float()
    if timestep is None:
        index = torch.full((1,), scheduler.step_index, dtype=torch.int64, device=x.device)
    else:
        index = index_of(scheduler.timesteps, timestep, x.device)
    coef, sigma, sigma_next = scheduled(scheduler.sigmas, index, rule, eta)
    if not with_normalizer:
        coef[:, 4] = 0.0
    noise = None if prev_sample is not None else randn_tensor(v.shape, generator, v.device, v.dtype)
    if is_ode:
        prev_sample = x + column(sigma_next - sigma, x.dim()) * v.detach()
    step = transition(x, v, coef, x_next=None if prev_sample is None else prev_sample.float(), noise=noise)
    assert step.mean is not None
    return step.x_next, step.logp, step.mean, coef[:, 2], (sigma - sigma_next).sqrt()
