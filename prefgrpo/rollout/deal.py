"""How the samples of a training step become batches, and which process gets which: the same answer on every process.

The samples of an update are cut into batches of one size, in the order of their sizes, and the batches of a step dealt
over the data-parallel indices one by one. Invariant: batches do not depend on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.rollout.sampling import of_prompt

Place = tuple[int, int]
"""(slot 0 … P − 1 of the prompt, member 0 … G − 1 of its group)."""
Slots = list[tuple[Prompt, SamplingConfig]]
"""The prompt and the sizes of every slot of a step."""


@dataclass(frozen=True)
class Planned:
    """One batch of a step, as every process knows it."""

    number: int
    """Place among the step's batches."""
    update: int
    """Which of the step's optimiser updates it belongs to."""
    places: tuple[Place, ...]
    unit: int
    """Batches of the same unit go to the same index."""
    index: int
    """The data-parallel index that it is dealt to."""


def slot_prompts(config: Config, prompts: Sequence[Prompt], step: int) -> Slots:
    """The prompt and the sizes of every slot of a step; within an update sorted by size, up and down in turn."""
    r, updates = config.rollout, config.train.updates_per_rollout
    chosen = [prompts[i] for i in step_prompts(len(prompts), r.prompts_per_step, config.seed, step)]
    sized = [(prompt, of_prompt(prompt, r, config.data.own_sizes)) for prompt in chosen]

    def order(p: int) -> tuple[int, int, int]:
        update, size = p * updates // r.prompts_per_step, (sized[p][1].height, sized[p][1].width)
        return (update, *size) if update % 2 == 0 else (update, -size[0], -size[1])

    return [sized[p] for p in sorted(range(len(sized)), key=order)]


def update_of(config: Config, place: Place) -> int:
    """The optimiser update u of U that a sample trains: slots p with p·U // P = u, or with U > P as many samples; with
    train.update_slices members, the members g of every group with g·U // G = u."""
    r, updates, (p, g) = config.rollout, config.train.updates_per_rollout, place
    if config.train.update_slices == "members":
        return g * updates // r.group_size
    if updates <= r.prompts_per_step:
        return p * updates // r.prompts_per_step
    return (p * r.group_size + g) * updates // (r.prompts_per_step * r.group_size)


def deal_batches(
    config: Config, sizes: Sequence[SamplingConfig], indices: int = 1, whole_groups: bool = False
) -> list[Planned]:
    """The batches of a step, dealt over so many data-parallel indices; sizes: of every slot.

    Every index gets its share of each update and of the step, up to one batch. whole_groups: all batches that hold a
    group go to one index (a unit is one group, or as many as fit into a batch), shares differ by one unit.
    """
    r = config.rollout
    places_of: dict[tuple[int, int, int], list[Place]] = {}
    for place in ((p, g) for p in range(r.prompts_per_step) for g in range(r.group_size)):
        size = sizes[place[0]]
        places_of.setdefault((update_of(config, place), size.height, size.width), []).append(place)
    together = max(r.batch_size // r.group_size, 1) * r.group_size if whole_groups else r.batch_size
    units = [
        (update, places[k : k + together])
        for (update, _, _), places in places_of.items()
        for k in range(0, len(places), together)
    ]
    cut = [
        (update, tuple(places[k : k + r.batch_size]), unit)
        for unit, (update, places) in enumerate(units)
        for k in range(0, len(places), r.batch_size)
    ]
    return [Planned(number, *what, what[-1] % indices) for number, what in enumerate(cut)]


def level(batches: Sequence[Planned], indices: int) -> list[Planned]:
    """The same batches of one update with equal shares up to one unit: as few as possible change their index."""
    out = list(batches)
    while out:
        held, size = Counter(b.index for b in out), Counter(b.unit for b in out)
        most = max(range(indices), key=lambda k: held[k])
        least = min(range(indices), key=lambda k: held[k])
        unit = next(b.unit for b in reversed(out) if b.index == most)
        if held[most] - held[least] <= size[unit]:
            break
        out = [replace(b, index=least) if b.unit == unit else b for b in out]
    return out
