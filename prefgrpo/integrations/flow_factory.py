"""Flow-Factory's `FlowMatchEulerDiscreteSDEScheduler.step`, over the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (Flow-SDE, Dance-SDE, CPS, ODE)

There σ, σ' and η may be any tensors [B], so the coefficients are computed on the device, in fp64, by `rows`: the
formulas of prefgrpo.sde.rules once more, without a branch on a value. Invariant: same arguments, return order and
random stream as X-GenGroup/Flow-Factory; where it returns a NaN log-prob (η = 0), this returns 0.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import index_of, randn, spread, transition

logger = logging.getLogger(__name__)
DYNAMICS = ("Flow-SDE", "Dance-SDE", "CPS", "ODE")
_FIELDS = ("next_latents", "next_latents_mean", "std_dev_t", "dt", "log_prob", "noise_pred")


@dataclass
class SDESchedulerOutput:
    """What `step` returns where Flow-Factory, which has a class of the same fields, is not imported."""

    next_latents: Tensor | None = None
    next_latents_mean: Tensor | None = None
    std_dev_t: Tensor | None = None
    dt: Tensor | None = None
    log_prob: Tensor | None = None
    noise_pred: Tensor | None = None


def rows(dynamics: str, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
    """(coefficient rows fp32 [B, 5], std_dev_t fp32 [B]) from σ, σ', η [B]; σ_max stands in for σ = 1.

    Raises ValueError for unknown dynamics. Values are not checked: σ' >= σ gives NaN.
    """
    sigma, sigma_next, eta, sigma_max = (t.double() for t in (sigma, sigma_next, eta, sigma_max))
    delta, zero = sigma_next - sigma, torch.zeros_like(sigma)
    if dynamics == "Flow-SDE":
        st = eta * torch.sqrt(sigma / (1.0 - torch.where(sigma == 1.0, sigma_max, sigma)))
        k = st * st / (2.0 * sigma)
        a, b, s = 1.0 + k * delta, (1.0 + k * (1.0 - sigma)) * delta, st * torch.sqrt(-delta)
    elif dynamics == "Dance-SDE":
        k = eta * eta / (2.0 * sigma)
        a, b, st, s = 1.0 + k * delta, (1.0 + k * (1.0 - sigma)) * delta, eta, eta * torch.sqrt(-delta)
    elif dynamics == "CPS":
        st = s = sigma_next * torch.sin(eta * (math.pi / 2.0))
        r = torch.sqrt((sigma_next * sigma_next - s * s).clamp_min(0.0))
        a, b = (1.0 - sigma_next) + r, (1.0 - sigma) * r - sigma * (1.0 - sigma_next)
        return torch.stack((a, b, s, zero - 1.0, zero), 1).float(), st.float()
    elif dynamics == "ODE":
        return torch.stack((zero + 1.0, delta, zero, zero, zero), 1).float(), zero.float()
    else:
        raise ValueError(f"dynamics_type: expected one of {', '.join(DYNAMICS)}, got '{dynamics}'")
    noisy = s != 0
    safe = torch.where(noisy, s, torch.ones_like(s))
    w = torch.where(noisy, -0.5 / (safe * safe), zero)
    c = torch.where(noisy, -torch.log(safe) - 0.5 * math.log(2.0 * math.pi), zero)
    return torch.stack((a, b, s, w, c), 1).float(), st.float()


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

    self: the scheduler. timestep: a step number, or one or B timesteps; with timestep_next, σ is timestep / 1000.
    next_latents: score this x' instead of sampling. Sampled latents are rounded to the dtype of `latents` before they
    are scored, and returned in fp32. noise_level: η, one or [B]; None: the scheduler's for that step, 0 in eval mode.
    """
    x, v, device = latents.float(), noise_pred.float(), latents.device
    dynamics = dynamics_type or self.dynamics_type
    batch = latents.shape[0]
    sigma, sigma_next, index = _sigmas(self, timestep, timestep_next, device)
    if self.is_eval or dynamics == "ODE":
        noise_level = 0.0
    elif noise_level is None:
        noise_level = _noise_level(self, sigma, index)
    top = sigma_max or self.sigmas[1]
    sigma, sigma_next, eta, top = (_batched(t, batch, device) for t in (sigma, sigma_next, noise_level, top))
    coef, std = rows(dynamics, sigma, sigma_next, eta, top)
    noise = None
    if next_latents is None and dynamics != "ODE":
        noise = randn(v.shape, generator, device, v.dtype)
    given = None if next_latents is None else next_latents.float()
    exact = given is None and dynamics == "ODE"  # not rounded: nothing of it is scored
    out = torch.float32 if exact else latents.dtype
    done = transition(x, v, coef, torch.arange(batch, device=device), x_next=given, noise=noise, out_dtype=out)
    logp = done.logp if compute_log_prob else None
    std, dt = spread(std, x.dim()), spread(sigma_next - sigma, x.dim())
    x_next = done.x_next.float()
    if not return_dict:
        return x_next, done.mean, v, logp, std, dt
    return _output(dict(zip(_FIELDS, (x_next, done.mean, std, dt, logp, v), strict=True)), return_kwargs)


def _sigmas(self: Any, timestep: Any, timestep_next: Any, device: torch.device) -> tuple[Any, Any, Tensor | None]:
    """(σ, σ', step numbers or None)."""
    if timestep_next is not None:
        return timestep / 1000, timestep_next / 1000, None
    whole = isinstance(timestep, Tensor) and not timestep.is_floating_point() and not timestep.is_cuda
    if isinstance(timestep, Tensor) and timestep.dim() > 1:
        raise ValueError(f"timestep: expected a number, a 0-d or a 1-d tensor, got shape {list(timestep.shape)}")
    if isinstance(timestep, int) or whole:
        index = torch.full((1,), int(timestep), device=device)
    elif isinstance(timestep, (float, Tensor)):
        index = index_of(self.timesteps, timestep, device)
    else:
        raise TypeError(f"timestep: expected a number or a tensor, got {type(timestep).__name__}")
    sigmas = self.sigmas.to(device)
    return sigmas.index_select(0, index), sigmas.index_select(0, index + 1), index


def _noise_level(self: Any, sigma: Any, index: Tensor | None) -> Any:
    """The scheduler's η: by step number where there is one, which needs no wait for the device."""
    if index is None:
        return self.get_noise_level_for_sigma(sigma)
    return self.get_noise_levels().to(index.device).index_select(0, index)


def _batched(value: float | Tensor | Sequence[float], batch: int, device: torch.device) -> Tensor:
    """fp32 [batch] on the device; a plain number gets there without a copy, which would wait."""
    if isinstance(value, (int, float)):
        return torch.full((batch,), value, dtype=torch.float32, device=device)
    t = torch.as_tensor(value).to(device, torch.float32).reshape(-1)
    return t.expand(batch) if t.numel() == 1 else t


def _output(fields: dict[str, Tensor | None], wanted: Sequence[str]) -> Any:
    """Flow-Factory's own output class where it is imported."""
    if unknown := [name for name in wanted if name not in fields]:
        logger.warning("%s: not an output of this step, which has %s", ", ".join(unknown), ", ".join(fields))
    theirs = sys.modules.get("flow_factory.scheduler.abc")
    cls = SDESchedulerOutput if theirs is None else theirs.SDESchedulerOutput
    return cls(**{name: t for name, t in fields.items() if name in wanted})
