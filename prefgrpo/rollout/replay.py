"""Log-probs of stored steps under the current weights, with gradient: logp = w · mean_D (x' − a·x − b·v)² + c.

Invariant: with unchanged weights, replay repeats the rollout's forward (same σ, latents and batch shape) and gives the
stored log-prob bit for bit, so the first ratio is exactly 1. `TrajectoryCollector` passes the results to the trajectory
objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from prefgrpo.config.schema import Config
from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.objectives.base import Replayed, Targets, TrajectoryObjective
from prefgrpo.ops import sde_logp
from prefgrpo.parallel.shard import reduce_gradients
from prefgrpo.parallel.world import World
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.rollout import Step, changed
from prefgrpo.sde.schedule import Schedule


def replay(
    adapter: Adapter,
    schedule: Schedule,
    condition: Condition,
    step: Step,
    sampling: Sampling,
    kl: Literal["", "gaussian", "flow_grpo"] = "",
    reference: Callable[[], AbstractContextManager[None]] | None = None,
) -> Replayed:
    """Log-prob [B] of a stored step.

    condition: of the B samples. kl: also compute the KL to the reference policy, with a second forward without gradient
    inside `reference()` (None: the adapter's, with its LoRA switched off); 'flow_grpo': times the step's |Δσ|
    (train.kl_form). If velocities are stored, also GRPO-Guard's log-ratio and the KL
    to the policy that generated the step. Gradients flow only through the velocity.
    """
    sigma = schedule.times[step.index].expand(len(step.x))
    v_ref = None
    if kl:
        with torch.no_grad(), (reference or adapter.reference)():
            v_ref = adapter.velocity(step.x, sigma, condition, sampling)
    v = adapter.velocity(step.x, sigma, condition, sampling)
    out = sde_logp(step.x, v, step.x_next, schedule.coef, step.index, v_ref=v_ref, v_old=step.v)
    away = out.kl
    if kl == "flow_grpo" and away is not None:
        away = away * -schedule.sigmas.diff()[step.index]
    weight = None if schedule.weights is None else schedule.weights[step.index].expand(len(step.x))
    return Replayed(out.logp, step.logp, away, out.log_ratio, weight)


@dataclass(frozen=True)
class TrajectoryCollector:
    """Accumulates the gradients of a trajectory objective by replaying stored steps, one per forward."""

    adapter: Adapter
    objective: TrajectoryObjective
    config: Config
    reference: Callable[[], AbstractContextManager[None]]
    """Context in which the model has the reference policy's weights."""
    world: World
    reduce_once: bool = False
    """Whether gradients of sharded weights are summed over the shards once per update, not in every backward."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of every forward."""
        return self.objective.metrics

    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """Accumulate gradients of this rank's batches; returns one row [update, samples, loss, *metrics] per forward.

        samples: number in the whole update, over all ranks.
        """
        table = list[Tensor]()
        train = self.config.train
        sampling = self.config.rollout
        kl = train.kl_form if train.kl_coef else ""
        left = sum(len(batch.steps) for batch in batches)
        for batch in batches:
            adv = batch.of_samples(targets.advantage)
            for stored in batch.steps:
                step = self.whole(stored)
                new = replay(self.adapter, batch.schedule, batch.condition, step, sampling, kl, self.reference)
                out = self.objective.loss(train, new, adv, float(samples * len(batch.steps)))
                left -= 1
                if self.reduce_once:
                    reduce_gradients(self.adapter, left == 0)
                table += batch.backward(out.loss, out.metrics)
        return table

    def whole(self, stored: Step) -> Step:
        """A step of a `Batch` with the whole latents, of which each context-parallel process keeps a part."""
        shape = self.adapter.latent_shape(self.config.rollout)
        gather = partial(self.world.whole, shape=shape)
        (step,) = changed([stored], lambda tensor: tensor if tensor.dim() == 1 else gather(tensor))
        return step
