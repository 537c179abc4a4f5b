"""A batch of samples, from its plan to the update."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.models.base import Condition
from prefgrpo.rollout.rollout import Step
from prefgrpo.sde.schedule import Schedule

Place = tuple[int, int]
"""(slot 0 … P − 1 of a prompt in the step, member 0 … G − 1 of its group)."""


@dataclass(frozen=True)
class BatchPlan:
    """The plan of one batch of a step, which every process derives."""

    number: int
    """Counts the step's batches."""
    update: int
    """The optimiser update, within the step, that trains on it."""
    places: tuple[Place, ...]
    """Of its B samples."""
    dp_rank: int
    """The data-parallel share that generates and trains it."""

    @property
    def slots(self) -> list[int]:
        """[B] slots of the samples' prompts."""
        return [slot for slot, _ in self.places]

    @property
    def members(self) -> list[int]:
        """[B] members that the samples are of their groups."""
        return [member for _, member in self.places]


@dataclass(frozen=True, eq=False)
class Batch(BatchPlan):
    """A plan carried out, on the process that did it and trains on it: B samples of one size.

    All that shapes and decisions depend on is on the host: places, groups, sizes, the schedule's σ.
    """

    groups: tuple[int, ...]
    """[B] run-wide numbers, step · P + slot, of the samples' groups."""
    sizes: SamplingConfig
    schedule: Schedule
    condition: Condition
    """[B, …]."""
    ids: Tensor
    """int64 [B], run-wide numbers of the samples, which determine their noise."""
    latents: Tensor
    """[B, …] final latents, input of the adapter's `decode`."""
    steps: tuple[Step, ...] = ()
    """The stored steps, by ascending number; empty if the objective needs only final latents."""
    padding: bool = False
    """Run only so that every process runs the same number of forwards (`World.equal_forwards`); its loss counts 0."""

    @classmethod
    def of(cls, plan: BatchPlan, **done: object) -> Batch:
        """The plan with what carrying it out added."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(BatchPlan)}, **done)  # type: ignore[arg-type]

    @property
    def factor(self) -> float:
        """Factor of the loss."""
        return 0.0 if self.padding else 1.0

    def select(self, mask: NDArray[np.bool_]) -> Batch:
        """The batch reduced to the samples in `mask` [P, G]; the batch itself if it has all."""
        kept = np.flatnonzero(mask[self.slots, self.members])
        if len(kept) == len(self.places):
            return self
        rows = torch.from_numpy(kept).to(self.ids.device, non_blocking=True)
        return replace(
            self,
            places=tuple(self.places[k] for k in kept),
            groups=tuple(self.groups[k] for k in kept),
            condition=self.condition.select(rows),
            ids=self.ids.index_select(0, rows),
            latents=self.latents.index_select(0, rows),
            steps=tuple(step.select(rows) for step in self.steps),
        )

    def of_samples(self, table: Tensor) -> Tensor:
        """The entries [B] of a table [P, G] that belong to the batch's samples, without waiting for the device."""
        size = table.shape[1]
        rows = torch.tensor([slot * size + member for slot, member in self.places])
        return table.flatten().index_select(0, rows.to(table.device, non_blocking=True))

    def row(self, loss: Tensor, metrics: Tensor) -> Tensor:
        """One row [update, samples, loss, *metrics] of a table; it stays on the device, which is not waited for."""
        facts = [metrics.new_full((1,), fact) for fact in (self.update, len(self.places))]
        return torch.cat([*facts, loss.detach()[None], metrics])
