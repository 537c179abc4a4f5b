"""Splits the samples of a training step into batches and assigns these to processes; every process computes the same.

The samples of an update are ordered by image size and number of source images, and split into batches that have one of
each. The batches of a step are assigned to the data-parallel ranks round-robin, update by update, so that every one has
its share of every update. Invariant: batches do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.rollout.batch import BatchPlan, Place
from prefgrpo.rollout.sampling import prompt_sampling

Slots = list[tuple[Prompt, SamplingConfig]]
"""The prompt and sampling sizes of every slot of a step."""


def slot_prompts(config: Config, prompts: Sequence[Prompt], step: int) -> Slots:
    """The prompt and sizes of every slot of a step; sorted by size (and number of source images) within an update, in
    alternating direction."""
    r, updates = config.rollout, config.train.updates_per_rollout
    chosen = [prompts[i] for i in step_prompts(len(prompts), r.prompts_per_step, config.seed, step)]
    sized = [(prompt, prompt_sampling(prompt, r, config.data.own_sizes)) for prompt in chosen]

    def order(p: int) -> tuple[int, int, int, int]:
        update = p * updates // r.prompts_per_step
        prompt, sizes = sized[p]
        way = 1 if update % 2 == 0 else -1
        return update, way * sizes.height, way * sizes.width, way * len(prompt.source)

    return [sized[p] for p in sorted(range(len(sized)), key=order)]


def update_of(config: Config, place: Place) -> int:
    """The optimiser update u (of U) that trains on a sample: p·U // P for slot p, or (p·G + g)·U // (P·G) if U > P;
    with train.update_slices: members, g·U // G for member g of every group."""
    r, updates, (p, g) = config.rollout, config.train.updates_per_rollout, place
    if config.train.update_slices == "members":
        return g * updates // r.group_size
    if updates <= r.prompts_per_step:
        return p * updates // r.prompts_per_step
    return (p * r.group_size + g) * updates // (r.prompts_per_step * r.group_size)


def assign_batches(
    config: Config,
    sizes: Sequence[SamplingConfig],
    dp_size: int = 1,
    whole_groups: bool = False,
    sources: Sequence[int] = (),
) -> list[BatchPlan]:
    """The batches of a step, assigned to `dp_size` data-parallel ranks; sizes: of every slot; sources: its number of
    source images (default: none).

    Shares of each update and of the step differ by at most one batch. whole_groups: all batches of a group go to one
    rank, as many groups together as fit into a batch, and shares differ by at most so many batches.
    """
    r = config.rollout
    places_of: dict[tuple[int, int, int, int], list[Place]] = {}
    for place in ((slot, member) for slot in range(r.prompts_per_step) for member in range(r.group_size)):
        size = sizes[place[0]]
        count = sources[place[0]] if sources else 0
        places_of.setdefault((update_of(config, place), size.height, size.width, count), []).append(place)
    together = max(r.batch_size // r.group_size, 1) * r.group_size if whole_groups else r.batch_size
    out: list[BatchPlan] = []
    turn = 0
    for (update, *_), places in sorted(places_of.items(), key=lambda item: item[0][0]):
        for first in range(0, len(places), together):
            on_one_rank = places[first : first + together]
            for k in range(0, len(on_one_rank), r.batch_size):
                out.append(BatchPlan(len(out), update, tuple(on_one_rank[k : k + r.batch_size]), turn % dp_size))
            turn += 1
    return out
