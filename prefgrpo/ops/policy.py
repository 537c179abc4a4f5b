"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Invariant: a masked sample contributes nothing to the loss, its gradient or a metric.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

METRICS = ("approx_kl", "clip_fraction", "clip_fraction_high", "clip_fraction_low", "ratio_min", "ratio_mean", "ratio_max", "kl")
"""Order of `PolicyLoss.metrics`."""


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`."""

    loss: Tensor
    """Scalar fp32, differentiable in logp, log_ratio and kl."""
    metrics: Tensor
    """fp32 [8] in the order of `METRICS`, over the unmasked samples; no gradient."""


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    adv_clip: float = 5.0,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    log_ratio: Tensor | None = None,
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped-ratio loss over B samples; all tensors [B] fp32.

    weight: factor per sample on the policy term (GRPO-Guard: 1/|Δ|). mask: bool, False = left out. kl: per-sample
    KL, added as kl_coef·kl. log_ratio: replaces logp − logp_old (Guard). denominator: default the unmasked count.
    """
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    delta = logp - logp_old if log_ratio is None else log_ratio
    ratio = torch.exp(torch.where(keep, delta, torch.zeros_like(delta)))
    adv = torch.where(keep, advantage, torch.zeros_like(advantage)).clamp(-adv_clip, adv_clip)
    high = clip_low if clip_high is None else clip_high
    per_sample = torch.maximum(-adv * ratio, -adv * ratio.clamp(1.0 - clip_low, 1.0 + high))
    if weight is not None:
        per_sample = per_sample * weight
    kl_term = torch.zeros_like(logp) if kl is None else torch.where(keep, kl, torch.zeros_like(kl))
    count = keep.sum().clamp_min(1)
    total = torch.where(keep, per_sample + kl_coef * kl_term, torch.zeros_like(logp)).sum()
    loss = total / (count if denominator is None else denominator)
    with torch.no_grad():
        above, below = (ratio > 1.0 + high) & keep, (ratio < 1.0 - clip_low) & keep
        metrics = torch.stack(
            [
                0.5 * torch.where(keep, delta, torch.zeros_like(delta)).square().sum() / count,
                (above | below).sum() / count,
                above.sum() / count,
                below.sum() / count,
                torch.where(keep, ratio, torch.full_like(ratio, torch.inf)).min(),
                torch.where(keep, ratio, torch.zeros_like(ratio)).sum() / count,
                torch.where(keep, ratio, torch.full_like(ratio, -torch.inf)).max(),
                kl_term.sum() / count,
            ]
        )
    return PolicyLoss(loss, metrics)
