"""The rollout of one training step: which samples this rank makes, in which batches, and making them.

A batch holds samples of one size. The groups of an update are dealt out over the ranks in the order of their sizes, so
every rank gets its share of each. Invariant: a sample depends on (weights, prompt, seed, step, slot, member) alone, not
on the number of ranks; it is sent to the rewards as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefgrpo.config.schema import Config
from prefgrpo.config.schema import Rollout as Sizes
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.models.base import Condition
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.render import conditions, decode, sample, to_uint8
from prefgrpo.rollout.rollout import Rollout, rollout
from prefgrpo.rollout.sampling import of_prompt
from prefgrpo.run.session import Session
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
    sizes: Sizes
    schedule: Schedule
    condition: Condition
    rollout: Rollout


def slot_prompts(config: Config, prompts: Sequence[Prompt], step: int) -> list[tuple[Prompt, Sizes]]:
    """The prompt and the sizes of every slot of a step; within an update sorted by size, up and down in turn."""
    r, updates = config.rollout, config.train.updates_per_rollout
    chosen = [prompts[i] for i in step_prompts(len(prompts), r.prompts_per_step, config.seed, step)]
    sized = [(prompt, of_prompt(prompt, r, config.data.own_sizes)) for prompt in chosen]

    def order(p: int) -> tuple[int, int, int]:
        update, size = p * updates // r.prompts_per_step, (sized[p][1].height, sized[p][1].width)
        return (update, *size) if update % 2 == 0 else (update, -size[0], -size[1])

    return [sized[p] for p in sorted(range(len(sized)), key=order)]


def plan(config: Config, sizes: Sequence[Sizes], mine: Sequence[int]) -> list[tuple[int, list[Place]]]:
    """The batches of a rank that has the slots `mine`, as (update, places); sizes: of every slot.

    Update u holds the slots p with p·U // P = u, so neither it nor the samples depend on the number of ranks.
    """
    r, updates = config.rollout, config.train.updates_per_rollout
    found: dict[tuple[int, int, int], list[Place]] = {}
    for p in mine:
        key = (p * updates // r.prompts_per_step, sizes[p].height, sizes[p].width)
        found.setdefault(key, []).extend((p, g) for g in range(r.group_size))
    return [
        (update, places[k : k + r.batch_size])
        for (update, _, _), places in found.items()
        for k in range(0, len(places), r.batch_size)
    ]


def collect(config: Config, parts: Session, step: int) -> tuple[list[Batch], dict[Place, Sample]]:
    """Roll out all of this rank's samples; every one goes to the rewards as soon as it exists."""
    r, world, samples, batches = config.rollout, parts.world, dict[Place, Sample](), []
    slots, first = slot_prompts(config, parts.prompts, step), step * config.rollout.prompts_per_step
    mine, schedules = world.slots(r.prompts_per_step), dict[Sizes, Schedule]()
    parts.scorer.begin(step, [first + p for p in mine])
    planned = plan(config, [sizes for _, sizes in slots], mine)
    with parts.adapter.parked.hold():
        texts = [
            conditions(parts.embeddings, [slots[p][0] for p, _ in places], slots[places[0][0]][1], world.device)
            for _, places in planned
        ]
    for (update, places), condition in zip(planned, texts, strict=True):
        prompts, sizes = [slots[p][0] for p, _ in places], slots[places[0][0]][1]
        groups = torch.tensor([first + p for p, _ in places], dtype=torch.int64, device=world.device)
        members = torch.tensor([g for _, g in places], dtype=torch.int64, device=world.device)
        if sizes not in schedules:
            schedules[sizes] = parts.schedules.step(sizes, step)
        done = rollout(
            parts.adapter,
            schedules[sizes],
            condition,
            groups * r.group_size + members,
            seed=config.seed,
            height=sizes.height,
            width=sizes.width,
            initial_sample=groups * r.group_size if r.same_noise else None,
        )
        images = to_uint8(decode(parts.adapter, done.latents, sizes, config.memory.decode_batch))
        for place, prompt, pixels in zip(places, prompts, images, strict=True):
            samples[place] = sample(prompt, pixels, sizes)
            parts.scorer.add(first + place[0], place[1], samples[place])
        slot_numbers, member_numbers = [p for p, _ in places], [g for _, g in places]
        batches.append(Batch(update, slot_numbers, member_numbers, sizes, schedules[sizes], condition, done))
    return batches, samples
