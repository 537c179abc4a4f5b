"""DanceGRPO's `flux_step`, over the fused ops.

    μ = x + Δ·v − ½η²·score·Δ, x' = μ + η·√−Δ·ε      (rule `dance`; without sde_solver μ = x + Δ·v)

Invariant: same arguments, return order and random stream as XueZeyue/DanceGRPO (torch's own stream, no generator);
Pref-GRPO's `dance_grpo_step` is the same step and can return more. Source of the formulas: arXiv 2505.07818 eq. 8.
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

    sigmas: the schedule [T + 1]; index: step, a number or a 0-d tensor. prev_sample: score this x' instead of
    sampling. Raises ValueError for sigmas that do not fall within [0, 1] or a negative η, IndexError for the index.
    """
    return dance_grpo_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver)
