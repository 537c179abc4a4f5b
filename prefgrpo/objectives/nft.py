"""DiffusionNFT (arXiv 2509.16117): a positive and a negative policy around the old policy; no likelihood, no SDE.

    v± = v_old ± β(v − v_old)    L± = mean_D (x̂± − x0)² / w±,  x̂± = x_t − t·v±,  w± = sg mean_D |x̂± − x0|
    loss = mean_i scale · (r_i L⁺ + (1 − r_i) L⁻) / β

r_i in 0 … 1 is the probability that sample i is good: clip(A / 2A_max + ½) as published, or its win rate. The gradient,
∝ (2r − 1)(v_old − u) + β(v − v_old), repels with the fixed residual of the old policy, so it cannot grow without bound.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import OldPolicy, PointwiseObjective, Prediction, Targets, mean_square


@dataclass(frozen=True, config=STRICT)
class NFT(OldPolicy, PointwiseObjective):
    """Negative-aware fine-tuning."""

    compares_with = "old"

    optimality: Literal["advantage", "win_rate"] = "advantage"
    """r of a sample: clip(A / 2A_max + ½) with A_max = train.adv_clip_max, or its win rate."""
    beta: PositiveFloat = 1.0
    """β: distance of the positive and the negative policy from the old policy, in units of v − v_old."""
    scale: PositiveFloat | None = None
    """Factor of the loss; none: A_max with optimality advantage, as published, otherwise 1."""
    weighted: bool = True
    """Divide by the mean absolute error w; false: use the unweighted velocity error, mean_D (v± − u)²."""
    sample_with_old: bool = False
    """Generate the rollouts with the old policy, as published, instead of the current policy."""

    @property
    def needs_comparisons(self) -> bool:
        """True for optimality win_rate."""
        return self.optimality == "win_rate"

    @property
    def sampled_by_old(self) -> bool:
        """The option sample_with_old."""
        return self.sample_with_old

    @property
    def on_policy(self) -> bool:
        """True: it moves away from the policy that generated the samples."""
        return True

    def mask(self, train: TrainConfig, targets: Targets) -> Tensor:
        """Without samples whose rewards are missing: an advantage of 0 would be r = ½."""
        return super().mask(train, targets) & targets.known

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """r [P, G]."""
        if self.optimality == "win_rate":
            return targets.win_rate()
        return (targets.advantage / (2.0 * train.adv_clip_max) + 0.5).clamp(0.0, 1.0)

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        v_old = p.v_compared
        moved = self.beta * (p.v - v_old)
        parts = [(v_old + moved - p.u, signal), (v_old - moved - p.u, 1.0 - signal)]
        scale = self.scale or (train.adv_clip_max if self.optimality == "advantage" else 1.0)
        return sum(share * self._error(e, p.t) for e, share in parts) * (scale / self.beta)  # type: ignore[return-value]

    def _error(self, e: Tensor, t: Tensor) -> Tensor:
        """[B] of the velocity's error e [B, …]; x̂ − x0 = −t·e."""
        if not self.weighted:
            return mean_square(e)
        return t.square() * mean_square(e) / (t * e.detach().double().abs().flatten(1).mean(1)).clamp(min=1e-5).float()
