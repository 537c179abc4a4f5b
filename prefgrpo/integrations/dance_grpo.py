"""DanceGRPO's `flux_step`, over the fused ops.

    μ = x + Δ·v − ½η²·score·Δ, x' = μ + η·√−Δ·ε      (rule `dance`; without sde_solver μ = x + Δ·v)

Invariant: same arguments, return order and random stream as XueZeyue/DanceGRPO (torch's own stream, no generator).
Source of the formulas: arXiv 2505.07818 eq. 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefgrpo.integrations.steps import Table, Transition, table, transition


def flux_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    grpo: bool,
    sde_solver: bool,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp [B]), or (μ, x0 prediction) without `grpo`, in the latents' dtype.

    sigmas: the schedule [T + 1]; index: step, a number or a 0-d tensor. prev_sample: score this x' instead of
    sampling. Raises ValueError for sigmas that do not fall within [0, 1] or a negative η, IndexError for the index.
    """
    step, _, _ = dance_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver)
    assert step.x0 is not None
    return (step.x_next, step.x0, step.logp) if grpo else (step.mean.to(step.x0.dtype), step.x0)


def rows_of(index: int | Tensor, t: Table, x: Tensor) -> Tensor:
    """A step number or 0-d tensor as int64 [B] on x's device; a tensor is not read back, so not checked here."""
    if isinstance(index, Tensor):
        return index.reshape(1).to(x.device, torch.int64).expand(x.shape[0]).contiguous()
    if not 0 <= index < t.dt.numel():
        raise IndexError(f"index: expected a step in 0 … {t.dt.numel() - 1} of this schedule, got {index}")
    return torch.full((x.shape[0],), index, dtype=torch.int64, device=x.device)


def dance_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    grpo: bool,
    sde_solver: bool,
) -> tuple[Transition, Table, Tensor]:
    """The step, its table and its row numbers [B]; shared with Pref-GRPO."""
    t = table(sigmas, "dance" if sde_solver else "dance_mean_ode", eta, latents.device)
    rows = rows_of(index, t, latents)
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    given = prev_sample if grpo else None
    noise = torch.randn_like(latents, dtype=dtype) if grpo and given is None else None
    step = transition(latents, model_output, t.coef, rows, x_next=given, noise=noise, out_dtype=dtype, x0_sigma=t.sigma)
    return step, t, rows
