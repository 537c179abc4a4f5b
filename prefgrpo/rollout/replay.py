"""Log-probs of stored steps under the current weights, with gradient: logp = w · mean_D (x' − a·x − b·v)² + c.

Invariant: with unchanged weights, replay repeats the rollout's forward (same σ, latents and batch shape) and gives the
stored log-prob bit for bit, so the first ratio is exactly 1 (for stacked steps, up to rounding). `TrajectoryCollector`
passes the results to the trajectory objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from prefgrpo.config.schema import TrainConfig
from prefgrpo.models.base import Adapter, Condition, Sampling, after_guidance
from prefgrpo.objectives.base import Replayed, Targets, TrajectoryObjective
from prefgrpo.ops import affine_logp
from prefgrpo.ops.reference import affine_kl
from prefgrpo.rollout.batches import Batch
from prefgrpo.rollout.rollout import Step, stack
from prefgrpo.sde.schedule import Schedule


def stacked(
    adapter: Adapter, schedule: Schedule, steps: Sequence[Step], sampling: Sampling, replay_batch: int
) -> list[Step]:
    """Stack steps of B samples each into as few forwards as possible, of at most `replay_batch` rows each.

    Below 2 · B nothing is stacked. A forward uses one denoiser. Steps with the rollout's graph are returned unchanged.
    """
    if not steps or steps[0].graph is not None:
        return list(steps)
    together = max(1, replay_batch // len(steps[0].index))
    out = []
    for _, group in groupby(steps, lambda step: adapter.expert(schedule.times[list(step.step_indices)], sampling)):
        own = list(group)
        out += [stack(own[k : k + together]) for k in range(0, len(own), together)]
    return out


def replay(
    adapter: Adapter,
    schedule: Schedule,
    condition: Condition,
    step: Step,
    sampling: Sampling,
    kl: Literal["", "gaussian", "flow_grpo"] = "",
    reference: Callable[[], AbstractContextManager[None]] | None = None,
) -> Replayed:
    """Log-prob [B] of a stored step, or [S · B] of S stacked steps in one forward.

    condition: of the B samples; it is repeated for stacked steps. kl: also compute the KL to the reference policy, with
    a second forward without gradient inside `reference()` (None: the adapter's, with its LoRA switched off);
    'flow_grpo': times the step's |Δσ| (train.kl_form). If velocities are stored, also GRPO-Guard's log-ratio and the KL
    to the policy that generated the step. Gradients flow only through the velocity, from the step's graph or a forward.
    """
    if (count := len(step.step_indices)) > 1:
        condition = condition.tile(count)
    sigma = schedule.times[list(step.step_indices)].repeat_interleave(step.index.numel() // count)
    v_ref = None
    if kl:
        with torch.no_grad(), (reference or adapter.reference)():
            v_ref = adapter.velocity(step.x, sigma, condition, sampling)
    v, guidance = step.graph or adapter.cond_uncond(step.x, sigma, condition, sampling)
    moved = None
    if step.v is not None:
        v, guidance = after_guidance(v, guidance), None
        moved = affine_kl(v.detach(), step.v, schedule.coef[step.index])
    out = affine_logp(step.x, v, step.x_next, schedule.coef, step.index, v_ref=v_ref, v_old=step.v, guidance=guidance)
    away = out.kl
    if kl == "flow_grpo" and away is not None:
        away = away * (-schedule.sigmas.diff()).to(away.device)[step.index]
    weight = None if schedule.weights is None else schedule.weights[step.index]
    return Replayed(out.logp, step.logp, away, out.log_ratio, moved, weight)


@dataclass(frozen=True)
class TrajectoryCollector:
    """Accumulates the gradients of a trajectory objective by replaying stored steps, one or several per forward."""

    adapter: Adapter
    objective: TrajectoryObjective
    train: TrainConfig
    reference: Callable[[], AbstractContextManager[None]]
    """Context in which the model has the reference policy's weights."""
    equal_forwards: bool = False
    """Replay the same number of steps per forward in every batch, whatever its size (`World.equal_forwards`)."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of every forward."""
        return self.objective.metrics

    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """Accumulate gradients of this rank's batches; returns one row [update, samples, loss, *metrics] per forward.

        samples: number in the whole update, over all ranks.
        """
        table, train = list[Tensor](), self.train
        signal = self.objective.signal(train, targets)
        for batch in batches:
            steps = batch.trajectory.steps
            adv = signal[batch.slots, batch.members].nan_to_num(0.0)  # padding batches may hold dropped samples
            limit = train.replay_batch
            if self.equal_forwards:
                limit = limit // batch.sizes.batch_size * len(batch.slots)
            for step in stacked(self.adapter, batch.schedule, steps, batch.sizes, limit):
                kl = train.kl_form if train.kl_coef else ""
                new = replay(self.adapter, batch.schedule, batch.condition, step, batch.sizes, kl, self.reference)
                together = len(step.step_indices)
                out = self.objective.loss(train, new, adv.repeat(together), float(samples * len(steps)))
                (out.loss * batch.weight).backward()
                facts = out.metrics.new_tensor([batch.update, together * len(adv)])
                if batch.weight:
                    table.append(torch.cat([facts, out.loss.detach()[None], out.metrics]))
        return table
