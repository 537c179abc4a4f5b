"""DanceGRPO's `flux_step`: Pref-GRPO's `dance_grpo_step` without its statistics.

Invariant: same arguments, return order and random stream as XueZeyue/DanceGRPO (torch's own stream, no generator).
Source of the formulas: arXiv 2505.07818 eq. 8 (rule `dance`; without sde_solver μ = x + Δ·v).
"""

from __future__ import annotations

from torch import Tensor

from prefgrpo.integrations.pref_grpo import dance_grpo_step


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

    Arguments and errors as in `pref_grpo.flow_grpo_step`; with `grpo`, a given prev_sample is scored, not sampled.
    """
    return dance_grpo_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver)
