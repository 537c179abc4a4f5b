"""The plan of a training step: its groups, its batches on all processes, and its optimiser updates.

A plan is made once, at the start of the step, and handed down to everything that works on it. `Groups` makes it and
yields the batches: `generated_groups` those that the policy samples, `stored_groups` those that files hold.
Invariant: every process derives the same plan from (configuration, step).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import Prompt, step_prompts
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.assignment import BatchPlan, assign_batches
from prefgrpo.rollout.batch import Batch


class Update(NamedTuple):
    """One optimiser update of a step."""

    position: int
    """Its number in the run, from 0, counting updates without a signal."""
    batches: list[Batch]
    """Those of this process."""
    samples: int
    """Number over all processes, with those that carry no signal."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of one training step, on one process."""

    step: int
    """Training step, from 0."""
    chosen: tuple[int, ...]
    """[P], which of the run's prompts, or of its stored groups, each slot has."""
    prompts: tuple[Prompt, ...]
    """[P] prompts of the slots."""
    scored: tuple[int, ...]
    """Run-wide numbers of the groups that this process's share scores; none of stored groups."""
    batches: tuple[BatchPlan, ...]
    """The batches of all processes, update by update."""
    updates_per_step: int
    dp_index: int
    """The data-parallel share of this process."""
    equal_forwards: bool
    """Whether all processes run the same number of forwards, some as padding (`World.equal_forwards`)."""

    @property
    def groups(self) -> list[int]:
        """[P] run-wide numbers of the slots' groups."""
        first = self.step * len(self.chosen)
        return list(range(first, first + len(self.chosen)))

    @property
    def own(self) -> list[BatchPlan]:
        """The batches that this process trains on."""
        return [batch for batch in self.batches if batch.dp_rank == self.dp_index]

    @property
    def samples(self) -> int:
        """Number of samples in them."""
        return sum(len(batch.places) for batch in self.own)

    @property
    def rounds(self) -> int:
        """Maximum number of batches that a process trains on."""
        return max(Counter(batch.dp_rank for batch in self.batches).values())

    @property
    def padding(self) -> list[BatchPlan]:
        """Batches that this process makes besides `own`, so that all make the same number."""
        lacking = self.rounds - len(self.own) if self.equal_forwards else 0
        return [self.batches[-1]] * lacking

    def trained(self, batches: Sequence[Batch], mask: NDArray[np.bool_]) -> list[Batch]:
        """The batches that this process trains on: those that it made, reduced to the samples in `mask` [P, G].

        They are not moved, split or merged: one that keeps all its samples keeps its shape, and dropped samples only
        make a process's share smaller.
        """
        made = [batch for batch in batches if not batch.padding and mask[batch.slots, batch.members].any()]
        reduced = [batch.select(mask) for batch in made]
        if not self.equal_forwards:
            # A process with nothing left in an update runs no forward; `World.sum_gradients` takes its gradient as 0.
            return reduced
        # With sharded weights, every forward and backward is a collective of all processes, so a process with fewer
        # batches in an update than another runs one of its batches again as padding, with zero loss.
        counts: dict[int, Counter[int]] = {}
        for planned in self.batches:
            if any(mask[place] for place in planned.places):
                counts.setdefault(planned.update, Counter())[planned.dp_rank] += 1
        for update, of_rank in counts.items():
            lacking = max(of_rank.values()) - of_rank[self.dp_index]
            reduced += [replace(batches[-1], update=update, padding=True)] * lacking
        return reduced

    def updates(self, trained: Sequence[Batch], mask: NDArray[np.bool_]) -> Iterator[Update]:
        """The step's updates with a sample in `mask` [P, G], in order; the same on all processes. trained: from the
        method of this name."""
        samples: Counter[int] = Counter()
        signals = set[int]()
        for planned in self.batches:
            samples[planned.update] += len(planned.places)
            if any(mask[place] for place in planned.places):
                signals.add(planned.update)
        for update in sorted(signals):
            position = self.step * self.updates_per_step + update
            yield Update(position, [batch for batch in trained if batch.update == update], samples[update])


def make_plan(config: Config, step: int, prompts: Sequence[Prompt], world: World, scores: bool) -> StepPlan:
    """The plan of a step. prompts: those of the run, or of its stored groups. scores: whether each share scores the
    groups of its slots."""
    size = config.rollout.prompts_per_step
    chosen = step_prompts(len(prompts), size, config.seed, step)
    return StepPlan(
        step=step,
        chosen=tuple(chosen),
        prompts=tuple(prompts[k] for k in chosen),
        scored=tuple(step * size + slot for slot in world.slots(size)) if scores else (),
        batches=tuple(assign_batches(config, world.dp_size)),
        updates_per_step=config.train.updates_per_rollout,
        dp_index=world.dp_index,
        equal_forwards=world.equal_forwards,
    )


class Groups(ABC):
    """What a run trains on, a step at a time."""

    @abstractmethod
    def plan(self, step: int) -> StepPlan:
        """The plan of a training step."""

    @abstractmethod
    def batches(
        self, plan: StepPlan, add: Callable[[int, int, Sample], object], between: Callable[[], object] = lambda: None
    ) -> Iterator[Batch]:
        """This process's batches of a step: encodes what all of them need, then makes one at a time.

        add: called with (group, member, sample) for every sample of `plan.scored` as soon as it is available; samples
        received from other processes are added from another thread. All have been added when the iteration ends.
        between: called after every batch, equally often on all processes; what it raises ends the iteration.
        """
