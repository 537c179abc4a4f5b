"""Flow-Factory's `FlowMatchEulerDiscreteSDEScheduler.step`, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `dance`, `cps`, `ode`)

Invariant: same arguments, return order and random stream as X-GenGroup/Flow-Factory; where that returns a NaN log-prob
(η = 0), this returns 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import column, index_of, noise_like, rows, scheduled, transition

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

    self: the scheduler. timestep: a step number, or one or B timesteps; timestep_next: those that follow in the
    schedule. next_latents: score this x' instead of sampling. Sampled latents are rounded to the dtype of `latents`
    before they are scored, and returned in fp32. noise_level: η, a number or [B]; None: the scheduler's for that step;
    0 in eval mode. generator: torch's, or a PhiloxNoise. The output is an instance of Flow-Factory's own class if that
    is imported. Raises ValueError for unknown dynamics, RuntimeError for a timestep that is not in the schedule.
    """
    dynamics = dynamics_type or self.dynamics_type
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics_type: expected one of {', '.join(DYNAMICS)}, got '{dynamics}'")
    x = latents.float()
    v = noise_pred.float()
    batch = x.shape[0]
    index = _step_index(self, timestep, timestep_next, x.device)
    if self.is_eval or dynamics == "ODE":
        noise_level = 0.0
    elif noise_level is None:
        noise_level = self.get_noise_levels().to(x.device)[index]
    eta = 0.0 if isinstance(noise_level, Tensor) else float(noise_level)
    steps = scheduled(self.sigmas, index, DYNAMICS[dynamics], eta)
    if isinstance(noise_level, Tensor) or sigma_max is not None:  # not in a table of the schedule
        sigmas = self.sigmas.to(x.device, torch.float64)
        sigma, sigma_next = (sigmas[at].expand(batch) for at in (index, index + 1))
        each = noise_level.to(x.device, torch.float64).reshape(-1) if isinstance(noise_level, Tensor) else eta
        coef = rows(DYNAMICS[dynamics], sigma, sigma_next, each, sigma_max or sigmas[1])
        s = coef[:, 2]
        std = s / (sigma - sigma_next).sqrt()
        steps = steps._replace(coef=coef.float(), s=s, std_dev_t=std)
        index = torch.arange(batch, device=x.device)

    noise = None
    out_dtype = torch.float32  # the ODE's x' is not rounded, because it is not scored
    if next_latents is None and dynamics != "ODE":
        noise = noise_like(v, generator)
        out_dtype = latents.dtype
    x_next, logp, mean = transition(x, v, steps.coef, index, next_latents, noise, out_dtype)
    std = steps.std_dev_t if dynamics in ("Flow-SDE", "Dance-SDE") else steps.s
    std, dt = (column(t.expand(batch), x.dim()) for t in (std, steps.delta))
    x_next = x_next.float()
    score = logp if compute_log_prob else None
    if not return_dict:
        return x_next, mean, v, score, std, dt
    fields = dict(zip(_FIELDS, (x_next, mean, std, dt, score, v), strict=True))
    theirs = sys.modules.get("flow_factory.scheduler.abc")
    output = SimpleNamespace if theirs is None else theirs.SDESchedulerOutput
    return output(**{name: t if name in return_kwargs else None for name, t in fields.items()})


def _step_index(self: Any, timestep: float | Tensor, timestep_next: Any, device: torch.device) -> Tensor:
    """Step numbers int64 [n] from a step number (an int, or an integer tensor) or n timesteps."""
    if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
        return torch.as_tensor(timestep, device=device).reshape(1)
    return index_of(self.timesteps, timestep, device, timestep_next)
