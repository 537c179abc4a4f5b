"""Flow-GRPO's `sde_step_with_logprob` (SD3, FLUX, Qwen-Image) and its Wan variant, based on the fused ops.

    μ = a·x + b·v, x' = μ + s·ε, logp = w · mean_D (x' − μ)² + c      (rules `flow`, `cps`, `wan`)

Invariant: same arguments, return order and random stream as yifan123/flow_grpo; where that returns a NaN log-prob
(noise level 0), this returns 0. Source of the formulas: arXiv 2505.05470 eq. 9, arXiv 2509.05952.
"""

from __future__ import annotations

from typing import Any

from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from prefgrpo.integrations.steps import column, index_of, table, transition

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
) -> tuple[Tensor, ...]:
    """(x', logp [B], μ, std_dev_t) or, with `return_sqrt_dt`, also √(σ − σ'); fp32, the last two [n, 1, …].

    self: the pipeline's scheduler. timestep: n timesteps of it, n = 1 or B. prev_sample: score this x' instead of
    sampling. noise_level: η. Raises ValueError for an unknown `sde_type` or timestep.
    """
    if sde_type not in _RULES:
        raise ValueError(f"sde_type: expected one of {', '.join(_RULES)}, got '{sde_type}'")
    rule = _RULES[sde_type]
    *step, s, sqrt_dt = _step(self, rule, noise_level, model_output, timestep, sample, prev_sample, generator)
    std = s if sde_type == "cps" else s / sqrt_dt
    return (*step, std, sqrt_dt) if return_sqrt_dt else (*step, std)


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
) -> tuple[Tensor, ...]:
    """The Wan variant: (x', logp [B], μ, s), or with `return_dt_and_std_dev_t` (…, std_dev_t, √(σ − σ')).

    determistic: x' is the ODE's step, scored under the SDE. return_pixel_log_prob has no effect, as in Flow-GRPO.
    Raises ValueError for an unknown timestep, or a generator together with a prev_sample.
    """
    if prev_sample is not None and generator is not None:
        raise ValueError("expected a generator or a prev_sample, got both: a given sample needs no noise")
    *step, s, sqrt_dt = _step(self, "wan", 1.0, model_output, timestep, sample, prev_sample, generator, determistic)
    return (*step, s / sqrt_dt, sqrt_dt) if return_dt_and_std_dev_t else (*step, s)


def _step(
    scheduler: Any,
    rule: str,
    eta: float,
    model_output: Tensor,
    timestep: Any,
    sample: Tensor,
    prev_sample: Tensor | None,
    generator: Any,
    ode: bool = False,
) -> tuple[Tensor, ...]:
    """(x', logp, μ, s, √(σ − σ')), the last two [n, 1, …]."""
    x, v, noise = sample.float(), model_output.float(), None
    t = table(scheduler.sigmas, rule, eta, x.device)
    index = index_of(scheduler.timesteps, timestep, x.device)
    s, dt = (column(c, index, x.dim()) for c in (t.coef[:, 2], t.dt))
    if prev_sample is None:
        noise = randn_tensor(v.shape, generator, v.device, v.dtype)
    if ode:  # Flow-GRPO draws noise and discards it: advance the random stream likewise
        prev_sample = x + dt * v
    x_next = None if prev_sample is None else prev_sample.float()
    step = transition(x, v, t.coef, index.expand(x.shape[0]).contiguous(), x_next=x_next, noise=noise)
    assert step.mean is not None
    return step.x_next, step.logp, step.mean, s, (-dt).sqrt()
