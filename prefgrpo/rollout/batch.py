"""A batch of samples, as it is stored from the rollout to the update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.models.base import Condition
from prefgrpo.parallel.world import World
from prefgrpo.rollout.assignment import BatchPlan
from prefgrpo.rollout.rollout import Transition, changed
from prefgrpo.sde.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Batch(BatchPlan):
    """B samples, on the process that generated them and will train on them.

    Everything that shapes and decisions depend on is on the host: places, groups, the schedule's σ.
    """

    groups: tuple[int, ...]
    """[B] run-wide numbers, step · P + slot, of the samples' groups."""
    schedule: Schedule
    condition: Condition
    """[B, …]."""
    ids: Tensor
    """int64 [B], run-wide numbers of the samples, which determine their noise."""
    latents: Tensor
    """[B, …] final latents, of which a context-parallel process keeps its part (`World.slice_of`)."""
    sampling: SamplingConfig
    """Size of the samples, and the guidance of the forwards that train on them."""
    transitions: tuple[Transition, ...] = ()
    """The transitions to train on, by ascending k, with latents and velocities likewise in parts; empty if the
    objective needs only final latents."""
    padding: bool = False
    """Run only so that every process runs the same number of forwards (`World.equal_forwards`); its loss counts 0."""

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
            transitions=changed(self.transitions, lambda tensor: tensor.index_select(0, rows)),
        )

    def of_samples(self, table: Tensor) -> Tensor:
        """The entries [B] of a table [P, G] that belong to the batch's samples, without waiting for the device."""
        rows = self.rows(table.shape[1]).to(table.device, non_blocking=True)
        return table.flatten().index_select(0, rows)

    def rows(self, group_size: int) -> Tensor:
        """int64 [B], the samples' rows p·G + g of a table of a step, on the CPU."""
        return torch.tensor([slot * group_size + member for slot, member in self.places])

    def kept(self, world: World) -> Batch:
        """The batch as it is kept until the update: of latents and velocities, a context-parallel process keeps its
        part."""
        parts = changed(self.transitions, lambda tensor: tensor if tensor.dim() == 1 else world.slice_of(tensor))
        return replace(self, latents=world.slice_of(self.latents), transitions=parts)
