"""DiffusionNFT (arXiv 2509.16117): a positive and a negative policy around the old one, no likelihood and no SDE.

    v± = v_old ± β(v − v_old)    L± = mean_D (x̂± − x0)² / w±,  x̂± = x_t − t·v±,  w± = sg mean_D |x̂± − x0|
    loss = mean_i scale · (r_i L⁺ + (1 − r_i) L⁻) / β

r_i in 0 … 1 is the probability that sample i is good: clip(A / 2A_max + ½) as published, or its win rate. The gradient
holds the residual of the old policy, (2r − 1)(v_old − u) + β(v − v_old): what pushes away cannot grow without bound.
"""

from __future__ import annotations

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import (
    OptimalityObjective,
    PointwiseObjective,
    Prediction,
    Targets,
    mean_square,
    where_known,
)


@dataclass(frozen=True, config=STRICT)
class NFT(OptimalityObjective, PointwiseObjective):
    """Negative-aware fine-tuning."""

    weighs_advantages = True

    beta: PositiveFloat = 1.0
    """β: how far the positive and the negative policy lie from the old one."""
    scale: PositiveFloat | None = None
    """Factor of the loss; none: A_max with optimality advantage, as published, else 1."""
    weighted: bool = True
    """Divide by the mean absolute error w; off: the plain error of the velocity, mean_D (v± − u)²."""
    sample_with_old: bool = False
    """Let the old policy make the rollouts, as published, instead of the policy."""

    @property
    def sampled_by_old(self) -> bool:
        """As the option says."""
        return self.sample_with_old

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """r [P, G]."""
        return where_known(self.probability(train, targets), targets)

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        moved = self.beta * (p.v - p.beside)
        parts = [(p.beside + moved - p.u, signal), (p.beside - moved - p.u, 1.0 - signal)]
        scale = self.scale or (train.adv_clip_max if self.optimality == "advantage" else 1.0)
        return sum(share * self._error(e, p.t) for e, share in parts) * (scale / self.beta)  # type: ignore[return-value]

    def _error(self, e: Tensor, t: Tensor) -> Tensor:
        """[B] of the velocity's error e [B, …]; x̂ − x0 = −t·e."""
        if not self.weighted:
            return mean_square(e)
        return t.square() * mean_square(e) / (t * e.detach().double().abs().flatten(1).mean(1)).clamp(min=1e-5).float()
