"""Groups that the policy generates: the rollout of a training step.

Samples are sent to the data-parallel rank that scores their group while the next batch is generated. Invariant: a
sample depends on (weights, prompt, seed, step, slot, member) only, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from prefgrpo.config.schema import Config
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import Condition, collate
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.assignment import BatchPlan, Place
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.plan import Groups, StepPlan, make_plan
from prefgrpo.rollout.render import Decoder, Images, sample
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules


@dataclass(frozen=True)
class GeneratedGroups(Groups):
    """Groups that the policy generates."""

    config: Config
    adapter: Adapter
    embeddings: Embeddings
    schedules: Schedules
    prompts: Sequence[Prompt]
    world: World

    def plan(self, step: int) -> StepPlan:
        """As in `Groups`."""
        return make_plan(self.config, step, self.prompts, self.world, scores=True)

    def batches(
        self, plan: StepPlan, add: Callable[[int, int, Sample], object], between: Callable[[], object] = lambda: None
    ) -> Iterator[Batch]:
        """As in `Groups`: encode the texts of all batches, then denoise and decode one batch at a time."""
        rate = self.adapter.frame_rate

        def take(place: Place, pixels: Images) -> None:
            slot, member = place
            add(plan.groups[slot], member, sample(plan.prompts[slot], Media(pixels, rate), self.config.rollout))

        todo = plan.own + plan.padding
        slots = list(dict.fromkeys(slot for batch in todo for slot in batch.slots))
        encoded = self.embeddings(self.adapter, [plan.prompts[slot] for slot in slots], self.config.rollout)
        condition_of = dict(zip(slots, encoded, strict=True))
        decoder = Decoder[Place](self.adapter, self.config.rollout, self.world)
        with media_exchange(self.world, plan.batches, self._media_shape(), take) as put:
            for number, planned in enumerate(todo):
                condition = collate([condition_of[slot] for slot in planned.slots], self.world.device)
                batch = self._generate(plan, planned, condition, padding=number >= len(plan.own))
                if not batch.padding:
                    for place, pixels in decoder.add(planned.places, batch.latents):
                        put(place, pixels)
                yield batch.kept(self.world)
                between()
            for _ in range(plan.rounds - len(todo)):
                between()
            for place, pixels in decoder.rest():
                put(place, pixels)

    def _media_shape(self) -> tuple[int, ...]:
        """Shape of a sample's pixels: [H, W, 3], or [F, H, W, 3]."""
        r = self.config.rollout
        frames = self.adapter.frames(r) or 1
        return (r.height, r.width, 3) if frames == 1 else (frames, r.height, r.width, 3)

    def _generate(self, plan: StepPlan, planned: BatchPlan, condition: Condition, padding: bool) -> Batch:
        """Generate a batch with the current policy."""
        r = self.config.rollout
        schedule = self.schedules.step(plan.step)
        groups = tuple(plan.groups[slot] for slot in planned.slots)
        starts = [group * r.group_size for group in groups]  # the ids of the groups' first samples
        numbers = [start + member for start, member in zip(starts, planned.members, strict=True)]
        ids = torch.tensor(numbers).to(self.world.device, non_blocking=True)
        latents, transitions = rollout(
            self.adapter,
            schedule,
            condition,
            ids,
            r,
            seed=self.config.seed,
            initial_sample=starts if r.same_noise else None,
            keep_velocity=self.schedules.objective.keeps_velocity,
        )
        return Batch(
            **vars(planned),
            groups=groups,
            schedule=schedule,
            condition=condition,
            ids=ids,
            latents=latents,
            sampling=r,
            transitions=transitions,
            padding=padding,
        )
