"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Invariant: a masked sample contributes nothing to the loss, its gradient or a metric.
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
    """fp32 scalar, or [T] if logp is [B, T]; differentiable in logp, log_ratio and kl."""
    metrics: Tensor
    """fp32 [8] in the order of `METRICS`, or [T, 8], over the unmasked samples; no gradient."""


class PolicyGrad(NamedTuple):
    """Result of `policy_loss_grad`."""

    loss: Tensor
    metrics: Tensor
    d_log_ratio: Tensor
    """[B], or [B, T]: d loss/d logp (or d log_ratio)."""
    d_kl: Tensor | None
    """d loss/d kl, likewise."""


def metrics_by_name(metrics: Tensor) -> dict[str, Tensor]:
    """`PolicyLoss.metrics` as {name: value, or [T] values}, still on the device."""
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
    mask: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    log_ratio: Tensor | None = None,
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped-ratio loss over B samples with its metrics, in one launch; all tensors [B] fp32 (fp64 is cast).

    logp [B, T] gives T losses over B samples each, in one launch; the other tensors are [B, T], or [B] for all T.
    weight: factor per sample on the policy term (GRPO-Guard: 1/|Δ|). mask: bool, False = left out. kl: KL per sample,
    added as kl_coef·kl. log_ratio: replaces logp − logp_old (Guard). denominator: default: number of unmasked samples.
    A NaN in an unmasked sample makes its loss NaN. Raises ValueError or TypeError for tensors that do not fit, for a
    negative or NaN clip, and if an input other than logp, log_ratio and kl requires a gradient.
    """
    high = clip_low if clip_high is None else clip_high
    a = Policy(logp, logp_old, advantage, clip_low, high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator)
    loss, metrics, *_ = library.policy_loss(_checked(a))
    return PolicyLoss(loss, metrics)


def policy_loss_grad(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    **options: Any,
) -> PolicyGrad:
    """`policy_loss` with explicit gradients, for loops that do their own backward; same arguments."""
    a = Policy(logp, logp_old, advantage, clip_low, clip_low if clip_high is None else clip_high, **options)
    with torch.no_grad():
        return PolicyGrad(*library.policy_loss(_checked(a)))


def _checked(a: Policy) -> Policy:
    """`a` with advantage and weight in fp32; raises the errors of `policy_loss`."""
    shape, device = a.logp.shape, a.logp.device
    if len(shape) not in (1, 2) or 0 in shape[1:]:
        raise ValueError(f"logp: expected [B] or [B, T], got {list(shape)}")
    for k in library.policy_loss.tensors:
        name: str = a._fields[k]
        t: Any = a[k]
        if t is None:
            continue
        if len(shape) == 2 and t.shape == shape[:1]:
            t = t[:, None].expand(shape)
            a = Policy(**(a._asdict() | {name: t}))
        if t.shape != shape or t.device != device:
            raise ValueError(f"{name}: expected {list(shape)} on {device}, got {list(t.shape)} on {t.device}")
        wanted = torch.bool if name == "mask" else torch.float32
        if t.dtype != wanted and (name == "mask" or t.dtype != torch.float64):
            raise TypeError(f"{name}: expected {wanted}, got {t.dtype}")
    check_clips(a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator)
    if a.advantage.dtype == torch.float64:
        a = a._replace(advantage=a.advantage.float())
    if a.weight is not None and a.weight.dtype == torch.float64:
        a = a._replace(weight=a.weight.float())
    return a
