"""Score stored steps under the present weights, with gradient: logp = w · mean_D (x' − a·x − b·v)² + c.

Invariant: the same forward as in the rollout (same σ, same latents, same batch shape) with the same weights gives
the stored log-prob bit for bit, so the first ratio is exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from prefgrpo.models.base import Adapter, Condition
from prefgrpo.ops import AffineLogp, affine_logp
from prefgrpo.rollout.embed import tile
from prefgrpo.rollout.rollout import Step, stack
from prefgrpo.sde.schedule import Schedule


def replay(
    adapter: Adapter,
    schedule: Schedule,
    condition: Condition,
    steps: Step | Sequence[Step],
    *,
    height: int,
    width: int,
    kl: Literal["", "gaussian", "flow_grpo"] = "",
) -> AffineLogp:
    """Log-prob [B] of one stored step, or [S · B] of S steps in one forward (then bits may differ from the rollout).

    condition: of the B samples; it is repeated for stacked steps. kl: also the KL to the adapter's reference policy,
    by a second forward without gradient; 'flow_grpo': times |Δσ| of its step (train.kl_form). The gradient flows
    through the velocity only.
    """
    step = steps if isinstance(steps, Step) else stack(steps)
    if not isinstance(steps, Step) and len(steps) > 1:
        condition = tile(condition, len(steps))
    sigma = schedule.times[list(step.numbers)].repeat_interleave(step.index.numel() // len(step.numbers))
    v_ref = None
    if kl:
        with torch.no_grad(), adapter.reference():
            v_ref = adapter.velocity(step.x, sigma, condition, height, width)
    v, guidance = adapter.pair(step.x, sigma, condition, height, width)
    out = affine_logp(step.x, v, step.x_next, schedule.coef, step.index, v_ref=v_ref, guidance=guidance)
    if kl == "flow_grpo" and out.kl is not None:
        out = out._replace(kl=out.kl * (-schedule.sigmas.diff()).to(out.kl.device)[step.index])
    return out
