"""Log-probs of stored steps under the current weights, with gradient: logp = w · mean_D (x' − a·x − b·v)² + c.

Invariant: with unchanged weights, replay repeats the rollout's forward (same σ, latents and batch shape) and gives the
stored log-prob bit for bit, so the first ratio is exactly 1. `TrajectoryCollector` passes the results to the trajectory
objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
    kl: Literal["gaussian", "flow_grpo"] = "gaussian",
) -> Replayed:
    """Log-prob [B] of a stored step.

    condition: of the B samples. If the step has the reference policy's velocity, also the KL to that policy; kl
    'flow_grpo': times the step's |Δσ| (train.kl_form). If velocities are stored, also GRPO-Guard's log-ratio and the KL
    to the policy that generated the step. Gradients flow only through the velocity.
    """
    sigma = schedule.times[step.index].expand(len(step.x))
    v = adapter.velocity(step.x, sigma, condition, sampling)
    out = sde_logp(step.x, v, step.x_next, schedule.coef, step.index, v_ref=step.v_ref, v_old=step.v)
    away = out.kl
    if kl == "flow_grpo" and away is not None:
        away = away * -schedule.sigmas.diff()[step.index]
    weight = None if schedule.weights is None else schedule.weights[step.index].expand(len(step.x))
    return Replayed(out.logp, step.logp, away, out.log_ratio, weight)


@dataclass(frozen=True)
class TrajectoryCollector:
    """Accumulates the gradients of a trajectory objective by replaying stored steps, one per forward.

    With train.kl_coef, `with_reference` comes first.
    """

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
        left = sum(len(batch.steps) for batch in batches)
        for batch in batches:
            adv = batch.of_samples(targets.advantage)
            for stored in batch.steps:
                assert bool(train.kl_coef) == (stored.v_ref is not None), "expected `with_reference` first"
                step = self.whole(stored)
                new = replay(self.adapter, batch.schedule, batch.condition, step, sampling, train.kl_form)
                out = self.objective.loss(train, new, adv, float(samples * len(batch.steps)))
                left -= 1
                if self.reduce_once:
                    reduce_gradients(self.adapter, left == 0)
                table += batch.backward(out.loss, out.metrics)
        return table

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference policy's velocities at its stored steps; to be called inside `reference()`."""
        steps = list[Step]()
        for stored in batch.steps:
            x = self.world.whole(stored.x, self._latent_shape)
            sigma = batch.schedule.times[stored.index].expand(len(x))
            with torch.no_grad():
                v_ref = self.adapter.velocity(x, sigma, batch.condition, self.config.rollout)
            steps.append(replace(stored, v_ref=self.world.slice_of(v_ref)))
        return replace(batch, steps=tuple(steps))

    def whole(self, stored: Step) -> Step:
        """A step of a `Batch` with the whole latents, of which each context-parallel process keeps a part."""
        gather = partial(self.world.whole, shape=self._latent_shape)
        (step,) = changed([stored], lambda tensor: tensor if tensor.dim() == 1 else gather(tensor))
        return step

    @property
    def _latent_shape(self) -> tuple[int, ...]:
        return self.adapter.latent_shape(self.config.rollout)
