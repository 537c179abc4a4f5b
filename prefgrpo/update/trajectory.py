"""Log-probs of stored transitions under the current weights, with gradient: logp = w · mean_D (x' − a·x − b·v)² + c.

Invariant: with unchanged weights, replay repeats the rollout's forward (same σ, latents and batch shape) and gives the
stored log-prob bit for bit, so the first ratio is exactly 1. `TrajectoryGradients` passes the results to the trajectory
objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.objectives.base import Replayed, Targets, TrajectoryObjective
from prefgrpo.ops import sde_logp
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.rollout import Transition, changed
from prefgrpo.sde.schedule import Schedule
from prefgrpo.update.gradients import Gradients


def replay(
    adapter: Adapter,
    schedule: Schedule,
    condition: Condition,
    transition: Transition,
    sampling: Sampling,
    kl: Literal["gaussian", "flow_grpo"] = "gaussian",
) -> Replayed:
    """Log-prob [B] of a stored transition.

    condition: that of the B samples. kl: 'flow_grpo' multiplies the KL by the step's |Δσ| (train.kl_form). The KL needs
    the reference policy's velocity in the transition; GRPO-Guard's log-ratio needs the velocity of the policy that
    generated it. Gradients flow only through the velocity.
    """
    k = transition.k
    x = transition.x
    v = adapter.velocity(x, schedule.times[k].expand(len(x)), condition, sampling)
    out = sde_logp(x, v, transition.x_next, schedule.coef, k, v_ref=transition.v_ref, v_old=transition.v)
    away = out.kl
    if kl == "flow_grpo" and away is not None:
        away = away * -schedule.sigmas.diff()[k]
    weight = None if schedule.weights is None else schedule.weights[k].expand(len(x))
    return Replayed(out.logp, transition.logp, away, out.log_ratio, weight)


@dataclass(frozen=True)
class TrajectoryGradients(Gradients):
    """Gradients of a trajectory objective. With train.kl_coef, `with_reference` comes first."""

    objective: TrajectoryObjective

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the objective."""
        return self.objective.metrics

    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """As in `Gradients`, by replaying the transitions."""
        table = list[Tensor]()
        train = self.config.train
        sampling = self.config.rollout
        left = sum(len(batch.transitions) for batch in batches)
        for batch in batches:
            adv = batch.of_samples(targets.advantage)
            for stored in batch.transitions:
                assert bool(train.kl_coef) == (stored.v_ref is not None), "expected `with_reference` first"
                whole = self.whole(stored)
                new = replay(self.adapter, batch.schedule, batch.condition, whole, sampling, train.kl_form)
                out = self.objective.loss(train, new, adv, float(samples * len(batch.transitions)))
                left -= 1
                table += self.backward(batch, out.loss, out.metrics, last=left == 0, k=stored.k)
        return table

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference policy's velocities at its transitions; to be called inside `reference()`."""
        known = list[Transition]()
        for stored in batch.transitions:
            x = self.world.whole(stored.x, self._latent_shape)
            sigma = batch.schedule.times[stored.k].expand(len(x))
            with torch.no_grad():
                v_ref = self.adapter.velocity(x, sigma, batch.condition, self.config.rollout)
            known.append(replace(stored, v_ref=self.world.slice_of(v_ref)))
        return replace(batch, transitions=tuple(known))

    def whole(self, stored: Transition) -> Transition:
        """A transition of a `Batch` with the whole latents, of which each context-parallel process keeps a part."""
        gather = partial(self.world.whole, shape=self._latent_shape)
        (whole,) = changed([stored], lambda tensor: tensor if tensor.dim() == 1 else gather(tensor))
        return whole

    @property
    def _latent_shape(self) -> tuple[int, ...]:
        return self.adapter.latent_shape(self.config.rollout)
