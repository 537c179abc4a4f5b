"""Flow-Factory's `FlowMatchEulerDiscreteSDEScheduler.step`, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `dance`, `cps`, `ode`)

Here σ, σ' and η may be any tensors [B]. On a CPU, coefficients are cached by their values; on a GPU, where reading
values would need a sync, the rules run on the device in fp64. Invariant: same arguments, return order and random stream
as X-GenGroup/Flow-Factory; where that returns a NaN log-prob (η = 0), this returns 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from prefgrpo.integrations.steps import index_of, transition
from prefgrpo.sde.rules import sde_row

logger = logging.getLogger(__name__)
DYNAMICS = {"Flow-SDE": "flow", "Dance-SDE": "dance", "CPS": "cps", "ODE": "ode"}
_FIELDS = ("next_latents", "next_latents_mean", "std_dev_t", "dt", "log_prob", "noise_pred")


def rows(dynamics: str, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
    """(coefficient rows fp32 [B, 5], std_dev_t fp32 [B]) from σ, σ', η [B]; σ_max stands in for σ = 1.

    Raises ValueError for unknown dynamics. Values are not checked: σ' >= σ gives NaN.
    """
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics_type: expected one of {', '.join(DYNAMICS)}, got '{dynamics}'")
    sigma, sigma_next = sigma.double(), sigma_next.double()
    row = sde_row(DYNAMICS[dynamics], sigma, sigma_next, eta.double(), sigma_max.double())
    zero = torch.zeros_like(sigma)
    coef = torch.stack([zero + number for number in row], 1)
    std = coef[:, 2]
    if dynamics == "CPS":
        coef[:, 3] = -1.0  # also where s = 0, as in Flow-Factory
    elif dynamics != "ODE":
        std = std / torch.sqrt(sigma - sigma_next)
    return coef.float(), std.float()


@lru_cache(maxsize=4096)
def _kept_rows(dynamics: str, *numbers: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """`rows` on the CPU, cached; numbers: the values of σ, σ', η and σ_max over the samples, one tuple each."""
    with torch.inference_mode(False):  # else autograd could not save them for a backward
        return rows(dynamics, *(torch.tensor(n, dtype=torch.float32) for n in numbers))


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
    mode. The output is an instance of Flow-Factory's own class if that is imported.
    """
    x, v, device, batch = latents.float(), noise_pred.float(), latents.device, latents.shape[0]
    dynamics, index = dynamics_type or self.dynamics_type, None
    if timestep_next is not None:
        sigma, sigma_next = timestep / 1000, timestep_next / 1000
    else:
        index, sigmas = _step_index(self, timestep, device), self.sigmas.to(device)
        sigma, sigma_next = sigmas.index_select(0, index), sigmas.index_select(0, index + 1)
    if self.is_eval or dynamics == "ODE":
        noise_level = 0.0
    elif noise_level is None and index is None:
        noise_level = self.get_noise_level_for_sigma(sigma)
    elif noise_level is None:
        noise_level = self.get_noise_levels().to(device).index_select(0, index)
    given = (sigma, sigma_next, noise_level, sigma_max or self.sigmas[1])
    sigma, sigma_next, eta, top = (_batched(t, batch, device) for t in given)
    if device.type == "cpu":
        coef, std = _kept_rows(dynamics, *(tuple(t.tolist()) for t in (sigma, sigma_next, eta, top)))
        std = std.clone()  # the caller may modify it
    else:
        coef, std = rows(dynamics, sigma, sigma_next, eta, top)
    noise, out_dtype, x_next = None, latents.dtype, None if next_latents is None else next_latents.float()
    if x_next is None and dynamics == "ODE":
        out_dtype = torch.float32  # not rounded, because it is not scored
    elif x_next is None:
        noise = randn_tensor(v.shape, generator, device, v.dtype)
    done = transition(
        x, v, coef, torch.arange(batch, device=device), x_next=x_next, noise=noise, out_dtype=out_dtype,
        want_mean=not return_dict or "next_latents_mean" in return_kwargs,
    )  # fmt: skip
    logp = done.logp if compute_log_prob else None
    std, dt = (t.view(-1, *([1] * (x.dim() - 1))) for t in (std, sigma_next - sigma))
    x_next = done.x_next.float()
    if not return_dict:
        return x_next, done.mean, v, logp, std, dt
    fields = dict(zip(_FIELDS, (x_next, done.mean, std, dt, logp, v), strict=True))
    if unknown := [name for name in return_kwargs if name not in fields]:
        logger.warning("%s: not an output of this step, which has %s", ", ".join(unknown), ", ".join(fields))
    theirs = sys.modules.get("flow_factory.scheduler.abc")
    output = SimpleNamespace if theirs is None else theirs.SDESchedulerOutput
    return output(**{name: t if name in return_kwargs else None for name, t in fields.items()})


def _step_index(self: Any, timestep: Any, device: torch.device) -> Tensor:
    """Step numbers int64 [n] from a step number or n timesteps."""
    if isinstance(timestep, Tensor) and timestep.dim() > 1:
        raise ValueError(f"timestep: expected a number, a 0-d or a 1-d tensor, got shape {list(timestep.shape)}")
    whole = isinstance(timestep, Tensor) and not timestep.is_floating_point() and not timestep.is_cuda
    if isinstance(timestep, int) or whole:
        return torch.full((1,), int(timestep), device=device)
    if isinstance(timestep, (float, Tensor)):
        return index_of(self.timesteps, timestep, device)
    raise TypeError(f"timestep: expected a number or a tensor, got {type(timestep).__name__}")


def _batched(value: float | Tensor | Sequence[float], batch: int, device: torch.device) -> Tensor:
    """fp32 [batch] on the device; a plain number becomes a device tensor without a copy, which would sync."""
    if isinstance(value, (int, float)):
        return torch.full((batch,), value, dtype=torch.float32, device=device)
    t = torch.as_tensor(value).to(device, torch.float32).reshape(-1)
    return t.expand(batch) if t.numel() == 1 else t
