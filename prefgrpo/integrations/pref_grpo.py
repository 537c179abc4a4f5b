"""Pref-GRPO's `flow_grpo_step` and `dance_grpo_step`, over the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow` and `dance`)

Invariant: same arguments, return order and random stream as CodeGoat24/Pref-GRPO; noise is drawn in the model output's
dtype there and here. With bf16 model outputs it rounds b·v and s·ε to bf16, and this does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.dance_grpo import dance_step, rows_of
from prefgrpo.integrations.steps import randn, table, transition


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
    t = table(sigmas, "flow", eta, latents.device)
    rows = rows_of(index, t, latents)
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    noise = None
    if prev_sample is None:
        noise = randn(model_output.shape, generator, model_output.device, model_output.dtype)
    step = transition(
        latents, model_output, t.coef, rows, x_next=prev_sample, noise=noise, out_dtype=dtype, x0_sigma=t.sigma
    )
    assert step.x0 is not None
    if not return_stats:
        return step.x_next, step.x0, step.logp
    s, dt = (c.index_select(0, rows[:1])[0] for c in (t.coef[:, 2], t.dt))
    return step.x_next, step.x0, step.logp, step.mean.to(dtype), s, dt


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
    step, t, rows = dance_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver)
    assert step.x0 is not None
    mean = step.mean.to(step.x0.dtype)
    if not grpo:
        return mean, step.x0
    if not return_stats:
        return step.x_next, step.x0, step.logp
    s, dt = (c.index_select(0, rows[:1])[0] for c in (t.coef[:, 2], t.dt))
    return step.x_next, step.x0, step.logp, mean, s, -dt
