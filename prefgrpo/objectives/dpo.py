"""Online Diffusion-DPO (arXiv 2311.12908) on the best and the worst sample of every group.

    loss = mean_p −log σ(h_best − h_worst)    h = ½β(d_ref − d)

Both share ε and t, as published. Groups whose rewards are all equal are skipped.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import GroupObjective, OldPolicy, Targets


@dataclass(frozen=True, config=STRICT)
class Preference(OldPolicy, GroupObjective):
    """Base of the objectives that compare members by h = ½β(d_ref − d)."""

    beta: PositiveFloat = 100.0
    """β: strength of the regularisation towards the reference; smaller values let the policy move further."""
    reference: Literal["initial", "old"] = "initial"
    """The policy that d_ref comes from: the initial one, or an old policy, an EMA of the policy with `decay` (0: the
    weights that generated the rollout)."""

    @property
    def compares_with(self) -> Literal["", "reference", "old"]:
        """That of `reference`."""
        return "old" if self.reference == "old" else "reference"

    @property
    def on_policy(self) -> bool:
        """Whether the reference is the policy that generated the samples."""
        return self.reference == "old" and not (self.decay or self.decay_rate)

    def strength(self, error: Tensor, reference_error: Tensor) -> Tensor:
        """h [P, G]."""
        return 0.5 * self.beta * (reference_error - error)


@dataclass(frozen=True, config=STRICT)
class DPO(Preference):
    """The best member against the worst."""

    def loss(self, train: TrainConfig, error: Tensor, reference_error: Tensor, targets: Targets) -> Tensor:
        """[P]."""
        h = self.strength(error, reference_error)
        advantage = targets.advantage
        best, worst = advantage.argmax(1, keepdim=True), advantage.argmin(1, keepdim=True)
        return -logsigmoid(h.gather(1, best) - h.gather(1, worst))[:, 0]
