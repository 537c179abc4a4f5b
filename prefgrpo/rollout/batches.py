"""The rollout of one training step: which samples this rank makes, in which batches, and making them.

A batch holds samples of one size. The groups of an update are dealt out over the ranks in the order of their sizes, so
every rank gets its share of each. Invariant: a sample depends on (weights, prompt, seed, step, slot, member) alone, not
on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.embeddings import Embeddings, conditions
from prefgrpo.rollout.render import decode, sample, to_uint8
from prefgrpo.rollout.rollout import Trajectory, rollout
from prefgrpo.rollout.sampling import Schedules, of_prompt
from prefgrpo.sde.schedule import Schedule

Place = tuple[int, int]
"""(slot 0 … P − 1 of the prompt, member 0 … G − 1 of its group)."""


@dataclass
class Batch:
    """One rollout batch of this rank, kept until the update."""

    update: int
    """Which of the step's optimiser updates it belongs to."""
    slots: list[int]
    """Slot p (0 … P − 1) of each sample's prompt."""
    members: list[int]
    """Place g (0 … G − 1) of each sample in its group."""
    sizes: SamplingConfig
    schedule: Schedule
    condition: Condition
    trajectory: Trajectory
    groups: list[int]
    """Number of each sample's group in the run, step · P + slot."""
    samples: list[Sample]
    """The decoded media, as the rewards take them."""

    def select(self, rows: Sequence[int]) -> Batch:
        """The samples `rows`; all of them: the batch itself."""
        if len(rows) == len(self.slots):
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.trajectory.sample.device)
        return replace(
            self,
            slots=[self.slots[k] for k in rows],
            members=[self.members[k] for k in rows],
            condition=self.condition.select(index),
            trajectory=self.trajectory.select(index),
            groups=[self.groups[k] for k in rows],
            samples=[self.samples[k] for k in rows],
        )


def slot_prompts(config: Config, prompts: Sequence[Prompt], step: int) -> list[tuple[Prompt, SamplingConfig]]:
    """The prompt and the sizes of every slot of a step; within an update sorted by size, up and down in turn."""
    r, updates = config.rollout, config.train.updates_per_rollout
    chosen = [prompts[i] for i in step_prompts(len(prompts), r.prompts_per_step, config.seed, step)]
    sized = [(prompt, of_prompt(prompt, r, config.data.own_sizes)) for prompt in chosen]

    def order(p: int) -> tuple[int, int, int]:
        update, size = p * updates // r.prompts_per_step, (sized[p][1].height, sized[p][1].width)
        return (update, *size) if update % 2 == 0 else (update, -size[0], -size[1])

    return [sized[p] for p in sorted(range(len(sized)), key=order)]


def deal_batches(config: Config, sizes: Sequence[SamplingConfig], mine: Sequence[int]) -> list[tuple[int, list[Place]]]:
    """The batches of a rank that has the slots `mine`, as (update, places); sizes: of every slot.

    Update u holds the slots p with p·U // P = u, so neither it nor the samples depend on the number of ranks.
    """
    r, updates = config.rollout, config.train.updates_per_rollout
    places_of: dict[tuple[int, int, int], list[Place]] = {}
    for p in mine:
        key = (p * updates // r.prompts_per_step, sizes[p].height, sizes[p].width)
        places_of.setdefault(key, []).extend((p, g) for g in range(r.group_size))
    return [
        (update, places[k : k + r.batch_size])
        for (update, _, _), places in places_of.items()
        for k in range(0, len(places), r.batch_size)
    ]


@dataclass(frozen=True)
class Rollouts:
    """This rank's rollouts: `for batch in rollouts(step)` makes the samples of a training step, batch after batch."""

    config: Config
    adapter: Adapter
    embeddings: Embeddings
    schedules: Schedules
    prompts: Sequence[Prompt]
    world: World

    def groups(self, step: int) -> list[int]:
        """Numbers in the run, step · P + slot, of the groups that this rank makes in a step."""
        size = self.config.rollout.prompts_per_step
        return [step * size + p for p in self.world.slots(size)]

    def __call__(self, step: int) -> Iterator[Batch]:
        """Encode the texts of all batches, then denoise and decode one batch at a time."""
        r, device = self.config.rollout, self.world.device
        slots, first = slot_prompts(self.config, self.prompts, step), step * r.prompts_per_step
        planned = deal_batches(self.config, [sizes for _, sizes in slots], self.world.slots(r.prompts_per_step))
        with self.adapter.parked.hold():
            texts = [
                conditions(self.embeddings, [slots[p][0] for p, _ in places], slots[places[0][0]][1], device)
                for _, places in planned
            ]
        schedules: dict[tuple[SamplingConfig, int], Schedule] = {}
        for (update, places), condition in zip(planned, texts, strict=True):
            prompts, sizes = [slots[p][0] for p, _ in places], slots[places[0][0]][1]
            groups, members = [first + p for p, _ in places], [g for _, g in places]
            start = torch.tensor(groups, dtype=torch.int64, device=device) * r.group_size
            own = sizes, groups[0] if sizes.window_per_prompt else 0
            if own not in schedules:
                schedules[own] = self.schedules.step(sizes, step, groups[0])
            done = rollout(
                self.adapter,
                schedules[own],
                condition,
                start + torch.tensor(members, dtype=torch.int64, device=device),
                sizes,
                seed=self.config.seed,
                initial_sample=start if r.same_noise else None,
                keep_velocity=self.schedules.goal.keeps_velocity,
            )
            images = to_uint8(decode(self.adapter, done.latents, sizes, self.config.memory.decode_batch))
            samples = [sample(prompt, pixels, sizes) for prompt, pixels in zip(prompts, images, strict=True)]
            slot_numbers = [p for p, _ in places]
            yield Batch(update, slot_numbers, members, sizes, schedules[own], condition, done, groups, samples)
