"""Flow-GRPO's `sde_step_with_logprob` (SD3, FLUX, Qwen-Image) and its Wan variant, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `cps`, `wan`)

Invariant: same arguments, return order and random stream as yifan123/flow_grpo; where that returns a NaN log-prob
(noise level 0), this returns 0. Source of the formulas: arXiv 2505.05470 eq. 9, arXiv 2509.05952.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import column, scheduler_step

_RULES = {"sde": "flow", "cps": "cps"}


def sde_step_with_logprob(
    self: Any,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    noise_level: float = 0.7,
    prev_sample: Tensor | None = None,
    generator: Any = None,
    sde_type: str | None = "sde",
    return_sqrt_dt: bool | None = False,
    out_dtype: torch.dtype | None = None,
    want_mean: bool = True,
) -> tuple[Any, ...]:
    """(x', logp [B], μ, std_dev_t) or, with `return_sqrt_dt`, also √(σ − σ'); fp32, the last two [n, 1, …].

    self: the pipeline's scheduler. timestep: n timesteps of it, n = 1 or B. prev_sample: score this x' instead of
    sampling. noise_level: η. generator: torch's, or a PhiloxNoise. out_dtype: the dtype in which the loop stores x',
    which is rounded to it before it is scored (None: fp32). want_mean: False, where nothing reads μ (no KL), gives None
    for it and saves a pass over the latents. Raises ValueError for an unknown `sde_type`.
    """
    if sde_type not in _RULES:
        raise ValueError(f"sde_type: expected one of {', '.join(_RULES)}, got '{sde_type}'")
    inputs = (model_output, timestep, sample, prev_sample, generator, out_dtype)
    results, steps = scheduler_step(self, _RULES[sde_type], noise_level, *inputs, want_mean=want_mean)
    std = column(steps.s if sde_type == "cps" else steps.std_dev_t, sample.dim())
    return (*results, std, column(steps.sqrt_dt, sample.dim())) if return_sqrt_dt else (*results, std)


def wan_sde_step_with_logprob(
    self: Any,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    prev_sample: Tensor | None = None,
    generator: Any = None,
    determistic: bool = False,
    return_pixel_log_prob: bool = False,
    return_dt_and_std_dev_t: bool = False,
    out_dtype: torch.dtype | None = None,
    want_mean: bool = True,
) -> tuple[Any, ...]:
    """The Wan variant: (x', logp [B], μ, s), or with `return_dt_and_std_dev_t` (…, std_dev_t, √(σ − σ')).

    determistic: x' is the ODE's step, scored under the SDE. return_pixel_log_prob has no effect, as in Flow-GRPO.
    """
    inputs = (model_output, timestep, sample, prev_sample, generator, out_dtype)
    results, steps = scheduler_step(self, "wan", 1.0, *inputs, is_ode=determistic, want_mean=want_mean)
    last = (steps.std_dev_t, steps.sqrt_dt) if return_dt_and_std_dev_t else (steps.s,)
    return (*results, *(column(t, sample.dim()) for t in last))
