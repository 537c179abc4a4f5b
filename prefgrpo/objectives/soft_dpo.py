"""DPO on the whole win matrix of a group: every comparison trains, with the verdict as it is.

    loss = mean_p (1 / pairs) Σ_{i<j, compared} ℓ(h_i − h_j, W_ij)    h = ½β(d_ref − d)
    logistic: ℓ = −W log σ(x) − (1 − W) log σ(−x)    ipo: (x − (2W − 1)·margin)²    logit: (x − logit W)²

Ties, soft verdicts and judges that contradict themselves enter as they are; pairs that were not compared do not.
∂loss/∂h_i = (1 / pairs) Σ_j (σ(h_i − h_j) − W_ij): G numbers from G² verdicts, one forward per sample.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import softplus

from prefgrpo.config.schema import STRICT, TrainConfig
from prefgrpo.objectives.base import Targets
from prefgrpo.objectives.dpo import Preference


@dataclass(frozen=True, config=STRICT)
class SoftDPO(Preference):
    """Every pair, by its verdict."""

    beta: PositiveFloat = 20.0
    """β: how strongly the policy is held to its reference; small values let it go far."""
    form: Literal["logistic", "ipo", "logit"] = "logistic"
    """logistic: cross entropy with the verdict; ipo: h_i − h_j goes to (2W − 1)·margin and no further; logit: to
    logit W."""
    margin: PositiveFloat = 0.5
    """Of ipo."""
    clip: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Verdicts are kept inside clip … 1 − clip before logit takes their logarithm."""

    @property
    def needs_comparisons(self) -> bool:
        """Yes."""
        return True

    def signal(self, train: TrainConfig, targets: Targets) -> Tensor:
        """The advantage; groups without any comparison are left out. One of ties only trains: it pulls h together."""
        return torch.where((targets.counts > 0).any(2).any(1, keepdim=True), targets.advantage, torch.nan)

    def loss(self, train: TrainConfig, error: Tensor, anchor_error: Tensor, targets: Targets) -> Tensor:
        """[n]."""
        h, w = self.strength(error, anchor_error), targets.preference()
        x, there = h[:, :, None] - h[:, None, :], (targets.counts > 0).triu(1)
        if self.form == "logistic":
            terms = softplus(x) - w * x
        else:
            target = w.clamp(self.clip, 1.0 - self.clip).logit() if self.form == "logit" else (2 * w - 1) * self.margin
            terms = (x - target).square()
        return torch.where(there, terms, 0.0).sum((1, 2)) / there.sum((1, 2)).clamp(min=1)
