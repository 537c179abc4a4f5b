"""GRPO's clipped policy loss on replayed transitions (Flow-GRPO, arXiv 2505.05470, eq. 5-6).

    loss = (1 / (N·K)) Σ_{i, k} weight_k · max(−A_i r_ik, −A_i clip(r_ik)) + kl_coef · KL_ik

N is the number of samples in the whole optimiser update, over all ranks; K is the number of trained steps.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import Replayed, TrajectoryObjective
from prefgrpo.ops import PolicyLoss, policy_loss


@dataclass(frozen=True, config=STRICT)
class GRPO(TrajectoryObjective):
    """GRPO with the clipped importance ratio."""

    def loss(self, train: TrainConfig, new: Replayed, advantage: Tensor, denominator: float) -> PolicyLoss:
        """Loss of one replayed transition of B samples; `denominator` is N·K."""
        return policy_loss(
            new.logp if new.log_ratio is None else new.log_ratio,
            new.logp_old if new.log_ratio is None else None,
            advantage,
            epsilon_low=train.clip_range,
            adv_clip=train.adv_clip_max,
            weight=new.weight,
            kl=new.kl,
            kl_coef=train.kl_coef,
            denominator=denominator,
        )
