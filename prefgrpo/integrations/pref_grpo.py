"""Pref-GRPO's `flow_grpo_step` and `dance_grpo_step`, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow` and `dance`)

Invariant: same arguments, return order and random stream as CodeGoat24/Pref-GRPO; both draw noise in the model output's
dtype. With bf16 model outputs, Pref-GRPO rounds b·v and s·ε to bf16; this module does not.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from prefgrpo.integrations.steps import column, table, transition


def _step(
    rule: str,
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    x_next: Tensor | None,
    noise: Tensor | None,
    stats: bool,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp) and, with `stats`, (μ, s, Δ); s and Δ are 0-d.

    An index on a GPU is not checked here, because that would need a sync.
    """
    t, batch = table(sigmas, rule, eta, latents.device), latents.shape[0]
    if isinstance(index, Tensor) and index.device.type == "cpu" == latents.device.type:
        index = int(index)
    if isinstance(index, Tensor):
        rows = index.reshape(1).to(latents.device, torch.int64).expand(batch).contiguous()
    elif 0 <= index < t.dt.numel():
        rows = torch.full((batch,), index, dtype=torch.int64, device=latents.device)
    else:
        raise IndexError(f"index: expected a step in 0 … {t.dt.numel() - 1} of this schedule, got {index}")
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    step = transition(latents, model_output, t.coef, rows, x_next=x_next, noise=noise, out_dtype=dtype, want_mean=stats)
    sigma = column(t.sigma, rows, latents.dim())
    x0 = (latents - sigma * model_output.to(torch.promote_types(dtype, torch.float32))).to(dtype)
    if not stats:
        return step.x_next, x0, step.logp
    assert step.mean is not None
    s, dt = (c.index_select(0, rows[:1])[0] for c in (t.coef[:, 2], t.dt))
    return step.x_next, x0, step.logp, step.mean.to(dtype), s, dt


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
    sampling. Raises ValueError for sigmas not decreasing within [0, 1] or a negative η, IndexError for a wrong index.
    """
    noise = None
    if prev_sample is None:
        noise = randn_tensor(model_output.shape, generator, model_output.device, model_output.dtype)
    return _step("flow", model_output, latents, eta, sigmas, index, prev_sample, noise, return_stats)


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
    x_next = prev_sample if grpo else None
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    noise = torch.randn_like(latents, dtype=dtype) if grpo and x_next is None else None
    rule = "dance" if sde_solver else "dance_mean_ode"
    out = _step(rule, model_output, latents, eta, sigmas, index, x_next, noise, return_stats or not grpo)
    if not grpo:
        return out[3], out[1]
    return (*out[:5], -out[5]) if return_stats else out
