"""Endpoint objectives: noise the final latents with the group's (ε, t), predict the velocity, compare errors.

    x_t = (1 − t)·x0 + t·ε    u = ε − x0    d = mean_D ‖v(x_t, t) − u‖²

A draw is a function of (seed, group, draw number), so it is the same for all members of a group, for any batch split
and any number of processes. Draw k of K takes its t from the k-th of K equally likely parts of the distribution.

A group loss needs d of all members. If batches hold whole groups (rollout.batch_size is a multiple of group_size), one
pass suffices. Otherwise a first pass without gradient computes d and from it ∂loss/∂d, and a second pass backpropagates
this slope, which gives the exact gradient at the cost of one more forward per sample and draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from prefgrpo.config.schema import Config
from prefgrpo.models.base import Adapter
from prefgrpo.objectives.base import (
    EndpointObjective,
    GroupObjective,
    PointwiseObjective,
    Prediction,
    Targets,
    mean_square,
)
from prefgrpo.rollout.batch import Batch
from prefgrpo.sde.noise import endpoint_noise, endpoint_normal

EDGE = 1e-3
"""Minimum distance of t from 0 and 1 for the distributions uniform and logit_normal."""
Weights = Callable[[], AbstractContextManager[None]]
"""Context in which the model has other weights."""


@dataclass(frozen=True)
class EndpointCollector:
    """Accumulates the gradients of an endpoint objective."""

    adapter: Adapter
    objective: EndpointObjective
    config: Config
    anchor: Weights
    """Swaps in the weights of `objective.anchor`."""
    reference: Weights
    """Swaps in the reference policy's weights, for train.kl_coef."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of every forward: d, the anchor's d, mean_D ‖v − v_anchor‖² and mean_D ‖v − v_reference‖²."""
        beside = ("anchor_error", "drift") if self.objective.anchor else ()
        return ("error", *beside, *(("kl",) if self.config.train.kl_coef else ()))

    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """Accumulate gradients of this rank's batches; returns one row [update, samples, loss, *metrics] per forward.

        samples: number in the whole update, over all ranks (`Objective.samples_per_group` per group).
        """
        objective, train, table = self.objective, self.config.train, list[Tensor]()
        for draw in range(objective.draws):
            slopes = {}
            if isinstance(objective, GroupObjective) and not self._whole:
                slopes = self._slopes(objective, batches, draw, targets)
            for batch in batches:
                p = self.predict(batch, draw)
                if batch.padding:
                    loss = 0.0 * p.error.sum()
                elif isinstance(objective, PointwiseObjective):
                    signal = batch.of_samples(objective.signal(train, targets))
                    loss = _sum(objective.loss(train, p, signal), len(batch.places))
                elif slopes:
                    rows = [slopes[place] for place in batch.places]
                    slope, value = torch.stack(rows).unbind(1)
                    loss = (slope * p.error).sum()
                    loss = loss + (value.sum() - loss.detach())  # so that the reported value is the loss
                else:
                    assert isinstance(objective, GroupObjective)
                    loss = self._group_loss(objective, batch, p.error, p, targets)
                facts = [p.error] if p.anchor is None else [p.error, p.anchor_error, mean_square(p.v - p.anchor)]
                if p.start is not None:
                    kl = mean_square(p.v - p.start)
                    loss, facts = loss + train.kl_coef * kl.sum(), [*facts, kl]
                loss = loss / (samples * objective.draws)
                (loss * batch.factor).backward()
                if not batch.padding:
                    table.append(batch.row(loss, torch.stack([fact.detach().mean() for fact in facts])))
        return table

    def predict(self, batch: Batch, draw: int) -> Prediction:
        """The velocities of a batch, the policy's with gradient if grad mode is on.

        The policy's forward comes last, because weights may only be swapped while no autograd graph refers to them.
        """
        anchor = self._velocity_with(self.anchor, batch, draw) if self.objective.anchor else None
        start = self._velocity_with(self.reference, batch, draw) if self.config.train.kl_coef else None
        u, v, t = self._velocity(batch, draw)
        return Prediction(t, v, u, anchor, start)

    # ---- groups -----------------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> bool:
        """Whether every batch consists of whole groups; the same on all ranks."""
        r = self.config.rollout
        return r.batch_size % r.group_size == 0

    def _group_loss(
        self, objective: GroupObjective, batch: Batch, error: Tensor, p: Prediction, targets: Targets
    ) -> Tensor:
        """Summed loss of a batch of whole groups, each group's loss times its number of members."""
        size = self.config.rollout.group_size
        slots = batch.slots[::size]
        if batch.slots != [p for p in slots for _ in range(size)] or batch.members != list(range(size)) * len(slots):
            raise RuntimeError(f"expected a batch of whole groups of {size}, got members {batch.members}")
        own = targets.select(slots)
        losses = objective.loss(self.config.train, error.view(-1, size), p.anchor_error.view(-1, size), own)
        return _sum(losses, len(slots)) * size

    def _slopes(
        self, objective: GroupObjective, batches: Sequence[Batch], draw: int, targets: Targets
    ) -> dict[tuple[int, int], Tensor]:
        """(slot, member) → [2]: ∂loss/∂d, and an equal share of the group's loss."""
        errors: dict[tuple[int, int], Tensor] = {}
        for batch in batches:
            with torch.no_grad():
                p = self.predict(batch, draw)
            both = torch.stack([p.error, p.anchor_error], 1)
            if not batch.padding:
                errors |= dict(zip(batch.places, both, strict=True))
        size, slots = self.config.rollout.group_size, sorted({slot for slot, _ in errors})
        out: dict[tuple[int, int], Tensor] = {}
        for slot in slots:
            error, beside = torch.stack([errors[slot, g] for g in range(size)]).unbind(1)
            error = error[None].requires_grad_()
            with torch.enable_grad():
                loss = _sum(objective.loss(self.config.train, error, beside[None], targets.select([slot])), 1) * size
                (slope,) = torch.autograd.grad(loss, error)
            parts = torch.stack([slope[0], (loss.detach() / size).expand(size)], 1)
            out |= {(slot, g): parts[g] for g in range(size)}
        return out

    # ---- one draw ---------------------------------------------------------------------------------------------------

    def _velocity_with(self, weights: Weights, batch: Batch, draw: int) -> Tensor:
        """[B, …] velocity with other weights, without gradient."""
        with torch.no_grad(), weights():
            return self._velocity(batch, draw)[1]

    def _velocity(self, batch: Batch, draw: int) -> tuple[Tensor, Tensor, Tensor]:
        """(u [B, …], v [B, …], t [B]) of a batch in one draw."""
        x0 = batch.latents.float()
        groups = batch.ids // self.config.rollout.group_size
        noise = endpoint_noise(self.config.seed, groups, draw, tuple(x0.shape[1:]))
        t, shown = self.times(batch, torch.tensor(batch.groups), draw)
        on_device = t.to(x0.device, non_blocking=True)
        mix = on_device.view(-1, *[1] * (x0.dim() - 1))
        x = (1.0 - mix) * x0 + mix * noise
        return noise - x0, self.adapter.velocity(x, shown, batch.condition, batch.sizes), on_device

    def times(self, batch: Batch, groups: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """(t, the σ passed to the model), both fp32 [B] on the CPU; groups: int64 [B], step · P + slot.

        If a family has several denoisers, all samples of a training step share t, so that a batch needs only one.
        """
        o, schedule = self.objective, batch.schedule
        address = groups if len(self.adapter.denoisers) == 1 else groups // self.config.rollout.prompts_per_step
        z = endpoint_normal(self.config.seed, address, draw)
        u = ((draw + torch.special.ndtr(z)) / o.draws).clamp(0.0, 1.0)
        if o.times == "uniform":
            t = u.clamp(EDGE, 1.0 - EDGE).float()
            return t, t
        if o.times == "logit_normal":
            t = torch.special.ndtri(u.clamp(1e-9, 1.0 - 1e-9)).sigmoid().clamp(EDGE, 1.0 - EDGE).float()
            return t, t
        every = [k for k in range(schedule.steps) if self.adapter.trains(float(schedule.times[k]))]
        steps = torch.tensor(schedule.trained if o.times == "window" else every)
        k = steps[(u * len(steps)).long().clamp(max=len(steps) - 1)]
        return schedule.sigmas[k], schedule.times[k]


def _sum(losses: Tensor, count: int) -> Tensor:
    """The sum of `count` losses. Raises ValueError if an objective returns another number of them."""
    if losses.shape != (count,):
        raise ValueError(
            f"train.objective: expected one loss for each of {count} samples (groups, if it compares their members), "
            f"shape [{count}], got shape {list(losses.shape)}"
        )
    return losses.sum()
