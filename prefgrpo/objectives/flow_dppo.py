"""Flow-DPPO: a trust region in KL instead of a clipped ratio.

    loss = (1 / (N·K)) Σ −A r · [KL(old, new) < δ, or r moves back to 1]    KL = mean_D (μ − μ_old)² / 2s²

The gradient moves r away from 1 where r > 1 and A > 0, or r < 1 and A < 0. Source: verl-omni's FlowDPPOLoss.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import Replayed
from prefgrpo.objectives.grpo import GRPO
from prefgrpo.ops import METRICS, PolicyLoss


@dataclass(frozen=True, config=STRICT)
class FlowDPPO(GRPO):
    """GRPO with a masked ratio instead of a clipped one; the clip-fraction metrics report the masked shares."""

    keeps_velocity = True

    kl_threshold: PositiveFloat = 1e-5
    """δ, the limit of the mean KL per latent element."""

    def loss(self, train: TrainConfig, new: Replayed, advantage: Tensor, denominator: float) -> PolicyLoss:
        """Loss of one replayed step of B samples; `denominator` is N·K."""
        assert new.kl_old is not None
        moved, far = (new.logp - new.logp_old).detach(), new.kl_old >= self.kl_threshold
        above, below = far & (moved > 0) & (advantage > 0), far & (moved < 0) & (advantage < 0)
        kept = (~(above | below)).float()
        weight = kept if new.weight is None else kept * new.weight
        unclipped = replace(train, clip_range=1.0, clip_range_high=1e30)
        out = super().loss(unclipped, new._replace(weight=weight, log_ratio=None), advantage, denominator)
        metrics = out.metrics.clone()
        for name, masked in (
            ("clip_fraction", above | below),
            ("clip_fraction_high", above),
            ("clip_fraction_low", below),
        ):
            metrics[METRICS.index(name)] = masked.float().mean()
        return PolicyLoss(out.loss, metrics)
