"""The rollout of one training step: generates this process's batches, and selects from them what the update trains on.

Samples are sent to the data-parallel rank that scores their group while the next batch is generated. Every process
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

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.assignment import Slots, assign_batches, slot_prompts
from prefgrpo.rollout.batch import Batch, BatchPlan, Place
from prefgrpo.rollout.embeddings import Embeddings, conditions
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.render import Images, decode, sample, to_uint8
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules


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
    """Whether the objective needs all samples of a group on one data-parallel rank."""
    keep_graph: bool = False
    """Keep the autograd graphs of the first update's trained steps, so that these need no second forward."""

    def groups(self, step: int) -> list[int]:
        """Run-wide numbers, step · P + slot, of the groups that this data-parallel rank scores."""
        size = self.config.rollout.prompts_per_step
        return [step * size + p for p in self.world.slots(size)]

    def count(self, step: int) -> int:
        """Number of samples that this rank generates in a step."""
        return sum(len(plan.places) for plan in self._plan(step)[1] if plan.dp_rank == self.world.dp_index)

    def __call__(self, step: int, add: Callable[[int, int, Sample], object]) -> Iterator[Batch]:
        """Encode the texts of all batches, then denoise and decode one batch at a time.

        add: called with (group, member, sample) for every sample of `groups(step)` as soon as it is available; samples
        received from other processes are added from another thread. All have been added when the iteration ends.
        """
        slots, planned = self._plan(step)
        rank = self.world.dp_index
        first = step * self.config.rollout.prompts_per_step

        def take(place: Place, pixels: Images) -> None:
            slot, member = place
            add(first + slot, member, sample(slots[slot][0], pixels, slots[slot][1]))

        def shape(plan: BatchPlan) -> tuple[int, ...]:
            sizes = slots[plan.slots[0]][1]
            frames = self.adapter.frames(sizes) or 1
            return (*(frames,) * (frames > 1), sizes.height, sizes.width, 3)

        mine = [plan for plan in planned if plan.dp_rank == rank]
        most = max(Counter(plan.dp_rank for plan in planned).values()) if self.world.equal_forwards else 0
        todo = mine + [planned[-1]] * (most - len(mine))
        with self.adapter.offload.keep_on_device():
            encoded = [self._condition(slots, plan) for plan in todo]
        with media_exchange(self.world, planned, shape, take) as put:
            for number, (plan, condition) in enumerate(zip(todo, encoded, strict=True)):
                sizes = slots[plan.slots[0]][1]
                batch = self._generate(step, plan, condition, sizes, padding=number >= len(mine))
                media = to_uint8(decode(self.adapter, batch.latents, sizes, self.world))
                if not batch.padding:
                    put(plan, media)
                yield batch

    def training_batches(self, step: int, batches: Sequence[Batch], mask: NDArray[np.bool_]) -> list[Batch]:
        """The batches that this rank trains on: those that it made, reduced to the samples in `mask` [P, G].

        batches: from `__call__`. They are not moved, split or merged: one that keeps all its samples keeps its shape,
        and dropped samples only make a rank's share smaller.
        """
        made = [batch for batch in batches if not batch.padding and mask[batch.slots, batch.members].any()]
        reduced = [batch.select(mask) for batch in made]
        if not self.world.equal_forwards:
            # A rank with nothing left in an update runs no forward; `World.sum_gradients` takes its gradient as 0.
            return reduced
        # With sharded weights, every forward and backward is a collective of all processes, so a rank with fewer
        # batches in an update than another repeats one of its own as padding.
        counts: dict[int, Counter[int]] = {}
        for plan in self._plan(step)[1]:
            if any(mask[place] for place in plan.places):
                counts.setdefault(plan.update, Counter())[plan.dp_rank] += 1
        for update, of_rank in counts.items():
            lacking = max(of_rank.values()) - of_rank[self.world.dp_index]
            reduced += [replace(batches[-1], update=update, padding=True)] * lacking
        return reduced

    def _plan(self, step: int) -> tuple[Slots, list[BatchPlan]]:
        slots = slot_prompts(self.config, self.prompts, step)
        sizes = [size for _, size in slots]
        sources = [len(prompt.source) for prompt, _ in slots]
        return slots, assign_batches(self.config, sizes, self.world.dp_size, self.whole_groups, sources)

    def _condition(self, slots: Slots, plan: BatchPlan) -> Condition:
        prompts = [slots[slot][0] for slot in plan.slots]
        return conditions(self.embeddings, prompts, slots[plan.slots[0]][1], self.world.device)

    def _generate(
        self, step: int, plan: BatchPlan, condition: Condition, sizes: SamplingConfig, padding: bool
    ) -> Batch:
        """Generate a batch with the current policy."""
        r = self.config.rollout
        schedule = self.schedules.step(sizes, step)
        groups = tuple(step * r.prompts_per_step + slot for slot in plan.slots)
        starts = [group * r.group_size for group in groups]  # the ids of the groups' first samples
        numbers = [start + member for start, member in zip(starts, plan.members, strict=True)]
        ids = torch.tensor(numbers).to(self.world.device, non_blocking=True)
        latents, steps = rollout(
            self.adapter,
            schedule,
            condition,
            ids,
            sizes,
            seed=self.config.seed,
            initial_sample=starts if r.same_noise else None,
            keep_velocity=self.schedules.goal.keeps_velocity,
            keep_graph=self.keep_graph and plan.update == 0,
        )
        done = {"groups": groups, "sizes": sizes, "schedule": schedule, "condition": condition, "padding": padding}
        return Batch.of(plan, ids=ids, latents=latents, steps=steps, **done)
