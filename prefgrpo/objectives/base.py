"""What the shared code needs from a training objective; one file per objective implements it.

An objective is a frozen dataclass of its options (`train.objective_options`) with a loss, which gets what one of two
collectors makes. `trajectory`: stored stochastic steps are replayed. `endpoint`: final latents x0 are noised to
x_t = (1 − t)·x0 + t·ε, the model predicts the velocity u = ε − x0, and what counts is d = mean_D ‖v − u‖²; ε and t are
those of the group, so members are compared on equal terms. Invariant: losses are sums over samples divided by the
number of samples of the whole update, so neither the batch size nor the number of processes changes a gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, Share, TrainConfig
from prefgrpo.ops import METRICS, PolicyLoss


class Targets(NamedTuple):
    """What the rewards say of the samples of P groups, on the device."""

    advantage: Tensor
    """fp32 [P, G]; 0 for a missing reward and in groups whose rewards are equal."""
    wins: Tensor
    """fp32 [P, G, G] summed verdicts that row beats column; zeros without a pairwise reward."""
    counts: Tensor
    """fp32 [P, G, G] how many verdicts there are; symmetric, wins + winsᵀ = counts."""
    known: Tensor
    """bool [P, G], whether the sample has its rewards."""

    @classmethod
    def of(cls, advantage: Tensor) -> Targets:
        """Of advantages alone."""
        none = advantage.new_zeros(*advantage.shape, advantage.shape[1])
        return cls(advantage, none, none, torch.ones_like(advantage, dtype=torch.bool))

    def select(self, groups: list[int]) -> Targets:
        """Those of some groups."""
        return Targets(*(part[groups] for part in self))

    def preference(self) -> Tensor:
        """[P, G, G] share of the comparisons that row won against column, ties as halves; ½ where there is none."""
        return torch.where(self.counts > 0, self.wins / self.counts.clamp(min=1e-9), 0.5)

    def win_rate(self) -> Tensor:
        """[P, G] share of its comparisons that a member won; ½ for a member without any."""
        n = self.counts.sum(-1)
        return torch.where(n > 0, self.wins.sum(-1) / n.clamp(min=1e-9), 0.5)


class Objective(ABC):
    """A training objective with its options as fields."""

    collector: ClassVar[Literal["trajectory", "endpoint"]]
    """What the loss is computed from."""
    whole_groups: ClassVar[bool] = False
    """Whether the loss needs all members of a group, which must then be on one data-parallel index."""
    weighs_advantages: ClassVar[bool] = False
    """Whether a sample's share of the first gradient is proportional to its advantage (`train.min_advantage`)."""
    keeps_velocity: ClassVar[bool] = False
    """Whether the rollout stores the velocities of its steps, for losses that compare means."""

    @property
    def anchor(self) -> Literal["", "base", "old"]:
        """Which other weights the loss compares with: none, the starting policy's, or the old policy's."""
        return ""

    @property
    def needs_comparisons(self) -> bool:
        """Whether a pairwise reward must be trained on."""
        return False

    @property
    def sampled_by_old(self) -> bool:
        """Whether the old policy makes the rollouts."""
        return False

    def mistakes(self, group_size: int) -> list[str]:
        """Options that do not go together, as 'field: what was expected, what came'."""
        return []

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """fp32 [P, G], what the loss gets of every sample's rewards; NaN: the sample is left out, it costs no forward.

        Here: its advantage; groups without any are left out.
        """
        whole = (targets.advantage != 0).any(1, keepdim=True)
        return torch.where(whole, targets.advantage, torch.nan)

    def selected(self, train: TrainConfig, targets: Targets) -> Tensor:
        """`signal`, NaN too where |A| is below train.min_advantage of the largest |A| of the step.

        targets: of all groups of the step, over all ranks. The mean of the loss counts the samples left out.
        """
        size = targets.advantage.abs().clamp(max=train.adv_clip_max)
        return self.signal(train, targets).masked_fill(size < train.min_advantage * size.max(), torch.nan)

    def per_group(self, group_size: int) -> int:
        """How many samples of a group the mean of the loss counts."""
        return group_size

    def old_decay(self, step: int) -> float:
        """decay of old ← decay · old + (1 − decay) · policy after training step `step` (from 0)."""
        return 0.0


class Replayed(NamedTuple):
    """A stored step of B samples under the present weights; all fp32 [B]."""

    logp: Tensor
    """Log-prob of the stored value, with gradient."""
    logp_old: Tensor
    """Under the policy that made it."""
    kl: Tensor | None = None
    """KL to the starting policy, with gradient, if train.kl_coef is above 0."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio, with gradient, if the objective keeps velocities."""
    kl_old: Tensor | None = None
    """KL to the policy that made it, without gradient, if the objective keeps velocities."""
    weight: Tensor | None = None
    """Of the step (`step_weight`)."""


StepWeight = Literal["none", "velocity", "noise", "inverse_step"]


@dataclass(frozen=True, config=STRICT)
class TrajectoryObjective(Objective):
    """An objective of replayed steps."""

    collector = "trajectory"
    weighs_advantages = True
    metrics: ClassVar[tuple[str, ...]] = METRICS
    """What `PolicyLoss.metrics` holds."""

    best_of: NonNegativeInt = 0
    """Train on so many members of a group: the best half of them and the worst half (DanceGRPO); 0: on all."""
    step_weight: StepWeight = "none"
    """Weight of a step in the loss: none, velocity: s / |b|, so that noise moves v alike at every step (Flash-GRPO),
    noise: s (TempFlow-GRPO), both divided by their mean over the steps that may be trained, or inverse_step: 1 / |Δσ|
    (GRPO-Guard)."""

    def mistakes(self, group_size: int) -> list[str]:
        """best_of takes two halves of a group."""
        fits = self.best_of % 2 == 0 and self.best_of <= group_size
        return [] if fits else [f"best_of: expected an even number up to {group_size}, got {self.best_of}"]

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """The advantage; of the best and the worst only, with best_of."""
        signal = super().signal(train, targets)
        if not self.best_of:
            return signal
        order, half = targets.advantage.argsort(stable=True, dim=1, descending=True), self.best_of // 2
        chosen = torch.zeros_like(signal, dtype=torch.bool)
        chosen.scatter_(1, torch.cat([order[:, :half], order[:, -half:]], 1), True)
        return torch.where(chosen, signal, torch.nan)

    def per_group(self, group_size: int) -> int:
        """Those that are trained."""
        return self.best_of or group_size

    @abstractmethod
    def loss(self, train: TrainConfig, new: Replayed, advantage: Tensor, denominator: float) -> PolicyLoss:
        """Loss of one replayed step of B samples; advantage: fp32 [B]; denominator: samples × steps of the update."""


@plain_dataclass(frozen=True, eq=False)
class Prediction:
    """One draw (ε, t) of B samples, as the model and its anchor predict it."""

    t: Tensor
    """fp32 [B]."""
    v: Tensor
    """[B, …] predicted velocity, with gradient."""
    u: Tensor
    """[B, …] true velocity ε − x0."""
    anchor: Tensor | None
    """[B, …] velocity under the weights of `Objective.anchor`, without gradient."""
    start: Tensor | None = None
    """[B, …] velocity of the starting policy, without gradient, if train.kl_coef is above 0."""

    @cached_property
    def error(self) -> Tensor:
        """[B] d = mean_D ‖v − u‖²."""
        return mean_square(self.v - self.u)

    @cached_property
    def anchor_error(self) -> Tensor:
        """[B] mean_D ‖v_anchor − u‖²."""
        return mean_square(self.beside - self.u)

    @property
    def beside(self) -> Tensor:
        """The anchor's velocity, which must be there."""
        assert self.anchor is not None, "the objective names no anchor"
        return self.anchor


def mean_square(difference: Tensor) -> Tensor:
    """[B] mean over all elements of a sample's squares, in fp32."""
    return difference.float().square().flatten(1).mean(1)


@dataclass(frozen=True, config=STRICT)
class EndpointObjective(Objective):
    """An objective of noised final latents; rollouts are deterministic (ODE)."""

    collector = "endpoint"

    draws: PositiveInt = 1
    """Draws of (ε, t) per sample and update, shared by the members of a group; each costs a forward and a backward."""
    times: Literal["window", "schedule", "uniform", "logit_normal"] = "window"
    """Where t is drawn from: the σ of the rollout's steps window_low … window_high − 1 (a low window_high is high
    noise), of all its steps, the whole interval 0 … 1, or sigmoid(N(0, 1)) as diffusers' trainers do."""


@dataclass(frozen=True, config=STRICT)
class PointwiseObjective(EndpointObjective):
    """An endpoint objective whose loss is a sum over samples."""

    @abstractmethod
    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B] losses of one draw; signal: [B] of `Objective.signal`."""


@dataclass(frozen=True, config=STRICT)
class GroupObjective(EndpointObjective):
    """An endpoint objective that compares the members of a group by their errors alone."""

    whole_groups = True

    @abstractmethod
    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n] losses of n whole groups in one draw from errors [n, G], d of the policy (with gradient) and of the
        anchor; targets: of the n groups."""


@dataclass(frozen=True, config=STRICT)
class OldPolicy:
    """Fields of objectives with an old policy: how slowly it follows the policy."""

    decay: Share = 0.0
    """Share of the old policy that stays after a training step; 0: it is the policy that made the rollout."""
    decay_rate: NonNegativeFloat = 0.0
    """What every training step adds to decay."""
    decay_after: NonNegativeInt = 0
    """Training steps before decay begins to grow."""
    decay_max: Share = 0.999
    """decay grows no further than this."""

    def old_decay(self, step: int) -> float:
        """decay + decay_rate · (steps beyond decay_after), at most decay_max; after step `step` (from 0)."""
        grown = self.decay + self.decay_rate * max(0, step + 1 - self.decay_after)
        return min(grown, max(self.decay, self.decay_max))


@dataclass(frozen=True, config=STRICT)
class OptimalityObjective(OldPolicy, EndpointObjective):
    """An objective of the probability that a sample is good, with the old policy as its anchor."""

    optimality: Literal["advantage", "win_rate"] = "advantage"
    """r of a sample: clip(A / 2A_max + ½) with A_max = train.adv_clip_max, or its win rate as it is."""

    @property
    def anchor(self) -> Literal["", "base", "old"]:
        """The old policy."""
        return "old"

    @property
    def needs_comparisons(self) -> bool:
        """For win rates."""
        return self.optimality == "win_rate"

    def probability(self, train: TrainConfig, targets: Targets) -> Tensor:
        """r [P, G] in 0 … 1."""
        if self.optimality == "win_rate":
            return targets.win_rate()
        return (targets.advantage / (2.0 * train.adv_clip_max) + 0.5).clamp(0.0, 1.0)


def where_known(values: Tensor, targets: Targets) -> Tensor:
    """`values` [P, G]; NaN in groups without any advantage, and where rewards are missing."""
    return torch.where((targets.advantage != 0).any(1, keepdim=True) & targets.known, values, torch.nan)
