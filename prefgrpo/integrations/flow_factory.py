"""Flow-Factory's `step` of its two schedulers, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `dance`, `cps`, `ode`)

Invariant: same arguments, return order and random stream as X-GenGroup/Flow-Factory; where that returns a NaN log-prob
(η = 0), this returns 0. What `return_kwargs` does not name is not computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from prefgrpo.integrations.steps import Steps, column, computed, index_of, noise_like, scheduled, transition
from prefgrpo.ops import PhiloxNoise

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

    `FlowMatchEulerDiscreteSDEScheduler.step`; self: the scheduler. timestep: without timestep_next a step number, or
    one or B timesteps of the schedule; with it any timesteps, and σ = timestep / 1000 for both. next_latents: score
    this x' instead of sampling. Sampled latents are rounded to the dtype of `latents` before they are scored, and
    returned in fp32. noise_level: η, a number or [B]; None: the scheduler's for that step; 0 in eval mode. generator:
    torch's, or a PhiloxNoise. The output is an instance of Flow-Factory's own class if that is imported. Raises
    ValueError for unknown dynamics, RuntimeError for a timestep without timestep_next that is not in the schedule.
    """
    dynamics = dynamics_type or self.dynamics_type
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics_type: expected one of {', '.join(DYNAMICS)}, got '{dynamics}'")
    x = latents.float()
    v = noise_pred.float()
    wanted = set(return_kwargs if return_dict else _FIELDS)
    noise = noise_like(v, generator) if next_latents is None and dynamics != "ODE" else None  # drawn even if not needed
    if not compute_log_prob:
        wanted -= {"log_prob"}
    fields: dict[str, Any] = {"noise_pred": v}
    if wanted - fields.keys():
        eta = 0.0 if self.is_eval or dynamics == "ODE" else noise_level
        steps = _steps(self, DYNAMICS[dynamics], timestep, timestep_next, eta, sigma_max, x.device)
        std = steps.std_dev_t if dynamics in ("Flow-SDE", "Dance-SDE") else steps.s
        fields["std_dev_t"] = column(std.expand(x.shape[0]), x.dim())
        fields["dt"] = column(steps.delta.expand(x.shape[0]), x.dim())
    if wanted - fields.keys():
        if isinstance(noise, PhiloxNoise) and steps.number is None:
            steps = steps._replace(number=index_of(self.timesteps, timestep, x.device))
        stored = next_latents if "log_prob" in wanted else None
        dtype = torch.float32 if noise is None else latents.dtype
        out = transition(x, v, steps, stored, noise, dtype, want_mean="next_latents_mean" in wanted)
        fields |= {"log_prob": out.logp, "next_latents_mean": out.mean}
        fields["next_latents"] = (out.x_next if next_latents is None else next_latents).float()
    values = {name: fields[name] if name in wanted else None for name in _FIELDS}
    if return_dict:
        return _output(values)
    order = ("next_latents", "next_latents_mean", "noise_pred", "log_prob", "std_dev_t", "dt")
    return tuple(values[name] for name in order)


def unipc_step(
    self: Any,
    noise_pred: Tensor,
    timestep: float | Tensor,
    latents: Tensor,
    **options: Any,
) -> Any:
    """`UniPCMultistepSDEScheduler.step` (Wan): diffusers' own step in eval mode, else `step` with its arguments.

    options: the other arguments, by keyword. With return_dict=False: (next_latents, log_prob, mean, std_dev_t, dt).
    """
    if self.is_eval:
        if isinstance(timestep, int) and options.get("timestep_next") is None:  # a step number, as in `step`
            timestep = self.timesteps[timestep]
        x_next = UniPCMultistepScheduler.step(self, noise_pred, timestep, latents, return_dict=False)[0]
        return _output({"next_latents": x_next})
    out = step(self, noise_pred, timestep, latents, **options)
    return out if options.get("return_dict", True) else (out[0], out[3], out[1], out[4], out[5])


def _output(fields: dict[str, Tensor | None]) -> Any:
    """An instance of Flow-Factory's class, if that is imported."""
    theirs = sys.modules.get("flow_factory.scheduler.abc")
    return SimpleNamespace(**fields) if theirs is None else theirs.SDESchedulerOutput(**fields)


def _steps(
    self: Any,
    rule: str,
    timestep: float | Tensor,
    timestep_next: float | Tensor | None,
    eta: float | Tensor | None,
    sigma_max: float | None,
    device: torch.device,
) -> Steps:
    """The steps at `timestep`: the schedule's, or those from timestep to timestep_next (σ is a thousandth)."""
    index = None
    if timestep_next is None:
        index = _step_index(self, timestep, device)
        if eta is None:
            eta = self.get_noise_levels().to(device)[index]
        if sigma_max is None:
            return scheduled(self.sigmas, index, rule, eta)
        sigmas = self.sigmas.to(device)
        sigma = sigmas[index]
        sigma_next = sigmas[index + 1]
    else:
        sigma, sigma_next = (torch.as_tensor(t, device=device).reshape(-1) / 1000 for t in (timestep, timestep_next))
        if eta is None:
            eta = self.get_noise_level_for_sigma(sigma)
    return computed(rule, sigma, sigma_next, eta, sigma_max or self.sigmas[1].to(device), index=index)


def _step_index(self: Any, timestep: float | Tensor, device: torch.device) -> Tensor:
    """Step numbers int64 [n] from a step number (an int, or an integer tensor) or n timesteps."""
    if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
        return torch.as_tensor(timestep, device=device).reshape(1)
    return index_of(self.timesteps, timestep, device)
