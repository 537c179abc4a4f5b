"""Base classes of training objectives; each objective is one file.

An objective is a frozen dataclass of its options (`train.objective_options`) with a `loss`, whose inputs are of one
of two kinds. `trajectory`: replays of stored stochastic transitions. `endpoint`: final latents x0, noised to
x_t = (1 − t)·x0 + t·ε; the model predicts the velocity u = ε − x0 with error d = mean_D ‖v − u‖². Members of a group
share ε and t, so their errors are comparable. Invariant: a loss is a sum over samples divided by the number of samples
in the whole update, so gradients depend neither on the batch size nor on the number of processes.
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
    """Training signal from the rewards of P groups."""

    advantage: Tensor
    """fp32 [P, G]; 0 for a missing reward and in groups whose rewards are equal."""
    wins: Tensor
    """fp32 [P, G, G], sum of the verdicts that row beats column; zeros without a pairwise reward."""
    counts: Tensor
    """fp32 [P, G, G], number of verdicts per pair; symmetric, wins + winsᵀ = counts."""
    known: Tensor
    """bool [P, G], whether the sample's rewards are present."""
    weight: Tensor | None = None
    """fp32 [P], factors of the groups' losses; None: 1."""

    def to(self, device: torch.device) -> Targets:
        """The targets on a device, without waiting for it."""
        moved = Targets(*(tensor.to(device, non_blocking=True) for tensor in self[:4]))
        return moved if self.weight is None else moved._replace(weight=self.weight.to(device, non_blocking=True))

    def preference(self) -> Tensor:
        """[P, G, G] share of comparisons that row won against column, a tie counting ½; ½ for pairs never compared."""
        return torch.where(self.counts > 0, self.wins / self.counts.clamp(min=1e-9), 0.5)

    def win_rate(self) -> Tensor:
        """[P, G] win rate of each member over its comparisons; ½ for a member without any."""
        n = self.counts.sum(-1)
        return torch.where(n > 0, self.wins.sum(-1) / n.clamp(min=1e-9), 0.5)


class Objective(ABC):
    """A training objective with its options as fields."""

    inputs: ClassVar[Literal["trajectory", "endpoint"]]
    """The kind of the loss's inputs."""
    keeps_velocity: ClassVar[bool] = False
    """Whether the rollout stores the velocities of its transitions, for losses that compare the means of steps."""

    @property
    def compares_with(self) -> Literal["", "reference", "old"]:
        """The other policy in the loss: none, the reference policy or the old policy."""
        return ""

    @property
    def needs_comparisons(self) -> bool:
        """Whether the objective requires a pairwise reward."""
        return False

    @property
    def sampled_by_old(self) -> bool:
        """Whether the old policy generates the rollouts."""
        return False

    @property
    def on_policy(self) -> bool:
        """Whether the loss is valid only for samples that a policy of this run generated, not for those of
        data.pairs."""
        return False

    def option_errors(self, group_size: int) -> list[str]:
        """Errors for incompatible options, as 'field: what was expected, what was given'."""
        return []

    def mask(self, train: TrainConfig, targets: Targets) -> Tensor:
        """bool [P, G], the samples that are trained on; the others are dropped and cost no forward.

        By default all but those of groups whose advantages are all 0.
        """
        return (targets.advantage != 0).any(1, keepdim=True).expand_as(targets.advantage)

    def samples_per_group(self, group_size: int) -> int:
        """How many samples per group count in the mean of the loss."""
        return group_size

    def old_decay(self, step: int) -> float:
        """decay of old ← decay · old + (1 − decay) · policy after training step `step` (from 0)."""
        return 0.0


class Replayed(NamedTuple):
    """A stored transition of B samples, recomputed with the current weights; all fp32 [B]."""

    logp: Tensor
    """Log-prob of the stored x_next, with gradient."""
    logp_old: Tensor
    """Its log-prob under the policy that generated it."""
    kl: Tensor | None = None
    """KL to the reference policy, with gradient, if train.kl_coef is above 0."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio, with gradient, if the objective keeps velocities."""
    weight: Tensor | None = None
    """Loss weight of the step (`step_weight`)."""


StepWeight = Literal["none", "velocity", "noise", "inverse_step"]


@dataclass(frozen=True, config=STRICT)
class TrajectoryObjective(Objective):
    """An objective whose loss is computed from replayed transitions."""

    inputs = "trajectory"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    """Names of the entries of `PolicyLoss.metrics`."""

    best_of: NonNegativeInt = 0
    """Number of members of a group to train on, half of them the best, half the worst (DanceGRPO); 0: all."""
    step_weight: StepWeight = "none"
    """Weight of a step in the loss: none; velocity: s / |b|, so that noise moves v equally at every step (Flash-GRPO);
    noise: s (TempFlow-GRPO), both divided by their mean over the trainable steps; or inverse_step: 1 / |Δσ|
    (GRPO-Guard)."""

    def option_errors(self, group_size: int) -> list[str]:
        """best_of must be even and at most the group size."""
        fits = self.best_of % 2 == 0 and self.best_of <= group_size
        return [] if fits else [f"best_of: expected an even number up to {group_size}, got {self.best_of}"]

    @property
    def on_policy(self) -> bool:
        """True: it needs the steps that led to a sample."""
        return True

    def mask(self, train: TrainConfig, targets: Targets) -> Tensor:
        """With best_of, only the best and the worst members."""
        mask = super().mask(train, targets)
        if not self.best_of:
            return mask
        order = targets.advantage.argsort(stable=True, dim=1, descending=True)
        half = self.best_of // 2
        chosen = torch.zeros_like(targets.advantage, dtype=torch.bool)
        chosen.scatter_(1, torch.cat([order[:, :half], order[:, -half:]], 1), True)
        return mask & chosen

    def samples_per_group(self, group_size: int) -> int:
        """The number of members that are trained on."""
        return self.best_of or group_size

    @abstractmethod
    def loss(self, train: TrainConfig, new: Replayed, advantage: Tensor, denominator: float) -> PolicyLoss:
        """Loss of one replayed transition of B samples.

        advantage: fp32 [B]. denominator: samples × trained steps of the update.
        """


@plain_dataclass(frozen=True, eq=False)
class Prediction:
    """Velocities for B samples in one draw (ε, t)."""

    t: Tensor
    """fp32 [B]."""
    v: Tensor
    """[B, …] of the policy, with gradient."""
    u: Tensor
    """[B, …] true velocity ε − x0."""
    compared: Tensor | None
    """[B, …] of the policy that the objective `compares_with`, without gradient."""
    v_reference: Tensor | None = None
    """[B, …] of the reference policy, without gradient, if train.kl_coef is above 0."""

    @cached_property
    def error(self) -> Tensor:
        """[B] d = mean_D ‖v − u‖²."""
        return mean_square(self.v - self.u)

    @cached_property
    def compared_error(self) -> Tensor:
        """[B] mean_D ‖v_compared − u‖²."""
        return mean_square(self.v_compared - self.u)

    @property
    def v_compared(self) -> Tensor:
        """`compared`; asserts that there is one."""
        assert self.compared is not None, "the objective compares with no other policy"
        return self.compared


def ranked(error: Tensor, reference_error: Tensor, targets: Targets) -> Tensor:
    """[3, P] per group: how many judged pairs the implicit rewards reference_error − error [P, G] rank correctly (½ if
    they are equal), how many there are, and the sum of the winners' rewards minus the losers'. Ties do not count."""
    reward = reference_error - error
    difference = reward[:, :, None] - reward[:, None, :]
    verdict = torch.where(targets.counts > 0, targets.preference() - 0.5, 0.0).sign().triu(1)
    right = (difference * verdict).sign()
    of_pairs = torch.stack([(right + 1) / 2 * verdict.abs(), verdict.abs(), difference * verdict])
    return of_pairs.sum((2, 3))


def mean_square(difference: Tensor) -> Tensor:
    """[B] mean square over all elements of each sample, in fp32."""
    return difference.float().square().flatten(1).mean(1)


@dataclass(frozen=True, config=STRICT)
class EndpointObjective(Objective):
    """An objective whose loss is computed from noised final latents; rollouts are deterministic (ODE)."""

    inputs = "endpoint"

    draws: PositiveInt = 1
    """Draws of (ε, t) per sample and update, shared by the members of a group; each costs a forward and a backward."""
    times: Literal["window", "schedule", "uniform", "logit_normal"] = "window"
    """Distribution of t: window: the σ of rollout steps window_low … window_high − 1 (early steps have high noise);
    schedule: the σ of all steps; uniform on 0 … 1; logit_normal: sigmoid(N(0, 1)), as in diffusers' trainers."""


@dataclass(frozen=True, config=STRICT)
class PointwiseObjective(EndpointObjective):
    """An endpoint objective whose loss is a sum over samples."""

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """fp32 [P, G], what the loss gets for each sample: by default its advantage."""
        return targets.advantage

    @abstractmethod
    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B] losses of one draw; signal: [B], from `signal`."""


@dataclass(frozen=True, config=STRICT)
class GroupObjective(EndpointObjective):
    """An endpoint objective that compares the members of a group, through their errors d only."""

    @property
    def compares_with(self) -> Literal["", "reference", "old"]:
        """The reference policy, unless a subclass compares with the old one."""
        return "reference"

    @abstractmethod
    def loss(self, train: TrainConfig, error: Tensor, reference_error: Tensor, targets: Targets) -> Tensor:
        """[P] losses of the groups in one draw. error, reference_error: [P, G], d of the policy (with gradient) and of
        the one it is compared with; both are 0 in groups that are not trained on, whose losses are left out."""


@dataclass(frozen=True, config=STRICT)
class OldPolicy:
    """Options of objectives with an old policy, an EMA of the policy: its decay schedule."""

    decay: Share = 0.0
    """EMA decay of the old policy per training step; 0: the old policy is the one that generated the rollout."""
    decay_rate: NonNegativeFloat = 0.0
    """Increase of decay per training step."""
    decay_after: NonNegativeInt = 0
    """Training steps before decay begins to grow."""
    decay_max: Share = 0.999
    """Upper limit for the growth of decay."""

    def old_decay(self, step: int) -> float:
        """decay + decay_rate · (steps beyond decay_after), at most decay_max; after step `step` (from 0)."""
        grown = self.decay + self.decay_rate * max(0, step + 1 - self.decay_after)
        return min(grown, max(self.decay, self.decay_max))
