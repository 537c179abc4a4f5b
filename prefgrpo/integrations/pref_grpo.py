"""Pref-GRPO's `flow_grpo_step` and `dance_grpo_step`, over the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow` and `dance`)

Invariant: same arguments, return order and random stream as CodeGoat24/Pref-GRPO; noise is drawn in the model output's
dtype there and here. With bf16 model outputs it rounds b·v and s·ε to bf16, and this does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import Table, randn, table, transition


def _rows(index: int | Tensor, t: Table, x: Tensor) -> Tensor:
    """A step number or 0-d tensor as int64 [B] on x's device; a tensor is not read back, so not checked here."""
    if isinstance(index, Tensor):
        return index.reshape(1).to(x.device, torch.int64).expand(x.shape[0]).contiguous()
    if not 0 <= index < t.dt.numel():
        raise IndexError(f"index: expected a step in 0 … {t.dt.numel() - 1} of this schedule, got {index}")
    return torch.full((x.shape[0],), index, dtype=torch.int64, device=x.device)


def _step(
    v: Tensor, x: Tensor, t: Table, index: int | Tensor, x_next: Tensor | None, noise: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """((x', x0 prediction, logp), (μ, s, Δ)); s and Δ are 0-d."""
    rows, dtype = _rows(index, t, x), torch.promote_types(x.dtype, v.dtype)
    step = transition(x, v, t.coef, rows, x_next=x_next, noise=noise, out_dtype=dtype, x0_sigma=t.sigma)
    assert step.x0 is not None
    s, dt = (c.index_select(0, rows[:1])[0] for c in (t.coef[:, 2], t.dt))
    return (step.x_next, step.x0, step.logp), (step.mean.to(dtype), s, dt)


def flow_grpo_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    generator: Any = None,
    return_stats: bool = False,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp [B]) and, with `return_stats`, (μ, s, Δ); s and Δ < 0 are 0-d.

    sigmas: the schedule [T + 1]; index: step, a number or a 0-d tensor. prev_sample: score this x' instead of
    sampling. Raises ValueError for sigmas that do not fall within [0, 1] or a negative η, IndexError for the index.
    """
    noise = None
    if prev_sample is None:
        noise = randn(model_output.shape, generator, model_output.device, model_output.dtype)
    t = table(sigmas, "flow", eta, latents.device)
    out, stats = _step(model_output, latents, t, index, prev_sample, noise)
    return (*out, *stats) if return_stats else out


def dance_grpo_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    grpo: bool,
    sde_solver: bool,
    return_stats: bool = False,
) -> tuple[Tensor, ...]:
    """`dance_grpo.flux_step` which, with `return_stats`, also returns (μ, s, −Δ); −Δ > 0, unlike `flow_grpo_step`."""
    t = table(sigmas, "dance" if sde_solver else "dance_mean_ode", eta, latents.device)
    given = prev_sample if grpo else None
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    noise = torch.randn_like(latents, dtype=dtype) if grpo and given is None else None
    out, (mean, s, dt) = _step(model_output, latents, t, index, given, noise)
    if not grpo:
        return mean, out[1]
    return (*out, mean, s, -dt) if return_stats else out
