"""Flow-Factory's `FlowMatchEulerDiscreteSDEScheduler.step`, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `dance`, `cps`, `ode`)

Here σ, σ' and η may be any tensors [B]. Invariant: same arguments, return order and random stream as
X-GenGroup/Flow-Factory; where that returns a NaN log-prob (η = 0), this returns 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import column, index_of, noise_like, rows, transition

DYNAMICS = {"Flow-SDE": "flow", "Dance-SDE": "dance", "CPS": "cps", "ODE": "ode"}
_FIELDS = ("next_latents", "next_latents_mean", "std_dev_t", "dt", "log_prob", "noise_pred")


def step(
    self: Any,
    noise_pred: Tensor,
    timestep: float | Tensor,
    latents: Tensor,
    next_latents: Tensor | None = None,
    timestep_next: float | Tensor | None = None,
    generator: Any = None,
    noise_level: float | Tensor | None = None,
    compute_log_prob: bool = True,
    return_dict: bool = True,
    return_kwargs: Sequence[str] = _FIELDS,
    dynamics_type: str | None = None,
    sigma_max: float | None = None,
) -> Any:
    """An output with the fields of `return_kwargs`, or (next_latents, mean, noise_pred, log_prob, std_dev_t, dt).

    self: the scheduler. timestep: a step number, or one or B timesteps; with timestep_next, σ = timestep / 1000.
    next_latents: score this x' instead of sampling. Sampled latents are rounded to the dtype of `latents` before they
    are scored, and returned in fp32. noise_level: η, a number or [B]; None: the scheduler's for that step, or 0 in eval
    mode. The output is an instance of Flow-Factory's own class if that is imported. Raises ValueError for unknown
    dynamics, RuntimeError for an unknown timestep.
    """
    dynamics = dynamics_type or self.dynamics_type
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics_type: expected one of {', '.join(DYNAMICS)}, got '{dynamics}'")
    x = latents.float()
    v = noise_pred.float()
    device = x.device
    index = None
    if timestep_next is not None:
        sigma, sigma_next = timestep / 1000, timestep_next / 1000
    else:
        index = _step_index(self, timestep, device)
        sigmas = self.sigmas.to(device)
        sigma, sigma_next = sigmas[index], sigmas[index + 1]
    if self.is_eval or dynamics == "ODE":
        noise_level = 0.0
    elif noise_level is None and index is None:
        noise_level = self.get_noise_level_for_sigma(sigma)
    elif noise_level is None:
        noise_level = self.get_noise_levels().to(device)[index]
    numbers = (sigma, sigma_next, noise_level, sigma_max or self.sigmas[1])
    sigma, sigma_next, eta, top = (_batched(t, x.shape[0], device) for t in numbers)
    coef = rows(DYNAMICS[dynamics], sigma, sigma_next, eta, top)
    std = coef[:, 2]
    if dynamics in ("Flow-SDE", "Dance-SDE"):
        std = std / (sigma - sigma_next).sqrt()

    x_next = None if next_latents is None else next_latents.float()
    noise = None
    out_dtype = torch.float32  # the ODE's x' is not rounded, because it is not scored
    if x_next is None and dynamics != "ODE":
        noise = noise_like(v, generator)
        out_dtype = latents.dtype
    out = transition(x, v, coef.float().contiguous(), x_next=x_next, noise=noise, out_dtype=out_dtype)
    x_next = out.x_next.float()
    logp = out.logp if compute_log_prob else None
    std, dt = (column(t, x.dim()) for t in (std, sigma_next - sigma))
    if not return_dict:
        return x_next, out.mean, v, logp, std, dt
    fields = dict(zip(_FIELDS, (x_next, out.mean, std, dt, logp, v), strict=True))
    theirs = sys.modules.get("flow_factory.scheduler.abc")
    output = SimpleNamespace if theirs is None else theirs.SDESchedulerOutput
    return output(**{name: t if name in return_kwargs else None for name, t in fields.items()})


def _step_index(self: Any, timestep: float | Tensor, device: torch.device) -> Tensor:
    """Step numbers int64 [n] from a step number (an int, or an integer tensor) or n timesteps."""
    if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
        return torch.as_tensor(timestep, device=device).reshape(1)
    return index_of(self.timesteps, timestep, device)


def _batched(value: float | Tensor, batch: int, device: torch.device) -> Tensor:
    """fp64 [batch] of fp32 numbers on the device; a number is filled in there: a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).double().reshape(-1).expand(batch)
    return torch.full((batch,), value, dtype=torch.float32, device=device).double()
