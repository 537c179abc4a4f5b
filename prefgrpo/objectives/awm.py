"""Advantage-weighted matching (AWM, arXiv 2509.25050): the flow-matching loss replaces the log-likelihood.

    ℓ = −weight(t)·d    r = exp(ℓ − ℓ_old)    loss = mean_i max(−A_i r_i, −A_i clip(r_i))

Without `ratio` the loss is −A_i ℓ_i, which has the same gradient as long as the samples are on-policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import OldPolicy, PointwiseObjective, Prediction

HUBER_POWER = 0.25


@dataclass(frozen=True, config=STRICT)
class AWM(OldPolicy, PointwiseObjective):
    """Advantage-weighted matching."""

    weight: Literal["uniform", "t", "t2", "huber", "ghuber"] = "uniform"
    """ℓ(d): −d, −t·d, −t²·d, −t·(√(d + 1e-10) − 1e-5), or −t·((d + 1e-10)^p − 1e-10^p) / p with p = ¼."""
    ratio: bool = False
    """Clip the ratio to the old policy (train.clip_range), for several updates per rollout; costs another forward."""

    @property
    def compares_with(self) -> Literal["", "reference", "old"]:
        """The old policy, if the ratio is used."""
        return "old" if self.ratio else ""

    @property
    def on_policy(self) -> bool:
        """True: it is a policy gradient, which lets the errors of bad samples grow without bound."""
        return True

    def log_likelihood(self, error: Tensor, t: Tensor) -> Tensor:
        """[B] ℓ."""
        if self.weight == "huber":
            return -t * ((error + 1e-10).sqrt() - 1e-5)
        if self.weight == "ghuber":
            return -t * ((error + 1e-10) ** HUBER_POWER - 1e-10**HUBER_POWER) / HUBER_POWER
        return -error * {"uniform": torch.ones_like(t), "t": t, "t2": t.square()}[self.weight]

    def loss(self, train: TrainConfig, p: Prediction, signal: Tensor) -> Tensor:
        """[B]."""
        advantage = signal.clamp(-train.adv_clip_max, train.adv_clip_max)
        new = self.log_likelihood(p.error, p.t)
        if not self.ratio:
            return -advantage * new
        ratio = torch.exp(new - self.log_likelihood(p.compared_error, p.t))
        clipped = ratio.clamp(1.0 - train.clip_range, 1.0 + train.clip_range)
        return torch.maximum(-advantage * ratio, -advantage * clipped)
