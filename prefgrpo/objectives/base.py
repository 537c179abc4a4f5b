"""What the shared code needs from a training objective; one file per objective implements it.

An objective is a frozen dataclass of its options (`train.objective_options`) with a loss. It names the collector that
feeds it. `trajectory`: stored stochastic steps are replayed, the loss is of their log-probs. Invariant: losses are sums
over samples divided by the `denominator` of the whole update, so neither the batch size nor the number of processes
changes a gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from prefgrpo.config.schema import TrainConfig
from prefgrpo.ops import METRICS, AffineLogp, PolicyLoss


@dataclass(frozen=True, eq=False)
class Targets:
    """What the rewards say of a step's samples, over all ranks, on the device."""

    advantage: Tensor
    """fp32 [P, G]."""


class Objective(ABC):
    """A training objective with its options as fields."""

    collector: ClassVar[Literal["trajectory"]]
    """What the loss is computed from."""
    metrics: ClassVar[tuple[str, ...]]
    """What is reported of every batch, as policy/NAME."""


class TrajectoryObjective(Objective):
    """An objective of replayed steps."""

    collector = "trajectory"
    metrics = METRICS

    @abstractmethod
    def loss(
        self, train: TrainConfig, new: AffineLogp, logp_old: Tensor, advantage: Tensor, denominator: float
    ) -> PolicyLoss:
        """Loss of one replayed step of B samples, all [B]; `denominator`: samples × trained steps of the update."""
