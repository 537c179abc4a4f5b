"""The clipped policy loss of GRPO with its metrics.

r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.args import Policy, check_clips

METRICS = (
    "approx_kl",
    "clip_fraction",
    "clip_fraction_high",
    "clip_fraction_low",
    "ratio_min",
    "ratio_mean",
    "ratio_max",
    "kl",
)
"""Order of `PolicyLoss.metrics`."""


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`."""

    loss: Tensor
    """fp32 scalar; differentiable in logp, log_ratio and kl."""
    metrics: Tensor
    """fp32 [8] in the order of `METRICS`; no gradient."""


def metrics_by_name(metrics: Tensor) -> dict[str, Tensor]:
    """`PolicyLoss.metrics` as {name: value}, still on the device."""
    return dict(zip(METRICS, metrics.unbind(-1), strict=True))


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    adv_clip: float = 5.0,
    weight: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    log_ratio: Tensor | None = None,
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped-ratio loss over B samples with its metrics, in one launch; all tensors [B] fp32 (fp64 is cast).

    weight: factor per sample on the policy term (GRPO-Guard: 1/|Δ|). kl: KL per sample, added as kl_coef·kl.
    log_ratio: replaces logp − logp_old (Guard). denominator: default: B. A NaN makes the loss NaN. Raises ValueError or
    TypeError for tensors that do not fit, for a negative or NaN clip, and if an input other than logp, log_ratio and kl
    requires a gradient.
    """
    high = clip_low if clip_high is None else clip_high
    a = Policy(logp, logp_old, advantage, clip_low, high, adv_clip, weight, kl, kl_coef, log_ratio, denominator)
    loss, metrics, *_ = library.policy_loss(_checked(a))
    return PolicyLoss(loss, metrics)


def _checked(a: Policy) -> Policy:
    """`a` with advantage and weight in fp32; raises the errors of `policy_loss`."""
    shape, device = a.logp.shape, a.logp.device
    if len(shape) != 1:
        raise ValueError(f"logp: expected [B], got {list(shape)}")
    for k in library.policy_loss.tensors:
        name: str = a._fields[k]
        t: Any = a[k]
        if t is None:
            continue
        if t.shape != shape or t.device != device:
            raise ValueError(f"{name}: expected {list(shape)} on {device}, got {list(t.shape)} on {t.device}")
        if t.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name}: expected torch.float32, got {t.dtype}")
    check_clips(a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator)
    if a.advantage.dtype == torch.float64:
        a = a._replace(advantage=a.advantage.float())
    if a.weight is not None and a.weight.dtype == torch.float64:
        a = a._replace(weight=a.weight.float())
    return a
