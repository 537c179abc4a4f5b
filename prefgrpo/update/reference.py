"""The reference policy's velocities at the stored transitions, for the KL: computed while rewards are still awaited.

They depend on no reward and on no weight that an update changes. Invariant: a batch has the shape of the rollout, so
these velocities are the same whenever they are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefgrpo.config.schema import Config
from prefgrpo.objectives.base import Objective, TrajectoryObjective
from prefgrpo.parallel.world import World
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.batch import Batch
from prefgrpo.update.gradients import Gradients
from prefgrpo.update.throughput import Throughput
from prefgrpo.update.trajectory import TrajectoryGradients


@dataclass(frozen=True)
class Reference:
    """Adds the reference policy's velocities to batches. Adds none without train.kl_coef, or for endpoint objectives,
    which draw the times of their forwards in the update."""

    config: Config
    gradients: Gradients
    scorer: Scorer
    throughput: Throughput
    world: World

    def add_while_judged(self, batches: Sequence[Batch]) -> list[Batch]:
        """All batches of a step, with velocities in as many of them as are computed before the last answer arrives.

        Processes that run their forwards together could not stop at different batches, so they compute all if a judge
        or server is asked. Objectives that train on part of each group, or whose own `mask` may do so, leave all to
        `add`. Stops after half the deadline: the wait for answers starts afterwards and takes a whole deadline at most,
        and other processes wait in a collective for no more than twice the deadline.
        """
        objective = self.gradients.objective
        size = self.config.rollout.group_size
        whole_groups = type(objective).mask in (Objective.mask, TrajectoryObjective.mask)
        if objective.samples_per_group(size) < size or not whole_groups:
            return list(batches)
        if self.world.equal_forwards or self.world.layout.context > 1:
            streams = any(reward.streams for reward in self.scorer.rewards.values())
            return self._add(batches, lambda: streams)
        until = time.monotonic() + self.scorer.deadline_s / 2
        return self._add(batches, lambda: self.scorer.waits() and time.monotonic() < until)

    def add(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches that an update trains on, with the velocities that they still lack."""
        return self._add(batches, lambda: True)

    def _add(self, batches: Sequence[Batch], goes_on: Callable[[], bool]) -> list[Batch]:
        out = list(batches)
        lacking = [k for k, batch in enumerate(out) if any(one.v_ref is None for one in batch.transitions)]
        needed = isinstance(self.gradients, TrajectoryGradients) and self.config.train.kl_coef > 0
        if not needed or not lacking or not goes_on():
            return out
        assert isinstance(self.gradients, TrajectoryGradients)
        with self.gradients.reference():  # once, as it may swap all weights
            for k in lacking:
                if not goes_on():
                    break
                with self.throughput.counting("reference", len(out[k].places)):
                    out[k] = self.gradients.with_reference(out[k])
        return out
