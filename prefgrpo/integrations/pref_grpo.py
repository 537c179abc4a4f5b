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

from prefgrpo.integrations.steps import column, scheduled, transition


def _step(
    rule: str,
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    x_next: Tensor | None,
    noise: Tensor | None,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp, μ, s, Δ); s and Δ are 0-d."""
    at = torch.as_tensor(index, device=latents.device).reshape(1)
    coef, sigma, sigma_next = scheduled(sigmas, at, rule, eta)
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    step = transition(latents, model_output, coef, x_next=x_next, noise=noise, out_dtype=dtype)
    assert step.mean is not None
    x0 = latents - column(sigma, latents.dim()) * model_output
    s, dt = (t.float()[0] for t in (coef[:, 2], sigma_next - sigma))
    return step.x_next, x0.to(dtype), step.logp, step.mean.to(dtype), s, dt


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

    sigmas: the schedule [T + 1]; index: step, a number or a 0-d tensor. prev_sample: score this x' instead of sampling.
    """
    noise = None
    if prev_sample is None:
        noise = randn_tensor(model_output.shape, generator, model_output.device, model_output.dtype)
    out = _step("flow", model_output, latents, eta, sigmas, index, prev_sample, noise)
    return out if return_stats else out[:3]


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
    """(x', x0 prediction, logp [B]), or without `grpo` (μ, x0 prediction), in the latents' dtype.

    Arguments as in `flow_grpo_step`; with `grpo`, a given prev_sample is scored, not sampled. Without sde_solver,
    μ = x + Δ·v. return_stats: also (μ, s, −Δ); −Δ > 0, unlike in `flow_grpo_step`. Source: arXiv 2505.07818 eq. 8.
    """
    x_next = prev_sample if grpo else None
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    noise = torch.randn_like(latents, dtype=dtype) if grpo and x_next is None else None
    rule = "dance" if sde_solver else "dance_mean_ode"
    out = _step(rule, model_output, latents, eta, sigmas, index, x_next, noise)
    if not grpo:
        return out[3], out[1]
    return (*out[:5], -out[5]) if return_stats else out[:3]
