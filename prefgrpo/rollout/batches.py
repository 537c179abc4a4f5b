"""The batches of one training step: a rollout generates this process's share, and the update trains on a part of it.

`Batches` is what the loop needs; `stored_groups` takes samples from files instead. Those of a rollout are sent to the
data-parallel rank that scores their group while the next batch is generated. Every process trains on the batches that
it generated, without the groups that carry no signal. Invariant: a sample depends on (weights, prompt, seed, step,
slot, member) only, not on the number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo.config.schema import Config
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import Condition, collate
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.batch import Batch, BatchPlan, Place, assign_batches
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.render import Decoder, Images, sample
from prefgrpo.rollout.rollout import changed, rollout
from prefgrpo.rollout.sampling import Schedules


class Batches(ABC):
    """This process's batches: `for batch in batches(step, add)` yields its share of a training step."""

    config: Config
    world: World

    @abstractmethod
    def groups(self, step: int) -> list[int]:
        """Run-wide numbers, step · P + slot, of the groups that this data-parallel rank scores."""

    @abstractmethod
    def prompts_of(self, step: int) -> list[Prompt]:
        """The prompt of every slot of a step."""

    @abstractmethod
    def __call__(
        self, step: int, add: Callable[[int, int, Sample], object], between: Callable[[], object] = lambda: None
    ) -> Iterator[Batch]:
        """Encode what all batches need, then make one batch at a time.

        add: called with (group, member, sample) for every sample of `groups(step)` as soon as it is available; samples
        received from other processes are added from another thread. All have been added when the iteration ends.
        between: called after every batch, on all processes equally often; what it raises ends the iteration.
        """

    def count(self, step: int) -> int:
        """Number of samples in this rank's batches of a step."""
        return sum(len(plan.places) for plan in self._planned() if plan.dp_rank == self.world.dp_index)

    def _planned(self) -> list[BatchPlan]:
        """The batches of a step, on all processes."""
        return assign_batches(self.config, self.world.dp_size)

    def _todo(self) -> tuple[list[BatchPlan], int, int]:
        """(plans that this process carries out, how many of them it trains on, most plans of a process); with sharded
        weights all processes carry out equally many, the last ones as padding."""
        planned = self._planned()
        mine = [plan for plan in planned if plan.dp_rank == self.world.dp_index]
        rounds = max(Counter(plan.dp_rank for plan in planned).values())
        padding = rounds - len(mine) if self.world.equal_forwards else 0
        return mine + [planned[-1]] * padding, len(mine), rounds

    def training_batches(self, batches: Sequence[Batch], mask: NDArray[np.bool_]) -> list[Batch]:
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
        for plan in self._planned():
            if any(mask[place] for place in plan.places):
                counts.setdefault(plan.update, Counter())[plan.dp_rank] += 1
        for update, of_rank in counts.items():
            lacking = max(of_rank.values()) - of_rank[self.world.dp_index]
            reduced += [replace(batches[-1], update=update, padding=True)] * lacking
        return reduced

    def _kept(self, batch: Batch) -> Batch:
        """A batch as it is stored until the update: of latents and velocities, a context-parallel process keeps its
        part."""
        steps = changed(batch.steps, lambda tensor: tensor if tensor.dim() == 1 else self.world.slice_of(tensor))
        return replace(batch, latents=self.world.slice_of(batch.latents), steps=steps)


@dataclass(frozen=True)
class Rollouts(Batches):
    """Batches that the policy generates."""

    config: Config
    adapter: Adapter
    embeddings: Embeddings
    schedules: Schedules
    prompts: Sequence[Prompt]
    world: World

    def groups(self, step: int) -> list[int]:
        """As in `Batches`; every rank scores its slots."""
        size = self.config.rollout.prompts_per_step
        return [step * size + p for p in self.world.slots(size)]

    def prompts_of(self, step: int) -> list[Prompt]:
        """As in `Batches`."""
        chosen = step_prompts(len(self.prompts), self.config.rollout.prompts_per_step, self.config.seed, step)
        return [self.prompts[i] for i in chosen]

    def __call__(
        self, step: int, add: Callable[[int, int, Sample], object], between: Callable[[], object] = lambda: None
    ) -> Iterator[Batch]:
        """As in `Batches`: encode the texts of all batches, then denoise and decode one batch at a time."""
        prompts = self.prompts_of(step)
        first = step * self.config.rollout.prompts_per_step
        rate = self.adapter.frame_rate

        def take(place: Place, pixels: Images) -> None:
            slot, member = place
            add(first + slot, member, sample(prompts[slot], Media(pixels, rate), self.config.rollout))

        todo, mine, rounds = self._todo()
        slots = list(dict.fromkeys(slot for plan in todo for slot in plan.slots))
        encoded = self.embeddings(self.adapter, [prompts[slot] for slot in slots], self.config.rollout)
        condition_of = dict(zip(slots, encoded, strict=True))
        decoder = Decoder[Place](self.adapter, self.config.rollout, self.world)
        with media_exchange(self.world, self._planned(), self._media_shape(), take) as put:
            for number, plan in enumerate(todo):
                condition = collate([condition_of[slot] for slot in plan.slots], self.world.device)
                batch = self._generate(step, plan, condition, padding=number >= mine)
                if not batch.padding:
                    for place, pixels in decoder.add(plan.places, batch.latents):
                        put(place, pixels)
                yield self._kept(batch)
                between()
            for _ in range(rounds - len(todo)):
                between()
            for place, pixels in decoder.rest():
                put(place, pixels)

    def _media_shape(self) -> tuple[int, ...]:
        """Of a sample's pixels: [H, W, 3], or [F, H, W, 3]."""
        r = self.config.rollout
        frames = self.adapter.frames(r) or 1
        return (r.height, r.width, 3) if frames == 1 else (frames, r.height, r.width, 3)

    def _generate(self, step: int, plan: BatchPlan, condition: Condition, padding: bool) -> Batch:
        """Generate a batch with the current policy."""
        r = self.config.rollout
        schedule = self.schedules.step(step)
        groups = tuple(step * r.prompts_per_step + slot for slot in plan.slots)
        starts = [group * r.group_size for group in groups]  # the ids of the groups' first samples
        numbers = [start + member for start, member in zip(starts, plan.members, strict=True)]
        ids = torch.tensor(numbers).to(self.world.device, non_blocking=True)
        latents, steps = rollout(
            self.adapter,
            schedule,
            condition,
            ids,
            r,
            seed=self.config.seed,
            initial_sample=starts if r.same_noise else None,
            keep_velocity=self.schedules.goal.keeps_velocity,
        )
        return Batch(
            **vars(plan),
            groups=groups,
            schedule=schedule,
            condition=condition,
            ids=ids,
            latents=latents,
            sampling=r,
            steps=steps,
            padding=padding,
        )
