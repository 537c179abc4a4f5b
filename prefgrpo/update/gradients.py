"""From a batch and its targets to gradients: what the two kinds of objectives share.

trajectory   replays stored transitions, one per forward
endpoint     noises final latents, one draw per forward
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from prefgrpo.config.schema import Config
from prefgrpo.models.base import Adapter
from prefgrpo.objectives.base import Objective, Targets
from prefgrpo.parallel.shard import reduce_gradients
from prefgrpo.parallel.world import World
from prefgrpo.rollout.batch import Batch

WeightsContext = Callable[[], AbstractContextManager[None]]
"""Context in which the model has other weights."""


@dataclass(frozen=True)
class Gradients(ABC):
    """Accumulates the gradients of an objective."""

    adapter: Adapter
    objective: Objective
    config: Config
    reference: WeightsContext
    """Context in which the model has the reference policy's weights."""
    world: World
    reduce_once: bool = False
    """Whether gradients of sharded weights are summed over the shards once per update, not in every backward."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of every forward."""

    @abstractmethod
    def accumulate(self, batches: Sequence[Batch], targets: Targets, samples: float) -> list[Tensor]:
        """Accumulate gradients of this process's batches; returns one row [update, samples, k, loss, *metrics] per
        forward (`backward`).

        samples: their number in the whole update, over all processes (`Objective.samples_per_group` per group).
        """

    def backward(
        self,
        batch: Batch,
        loss: Tensor,
        metrics: Tensor,
        last: bool,
        k: int | None = None,
        shown: Tensor | None = None,
    ) -> list[Tensor]:
        """Accumulate the gradients of a batch's `loss`, as 0 for padding. Returns a row, none for padding; it stays on
        the device, which is not waited for.

        last: whether this is the update's last backward. k: the replayed denoising step. shown: the loss in the row, if
        `loss` only has its gradient.
        """
        if self.reduce_once:
            reduce_gradients(self.adapter, last)
        if batch.padding:
            (0.0 * loss).backward()
            return []
        loss.backward()
        facts = (batch.update, len(batch.places), math.nan if k is None else k)
        columns = [metrics.new_full((1,), fact) for fact in facts]
        return [torch.cat([*columns, (loss if shown is None else shown).detach()[None], metrics.detach()])]
