"""The rollout of one training step: generates this process's batches, and selects from them what the update trains on.

Samples are sent to the data-parallel index that scores their group while the next batch is generated. Every process
trains on the batches that it generated, without the groups that carry no signal. Invariant: a sample depends on
(weights, prompt, seed, step, slot, member) and the other prompts of its batch only, not on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.assignment import BatchPlan, Place, Slots, assign_batches, slot_prompts
from prefgrpo.rollout.embeddings import Embeddings, conditions
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.render import Images, decode, sample, to_uint8
from prefgrpo.rollout.rollout import Trajectory, rollout
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.sde.schedule import Schedule


@dataclass
class Batch:
    """One rollout batch of this process, kept until the update."""

    number: int
    """Index among the step's batches."""
    update: int
    """Index of the optimiser update that it belongs to, within the step."""
    slots: list[int]
    """Slot p (0 … P − 1) of each sample's prompt."""
    members: list[int]
    """Index g (0 … G − 1) of each sample in its group."""
    groups: list[int]
    """Run-wide number, step · P + slot, of each sample's group; on the host, as all that shapes depend on."""
    sizes: SamplingConfig
    schedule: Schedule
    condition: Condition
    trajectory: Trajectory
    weight: float = 1.0
    """0: a padding batch, run only so that every process runs the same number of forwards (`World.equal_forwards`)."""

    def select(self, keep: NDArray[np.bool_]) -> Batch:
        """The batch reduced to the samples in `keep` [P, G]; the batch itself if it keeps all."""
        kept = np.flatnonzero(keep[self.slots, self.members])
        if len(kept) == len(self.slots):
            return self
        rows = torch.from_numpy(kept).to(self.trajectory.sample.device, non_blocking=True)
        return replace(
            self,
            slots=[self.slots[k] for k in kept],
            members=[self.members[k] for k in kept],
            groups=[self.groups[k] for k in kept],
            condition=self.condition.select(rows),
            trajectory=self.trajectory.select(rows),
        )

    def own(self, table: Tensor) -> Tensor:
        """The entries [B] of a table [P, G] that belong to the batch's samples, without waiting for the device."""
        size = table.shape[1]
        places = torch.tensor([p * size + g for p, g in zip(self.slots, self.members, strict=True)])
        return table.flatten().index_select(0, places.to(table.device, non_blocking=True))


def row(batch: Batch, loss: Tensor, metrics: Tensor) -> Tensor:
    """One row [update, samples, loss, *metrics] of a table; it stays on the device, which is not waited for."""
    facts = [metrics.new_full((1,), fact) for fact in (batch.update, len(batch.slots))]
    return torch.cat([*facts, loss.detach()[None], metrics])


@dataclass(frozen=True)
class Rollouts:
    """This process's rollouts: `for batch in rollouts(step, add)` generates its share of a training step."""

    config: Config
    adapter: Adapter
    embeddings: Embeddings
    schedules: Schedules
    prompts: Sequence[Prompt]
    world: World
    whole_groups: bool = False
    """Whether the objective needs all samples of a group on one data-parallel index."""
    keep_graph: bool = False
    """Keep the autograd graphs of the first update's trained steps, so that these need no second forward."""

    def groups(self, step: int) -> list[int]:
        """Run-wide numbers, step · P + slot, of the groups that this data-parallel index scores."""
        size = self.config.rollout.prompts_per_step
        return [step * size + p for p in self.world.slots(size)]

    def count(self, step: int) -> int:
        """Number of samples that this index generates in a step."""
        return sum(len(b.places) for b in self._plan(step)[1] if b.index == self.world.dp_index)

    def __call__(self, step: int, add: Callable[[int, int, Sample], object]) -> Iterator[Batch]:
        """Encode the texts of all batches, then denoise and decode one batch at a time.

        add: called with (group, member, sample) for every sample of `groups(step)` as soon as it is available; samples
        received from other processes are added from another thread. All have been added when the iteration ends.
        """
        slots, planned = self._plan(step)
        index, first = self.world.dp_index, step * self.config.rollout.prompts_per_step

        def take(place: Place, pixels: Images) -> None:
            p, g = place
            add(first + p, g, sample(slots[p][0], pixels, slots[p][1]))

        def shape(batch: BatchPlan) -> tuple[int, ...]:
            sizes = slots[batch.places[0][0]][1]
            frames = self.adapter.frames(sizes) or 1
            return (*(frames,) * (frames > 1), sizes.height, sizes.width, 3)

        mine = [b for b in planned if b.index == index]
        most = max(Counter(b.index for b in planned).values()) if self.world.equal_forwards else 0
        fill = [planned[-1]] * (most - len(mine))
        with self.adapter.offload.keep_on_device():
            texts = [self._condition(slots, b) for b in mine + fill]
        with media_exchange(self.world, planned, shape, take) as put:
            for number, (b, condition) in enumerate(zip(mine + fill, texts, strict=True)):
                sizes = slots[b.places[0][0]][1]
                batch = self._generate(step, b, condition, sizes)
                at_once = self.config.memory.decode_batch
                media = to_uint8(decode(self.adapter, batch.trajectory.latents, sizes, at_once, self.world))
                if number < len(mine):
                    put(b, media)
                else:
                    batch.weight = 0.0
                yield batch

    def training_batches(self, step: int, batches: Sequence[Batch], keep: NDArray[np.bool_]) -> list[Batch]:
        """The batches that this index trains on: those that it made, reduced to the samples in `keep` [P, G].

        batches: from `__call__`. They are not moved, split or merged: one that keeps all its samples keeps its shape,
        and dropped samples only make an index's share smaller.
        """
        own = [batch.select(keep) for batch in batches if batch.weight and keep[batch.slots, batch.members].any()]
        if not self.world.equal_forwards:
            # An index with nothing left in an update runs no forward; `World.sum_gradients` takes its gradient as 0.
            return own
        # With sharded weights, every forward and backward is a collective of all processes, so an index with fewer
        # batches in an update than another repeats one of its own with weight 0.
        counts: dict[int, Counter[int]] = {}
        for planned in self._plan(step)[1]:
            if any(keep[place] for place in planned.places):
                counts.setdefault(planned.update, Counter())[planned.index] += 1
        for update, held in counts.items():
            missing = max(held.values()) - held[self.world.dp_index]
            own += [replace(batches[-1], update=update, weight=0.0)] * missing
        return own

    def _plan(self, step: int) -> tuple[Slots, list[BatchPlan]]:
        slots = slot_prompts(self.config, self.prompts, step)
        return slots, assign_batches(self.config, [sizes for _, sizes in slots], self.world.dp_size, self.whole_groups)

    def _condition(self, slots: Slots, b: BatchPlan) -> Condition:
        return conditions(
            self.embeddings, [slots[p][0] for p, _ in b.places], slots[b.places[0][0]][1], self.world.device
        )

    def _generate(self, step: int, b: BatchPlan, condition: Condition, sizes: SamplingConfig) -> Batch:
        """Generate a batch with the current policy."""
        schedule = self.schedules.step(sizes, step)
        ids = self._ids(step, b)
        done = rollout(
            self.adapter,
            schedule,
            condition,
            ids,
            sizes,
            seed=self.config.seed,
            initial_sample=self._group_starts(step, b) if self.config.rollout.same_noise else None,
            keep_velocity=self.schedules.goal.keeps_velocity,
            keep_graph=self.keep_graph and b.update == 0,
        )
        slots = [p for p, _ in b.places]
        members = [g for _, g in b.places]
        groups = [step * self.config.rollout.prompts_per_step + p for p in slots]
        return Batch(b.number, b.update, slots, members, groups, sizes, schedule, condition, done)

    def _group_starts(self, step: int, b: BatchPlan) -> list[int]:
        """The id of the first sample of each sample's group."""
        r = self.config.rollout
        return [(step * r.prompts_per_step + p) * r.group_size for p, _ in b.places]

    def _ids(self, step: int, b: BatchPlan) -> Tensor:
        """The ids of the samples, which determine their noise: int64 [B] on the device."""
        starts = self._group_starts(step, b)
        ids = [start + g for start, (_, g) in zip(starts, b.places, strict=True)]
        return torch.tensor(ids).to(self.world.device, non_blocking=True)
