"""Training steps on groups of images or clips from files (`data.pairs`), in the batches that a rollout would make.

Latents and texts come from the cache; otherwise they are encoded when a step needs them. A group's batches have its
bucket's size. Invariant: the groups of step k, and their noise, depend only on (seed, k), whatever the number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.pairs import PairGroup
from prefgrpo.models import family
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import collate
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.assignment import BatchPlan
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.buckets import bucket_of, fitted, pair_entries
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.plan import Groups, StepPlan, make_plan
from prefgrpo.rollout.sampling import Schedules


def unguided(config: Config) -> SamplingConfig:
    """The sampling settings of a run without classifier-free guidance, as a loss on given images is one of the
    prediction for the prompt; guidance that the model takes as an input stays."""
    cfg = family(config.family).cfg
    if cfg is None:
        return config.rollout
    return replace(config.rollout, guidance=0.0 if cfg.from_cond else 1.0)


@dataclass(frozen=True)
class StoredGroups(Groups):
    """Groups from files; nothing is generated or scored."""

    config: Config
    adapter: Adapter
    embeddings: Embeddings
    schedules: Mapping[SamplingConfig, Schedules]
    """Sizes of the buckets (`buckets`)."""
    pairs: Sequence[PairGroup]
    """The groups, with G members each."""
    world: World

    def plan(self, step: int) -> StepPlan:
        """As in `Groups`."""
        prompts = [group.prompt for group in self.pairs]
        return make_plan(self.config, step, prompts, self.world, scores=False)

    def groups_of(self, plan: StepPlan) -> list[PairGroup]:
        """[P] groups of the slots."""
        return [self.pairs[k] for k in plan.chosen]

    def batches(
        self, plan: StepPlan, add: Callable[[int, int, Sample], object], between: Callable[[], object] = lambda: None
    ) -> Iterator[Batch]:
        """As in `Groups`; `add` is not called."""
        groups = self.groups_of(plan)
        todo = plan.own + plan.padding
        self.encode([groups[slot] for slot in dict.fromkeys(slot for batch in todo for slot in batch.slots)])
        for number, planned in enumerate(todo):
            (slot,) = set(planned.slots)
            padding = number >= len(plan.own)
            yield self.batch(groups[slot], planned, plan.groups[slot], plan.step, padding)
            between()
        for _ in range(plan.rounds - len(todo)):
            between()

    def encode(self, groups: Sequence[PairGroup]) -> None:
        """Encode at once what batches of these groups need and nobody has encoded yet."""
        self.embeddings.get(self.adapter, pair_entries(groups, self.adapter, list(self.schedules)))

    def batch(self, group: PairGroup, plan: BatchPlan, number: int, step: int, padding: bool = False) -> Batch:
        """The members of a group that a plan names. number: of the group, from which its noise follows; step: of the
        window of its schedule."""
        sizes = bucket_of(group, list(self.schedules))
        entries = fitted(group, self.adapter, sizes)
        latents = self.embeddings.latents(self.adapter, [entries[member] for member in plan.members])
        conditions = self.embeddings(self.adapter, [group.prompt] * len(plan.places), sizes)
        condition = collate(conditions, self.world.device)
        x0 = self.adapter.final(torch.stack(latents).float().to(self.world.device, non_blocking=True), condition)
        first = number * self.config.rollout.group_size
        return Batch(
            **vars(plan),
            groups=(number,) * len(plan.places),
            schedule=self.schedules[sizes].step(step),
            condition=condition,
            ids=torch.tensor([first + member for member in plan.members]).to(self.world.device, non_blocking=True),
            latents=self.world.slice_of(x0),
            sampling=sizes,
            padding=padding,
        )
