"""DPO on the whole win matrix of a group: every comparison is a term, with its verdict as a soft label.

    loss = mean_p (1 / pairs) Σ_{i<j, compared} ℓ(h_i − h_j, W_ij)    h = ½β(d_ref − d)
    logistic: ℓ = −W log σ(x) − (1 − W) log σ(−x)    ipo: (x − (2W − 1)·margin)²    logit: (x − logit W)²

Ties, soft verdicts and inconsistent verdicts are used unchanged; pairs that were not compared are skipped. As
∂loss/∂h_i = (1 / pairs) Σ_j (σ(h_i − h_j) − W_ij), all G² verdicts cost only one forward per sample.
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
    """DPO on every compared pair, with its verdict as label."""

    needs_comparisons = True

    beta: PositiveFloat = 20.0
    """β: strength of the regularisation towards the reference; smaller values let the policy move further."""
    form: Literal["logistic", "ipo", "logit"] = "logistic"
    """logistic: cross entropy with the verdict; ipo: regress h_i − h_j on (2W − 1)·margin; logit: regress it on
    logit W."""
    margin: PositiveFloat = 0.5
    """Margin of ipo."""
    clip: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Verdicts are clipped to clip … 1 − clip before logit takes their logarithm."""

    def mask(self, train: TrainConfig, targets: Targets) -> Tensor:
        """All groups with a comparison, those that are all ties too: they pull h together."""
        return (targets.counts > 0).any(2).any(1, keepdim=True).expand_as(targets.advantage)

    def loss(self, train: TrainConfig, error: Tensor, reference_error: Tensor, targets: Targets) -> Tensor:
        """[P]."""
        h, w = self.strength(error, reference_error), targets.preference()
        x = h[:, :, None] - h[:, None, :]
        there = (targets.counts > 0).triu(1)
        if self.form == "logistic":
            terms = softplus(x) - w * x
        else:
            target = w.clamp(self.clip, 1.0 - self.clip).logit() if self.form == "logit" else (2 * w - 1) * self.margin
            terms = (x - target).square()
        return torch.where(there, terms, 0.0).sum((1, 2)) / there.sum((1, 2)).clamp(min=1)
