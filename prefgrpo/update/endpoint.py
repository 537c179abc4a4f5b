"""Endpoint objectives: noise the final latents with the group's (ε, t), predict the velocity, compare errors.

    x_t = (1 − t)·x0 + t·ε    u = ε − x0    d = mean_D ‖v(x_t, t) − u‖²

A draw is a function of (seed, group, draw number), so it is the same for all members of a group, for any batch split
and any number of processes. Draw k of K takes its t from the k-th of K equally likely parts of the distribution.

A group loss needs d of all members: ∂loss/∂d is computed first and then backpropagated, which gives the exact gradient.
If batches hold whole groups (rollout.batch_size is group_size), one forward gives both; otherwise a pass without
gradient computes d first, on all processes that have members of a group, which costs one more forward per sample and
draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefgrpo.objectives.base import (
    EndpointObjective,
    GroupObjective,
    PointwiseObjective,
    Prediction,
    Targets,
    mean_square,
    ranked,
)
from prefgrpo.rollout.batch import Batch
from prefgrpo.sde.noise import endpoint_noise, endpoint_normal
from prefgrpo.update.gradients import Gradients, WeightsContext

EDGE = 1e-3
"""Minimum distance of t from 0 and 1 for the distributions uniform and logit_normal."""
RANKS = ("right", "pairs", "margin")
"""Metrics of a group objective on pairs from files, per group (`ranked`)."""


@dataclass(frozen=True)
class EndpointGradients(Gradients):
    """Gradients of an endpoint objective, one draw per forward."""

    objective: EndpointObjective
    old: WeightsContext = field(kw_only=True)
    """Context in which the model has the old policy's weights."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """d; that of the policy that the objective compares with, and mean_D ‖v − v_compared‖²; mean_D ‖v −
        v_reference‖²; RANKS."""
        beside = ("anchor_error", "drift") if self.objective.compares_with else ()
        ranks = RANKS if isinstance(self.objective, GroupObjective) and self.config.data.pairs else ()
        return ("error", *beside, *(("kl",) if self.config.train.kl_coef else ()), *ranks)

    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """As in `Gradients`."""
        objective = self.objective
        train = self.config.train
        table = list[Tensor]()
        left = objective.draws * len(batches)
        for draw in range(objective.draws):
            slopes = None
            if isinstance(objective, GroupObjective) and not self._batches_are_groups:
                with torch.no_grad():
                    errors = [_errors(self.predict(batch, draw)) for batch in batches]
                slopes = self._slopes(objective, batches, errors, targets)
            for batch in batches:
                p = self.predict(batch, draw)
                value = None
                ranks = list[Tensor]()
                if batch.padding:
                    loss = p.error.sum()
                elif isinstance(objective, PointwiseObjective):
                    signal = batch.of_samples(objective.signal(train, targets))
                    losses = _counted(objective.loss(train, p, signal), len(batch.places))
                    if targets.weight is not None:
                        weights = targets.weight[:, None].expand_as(targets.advantage)
                        losses = losses * batch.of_samples(weights)
                    loss = losses.sum()
                else:
                    assert isinstance(objective, GroupObjective)
                    known = slopes or self._slopes(objective, [batch], [_errors(p)], targets)
                    slope, value, *ranks = (batch.of_samples(table) for table in known)
                    loss = (slope * p.error).sum()
                facts = [p.error]
                if p.compared is not None:
                    facts += [p.compared_error, mean_square(p.v - p.compared)]
                shown = loss if value is None else value.sum()
                if p.v_reference is not None:
                    kl = mean_square(p.v - p.v_reference)
                    penalty = train.kl_coef * kl.sum()
                    loss = loss + penalty
                    shown = shown + penalty
                    facts.append(kl)
                facts += ranks
                count = samples * objective.draws
                metrics = torch.stack([fact.mean() for fact in facts])
                left -= 1
                table += self.backward(batch, loss / count, metrics, last=left == 0, shown=shown / count)
        return table

    def predict(self, batch: Batch, draw: int) -> Prediction:
        """The velocities of a batch, the policy's with gradient if grad mode is on.

        The policy's forward comes last, because weights may only be swapped while no autograd graph refers to them.
        """
        t, x, sigma, u = self.noised(batch, draw)

        def velocity(weights: WeightsContext) -> Tensor:
            with torch.no_grad(), weights():
                return self.adapter.velocity(x, sigma, batch.condition, batch.sampling)

        compares_with = self.objective.compares_with
        compared = velocity(self.old if compares_with == "old" else self.reference) if compares_with else None
        v_reference = None
        if self.config.train.kl_coef:
            v_reference = compared if compares_with == "reference" else velocity(self.reference)
        v = self.adapter.velocity(x, sigma, batch.condition, batch.sampling)
        return Prediction(t, v, u, compared, v_reference)

    def error(self, batch: Batch, draw: int) -> Tensor:
        """[B] d of the current weights."""
        _, x, sigma, u = self.noised(batch, draw)
        return mean_square(self.adapter.velocity(x, sigma, batch.condition, batch.sampling) - u)

    def noised(self, batch: Batch, draw: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(t fp32 [B], x_t [B, …], the σ passed to the model fp32 [B] on the CPU, u [B, …])."""
        x0 = self.world.whole(batch.latents, self.adapter.latent_shape(batch.sampling)).float()
        groups = batch.ids // self.config.rollout.group_size
        noise = endpoint_noise(self.config.seed, groups, draw, tuple(x0.shape[1:]))
        t, sigma = self.times(batch, torch.tensor(batch.groups), draw)
        t = t.to(x0.device, non_blocking=True)
        mix = t.view(-1, *[1] * (x0.dim() - 1))
        return t, (1.0 - mix) * x0 + mix * noise, sigma, noise - x0

    @property
    def _batches_are_groups(self) -> bool:
        """Whether every batch consists of whole groups; the same on all ranks."""
        r = self.config.rollout
        return r.batch_size == r.group_size

    def _slopes(
        self, objective: GroupObjective, batches: Sequence[Batch], errors: Sequence[Tensor], targets: Targets
    ) -> tuple[Tensor, ...]:
        """∂loss/∂d [P, G], an equal share [P, G] of each group's loss, and with pairs from files RANKS [P, G], the same
        for all members, from the `_errors` of batches; unless these hold whole groups, all ranks call this together.
        Groups that are not in the batches have arbitrary values."""
        groups, size = targets.advantage.shape
        table = targets.advantage.new_zeros(groups * size, 2)
        for batch, rows in zip(batches, errors, strict=True):
            if not batch.padding:
                table.index_copy_(0, batch.rows(size).to(table.device, non_blocking=True), rows)
        if not self._batches_are_groups:
            self.world.maximum_(table)  # over errors, and 0 on the ranks that do not have the sample
        error, reference_error = table.view(groups, size, 2).unbind(2)
        error = error.clone().requires_grad_()
        with torch.enable_grad():
            losses = objective.loss(self.config.train, error, reference_error, targets)
            losses = _counted(losses, groups)
            if targets.weight is not None:
                losses = losses * targets.weight
            (slope,) = torch.autograd.grad(losses.sum() * size, error)
        ranks = ranked(error.detach(), reference_error, targets) if self.config.data.pairs else ()
        of_groups = [losses.detach(), *ranks]
        return slope, *(of_group[:, None].expand(-1, size) for of_group in of_groups)

    def times(self, batch: Batch, groups: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """(t, the σ passed to the model), both fp32 [B] on the CPU; groups: int64 [B], step · P + slot.

        If a family has several denoisers, all samples of a training step share t, so that a batch needs only one.
        """
        o = self.objective
        schedule = batch.schedule
        address = groups if len(self.adapter.denoisers) == 1 else groups // self.config.rollout.prompts_per_step
        z = endpoint_normal(self.config.seed, address, draw)
        u = ((draw + torch.special.ndtr(z)) / o.draws).clamp(0.0, 1.0)
        if o.times == "uniform":
            t = u.clamp(EDGE, 1.0 - EDGE).float()
            return t, t
        if o.times == "logit_normal":
            t = torch.special.ndtri(u.clamp(1e-9, 1.0 - 1e-9)).sigmoid().clamp(EDGE, 1.0 - EDGE).float()
            return t, t
        steps = torch.tensor(schedule.trained if o.times == "window" else range(schedule.steps))
        k = steps[(u * len(steps)).long().clamp(max=len(steps) - 1)]
        return schedule.sigmas[k], schedule.times[k]


def _errors(p: Prediction) -> Tensor:
    """[B, 2] d of the policy and of the one it is compared with, without gradient."""
    return torch.stack([p.error.detach(), p.compared_error], 1)


def _counted(losses: Tensor, count: int) -> Tensor:
    """The `count` losses. Raises ValueError if an objective returns another number of them."""
    if losses.shape != (count,):
        raise ValueError(
            f"train.objective: expected one loss for each of {count} samples (groups, if it compares their members), "
            f"shape [{count}], got shape {list(losses.shape)}"
        )
    return losses
