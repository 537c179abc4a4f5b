"""Which samples of a step make a batch, and which process generates and trains it.

A batch has members of one prompt that train in one update, so its texts have one length and its source images one
size, and a group without signal leaves whole batches. The batches of a step are assigned to the data-parallel ranks
round-robin, update by update, so that each has its share of every update; every process derives the same plan.
Invariant: batches do not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from prefgrpo.config.schema import Config

Place = tuple[int, int]
"""(slot 0 … P − 1 of a prompt in the step, member 0 … G − 1 of its group)."""


@dataclass(frozen=True)
class BatchPlan:
    """The plan of one batch of a step, which every process derives."""

    number: int
    """Number of the batch in the step."""
    update: int
    """The optimiser update, within the step, that trains on it."""
    places: tuple[Place, ...]
    """The (slot, member) of each of its B samples."""
    dp_rank: int
    """The data-parallel share that generates and trains it."""

    @property
    def slots(self) -> list[int]:
        """[B] slots of the samples' prompts."""
        return [slot for slot, _ in self.places]

    @property
    def members(self) -> list[int]:
        """[B] members of their groups that the samples are."""
        return [member for _, member in self.places]


def update_of(config: Config, place: Place) -> int:
    """The optimiser update u (of U) that trains on a sample: p·U // P for slot p, or (p·G + g)·U // (P·G) if U > P;
    with train.update_slices: members, g·U // G for member g of every group."""
    slot, member = place
    r = config.rollout
    updates = config.train.updates_per_rollout
    if config.train.update_slices == "members":
        return member * updates // r.group_size
    if updates <= r.prompts_per_step:
        return slot * updates // r.prompts_per_step
    return (slot * r.group_size + member) * updates // (r.prompts_per_step * r.group_size)


def places_of(config: Config) -> dict[tuple[int, int], list[Place]]:
    """(update, slot) → the samples of that prompt which train in that update, update by update."""
    r = config.rollout
    out: dict[tuple[int, int], list[Place]] = {}
    for place in ((slot, member) for slot in range(r.prompts_per_step) for member in range(r.group_size)):
        out.setdefault((update_of(config, place), place[0]), []).append(place)
    return dict(sorted(out.items()))


def batch_sizes(config: Config) -> list[int]:
    """The values of rollout.batch_size that fill every batch: divisors of the members of a prompt in an update."""
    largest = math.gcd(*(len(places) for places in places_of(config).values()))
    return [size for size in range(1, largest + 1) if largest % size == 0]


def assign_batches(config: Config, dp_size: int = 1) -> list[BatchPlan]:
    """The batches of a step, assigned to `dp_size` data-parallel ranks, whose shares of each update and of the step
    differ by at most one batch."""
    size = config.rollout.batch_size
    out: list[BatchPlan] = []
    for (update, _), places in places_of(config).items():
        for first in range(0, len(places), size):
            out.append(BatchPlan(len(out), update, tuple(places[first : first + size]), len(out) % dp_size))
    return out


def busy_share(config: Config, dp_size: int) -> float:
    """Share of the data-parallel ranks' time in the updates of a step in which they have a batch to train on."""
    batches = Counter(batch.update for batch in assign_batches(config))
    rounds = sum(-(-count // dp_size) for count in batches.values())
    return batches.total() / (rounds * dp_size)


def busy_prompts(config: Config, dp_size: int) -> int:
    """The smallest multiple of rollout.prompts_per_step that keeps the data-parallel ranks busy nine tenths of the time
    in an update."""
    r = config.rollout
    prompts = r.prompts_per_step
    while busy_share(replace(config, rollout=replace(r, prompts_per_step=prompts)), dp_size) < 0.9:
        prompts += r.prompts_per_step
    return prompts
