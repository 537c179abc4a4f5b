"""verl-omni: its SDE step and clipped loss on the fused ops, through its own class and registry.

    from prefgrpo.integrations import verl_omni
    verl_omni.register()    # diffusion_loss.loss_mode stays flow_grpo or dance_grpo

Invariant: same arguments, return order and random stream as verl-project/verl-omni; a step and its replay are bitwise
equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.integrations.steps import column, scheduler_step
from prefgrpo.ops import metrics_by_name, policy_loss

RULES = {"sde": "flow", "cps": "cps", "dance_sde": "dance"}
LOSSES = ("flow_grpo", "dance_grpo")
"""Names under which verl-omni's configuration offers its clipped loss."""
METRICS = {
    "actor/ppo_kl": "ppo_kl",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_higher": "clip_fraction_high",
    "actor/pg_clipfrac_lower": "clip_fraction_low",
    "actor/ratio_mean": "ratio_mean",
    "actor/ratio_std": "ratio_std",
}
"""verl-omni's metrics → the op's."""


def sample_previous_step(
    self: Any,
    sample: Tensor,
    model_output: Tensor,
    timestep: Tensor | None = None,
    generator: Any = None,
    per_token_timesteps: Tensor | None = None,
    noise_level: float | Tensor = 0.7,
    prev_sample: Tensor | None = None,
    sde_type: str = "sde",
    return_logprobs: bool = True,
    return_sqrt_dt: bool = False,
    include_logprob_normalizer: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """(x', logp [B] or None, μ, std_dev_t) and, with `return_sqrt_dt`, √(σ − σ') [B]; all fp32.

    self: the scheduler. timestep: B of its timesteps; None: its own step index, and std_dev_t is 0-d. prev_sample:
    score this x' instead of sampling. noise_level: η, a number, or a tensor of one or of B, which is not read on the
    host. include_logprob_normalizer: False leaves out c. generator: torch's, or a PhiloxNoise. out_dtype: dtype in
    which x' is stored, and to which it is rounded before it is scored (None: fp32). Raises ValueError for an unknown
    `sde_type`, RuntimeError for an unknown timestep, NotImplementedError for per_token_timesteps.
    """
    if per_token_timesteps is not None:
        raise NotImplementedError("per_token_timesteps: expected None, as in verl-omni's own step")
    if sde_type not in RULES:
        raise ValueError(f"sde_type: expected one of {', '.join(RULES)}, got '{sde_type}'")
    inputs = (model_output, timestep, sample, prev_sample, generator, out_dtype)
    (x_next, logp, mean), steps = scheduler_step(
        self, RULES[sde_type], noise_level, *inputs, with_normalizer=include_logprob_normalizer
    )
    std = steps.std_dev_t if sde_type == "sde" else steps.s
    std = std.reshape(()) if timestep is None and len(std) == 1 else column(std, sample.dim())
    results = (x_next, logp if return_logprobs else None, mean, std)
    return (*results, steps.sqrt_dt.repeat(sample.shape[0] // len(steps.sqrt_dt))) if return_sqrt_dt else results


def clipped_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) over [B], as verl-omni's `FlowGRPOLoss.compute_loss`; one read of the device for all metrics."""
    options = config.diffusion_loss
    inputs = [t.detach().float() for t in (old_log_prob, advantages)]
    weight = None if rollout_is_weights is None else rollout_is_weights.detach().float()
    clips = {"epsilon_low": options.clip_ratio, "adv_clip": options.adv_clip_max}
    loss, metrics = policy_loss(log_prob.float(), *inputs, weight=weight, **clips)
    values = dict(zip(metrics_by_name(metrics), metrics.tolist(), strict=True))
    return loss, {theirs: values[ours] for theirs, ours in METRICS.items()}


def register() -> None:
    """Put the step into verl-omni's scheduler class and the loss over its `flow_grpo` and `dance_grpo`.

    Call it in every process. verl-omni's configuration accepts no other name for a loss.
    """
    from verl_omni.pipelines.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler
    from verl_omni.trainer.diffusion import diffusion_algos as theirs

    FlowMatchSDEDiscreteScheduler.sample_previous_step = sample_previous_step
    compute_loss = staticmethod(clipped_loss)
    loss = type("PrefGRPOLoss", (theirs.FlowGRPOLoss,), {"compute_loss": compute_loss})
    for name in LOSSES:
        theirs.register_diffusion_loss(name)(loss)
