"""Pref-GRPO's `flow_grpo_step` and `dance_grpo_step` (DanceGRPO's `flux_step`), based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow` and `dance`)

Invariant: same arguments, return order and random stream as CodeGoat24/Pref-GRPO and XueZeyue/DanceGRPO; both draw
noise in the model output's dtype. With bf16 model outputs, Pref-GRPO rounds b·v and s·ε to bf16; this module does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import column, noise_like, scheduled, transition
from prefgrpo.ops import PhiloxNoise


def _step(
    rule: str,
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    x_next: Tensor | None,
    noise: Tensor | PhiloxNoise | None,
    out_dtype: torch.dtype | None,
    return_stats: bool,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp) and, with `return_stats`, (μ, s, Δ); s and Δ are 0-d."""
    if isinstance(index, Tensor):
        at = index.to(latents.device, torch.int64).reshape(1)
    else:
        at = torch.full((1,), index, dtype=torch.int64, device=latents.device)
    steps = scheduled(sigmas, at, rule, eta)
    dtype = torch.promote_types(latents.dtype, model_output.dtype)
    out = transition(latents, model_output, steps, x_next, noise, out_dtype or dtype, return_stats)
    x0 = latents - column(steps.sigma, latents.dim()) * model_output
    results = (out.x_next, x0.to(dtype), out.logp)
    return results if out.mean is None else (*results, out.mean.to(dtype), steps.s[0], steps.delta[0])


def flow_grpo_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    generator: Any = None,
    return_stats: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp [B]) and, with `return_stats`, (μ, s, Δ); s and Δ < 0 are 0-d.

    sigmas: the schedule [T + 1]; index: step, a number or a 0-d tensor. prev_sample: score this x' instead of sampling.
    generator: torch's, or a PhiloxNoise. out_dtype: the dtype in which the loop stores x', which is rounded to it
    before it is scored (None: the inputs').
    """
    noise = noise_like(model_output, generator) if prev_sample is None else None
    return _step("flow", model_output, latents, eta, sigmas, index, prev_sample, noise, out_dtype, return_stats)


def dance_grpo_step(
    model_output: Tensor,
    latents: Tensor,
    eta: float,
    sigmas: Tensor,
    index: int | Tensor,
    prev_sample: Tensor | None,
    grpo: bool = True,
    sde_solver: bool = True,
    return_stats: bool = False,
    out_dtype: torch.dtype | None = None,
    generator: PhiloxNoise | None = None,
) -> tuple[Tensor, ...]:
    """(x', x0 prediction, logp [B]) and, with `return_stats`, (μ, s, −Δ); also DanceGRPO's `flux_step`.

    Arguments as in `flow_grpo_step`, but without torch generators; −Δ > 0, unlike there. Raises ValueError without
    grpo or sde_solver, which both codebases always set. Source: arXiv 2505.07818 eq. 8.
    """
    if not (grpo and sde_solver):
        raise ValueError("dance_grpo_step: expected grpo=True and sde_solver=True, as in every call of both codebases")
    noise: Tensor | PhiloxNoise | None = generator if prev_sample is None else None
    if prev_sample is None and noise is None:
        noise = torch.randn_like(latents, dtype=torch.promote_types(latents.dtype, model_output.dtype))
    out = _step("dance", model_output, latents, eta, sigmas, index, prev_sample, noise, out_dtype, return_stats)
    return (*out[:5], -out[5]) if return_stats else out
