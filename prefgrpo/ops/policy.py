"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Invariant: a masked sample contributes nothing to the loss, its gradient or a metric.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.args import refuse_second_derivative
from prefgrpo.ops.backend import backend_of, implementation

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
    """Scalar fp32, differentiable in logp, log_ratio and kl."""
    metrics: Tensor
    """fp32 [8] in the order of `METRICS`, over the unmasked samples; no gradient."""


class PolicyGrad(NamedTuple):
    """Result of `policy_loss_grad`."""

    loss: Tensor
    metrics: Tensor
    d_log_ratio: Tensor
    """[B] d loss/d logp (or d log_ratio)."""
    d_kl: Tensor | None
    """[B] d loss/d kl."""


def _check(logp: Tensor, clips: tuple[float, float, float], denominator: float | None, **others: Tensor | None) -> None:
    if logp.dim() != 1:
        raise ValueError(f"logp: expected [B], got {list(logp.shape)}")
    for name, t in (("logp", logp), *others.items()):
        if t is None:
            continue
        if t.shape != logp.shape or t.device != logp.device:
            raise ValueError(f"{name}: expected {list(logp.shape)} on {logp.device}, got {list(t.shape)} on {t.device}")
        wanted = torch.bool if name == "mask" else torch.float32
        if t.dtype not in (wanted, torch.float64 if wanted == torch.float32 else wanted):
            raise TypeError(f"{name}: expected {wanted}, got {t.dtype}")
    if min(clips) < 0:
        raise ValueError(f"clip_low, clip_high, adv_clip: expected 0 or more, got {clips}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator: expected more than 0, got {denominator}")


def _implementation(*given: Tensor | None) -> Any:
    """The backend for these tensors; one in fp64 makes it torch."""
    kinds = [t.dtype for t in given if t is not None]
    device = next(t.device for t in given if t is not None)
    return implementation(backend_of(device, *kinds))


class _Policy(torch.autograd.Function):
    """The gradient is known when the loss is; backward scales it."""

    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, log_ratio: Tensor | None, kl: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        impl, logp_old, advantage, clip_low, clip_high, adv_clip, weight, mask, kl_coef, denominator = rest
        loss, metrics, d_delta, d_kl = impl.policy(
            logp, logp_old, advantage, clip_low, clip_high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator
        )
        ctx.save_for_backward(d_delta, d_kl)
        ctx.from_ratio = log_ratio is not None
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("policy_loss")
        d_delta, d_kl = ctx.saved_tensors
        delta = d_delta * grad
        kl = None if d_kl is None else d_kl * grad
        return (None, delta, kl, *(None,) * 10) if ctx.from_ratio else (delta, None, kl, *(None,) * 10)


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
    """Clipped-ratio loss over B samples with its metrics, in one launch; all tensors [B] fp32.

    weight: factor per sample on the policy term (GRPO-Guard: 1/|Δ|). mask: bool, False = left out. kl: per-sample
    KL, added as kl_coef·kl. log_ratio: replaces logp − logp_old (Guard). denominator: default the unmasked count.
    A NaN in an unmasked sample makes the loss NaN. Raises ValueError or TypeError for tensors that do not fit.
    """
    high = clip_low if clip_high is None else clip_high
    _check(
        logp,
        (clip_low, high, adv_clip),
        denominator,
        logp_old=logp_old,
        advantage=advantage,
        weight=weight,
        mask=mask,
        kl=kl,
        log_ratio=log_ratio,
    )
    if torch.compiler.is_compiling():
        out = library.policy_loss(
            logp, logp_old, advantage, clip_low, high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator
        )
        return PolicyLoss(out[0], out[1])
    impl = _implementation(logp, logp_old, advantage, weight, kl, log_ratio)
    return PolicyLoss(
        *_Policy.apply(
            logp,
            log_ratio,
            kl,
            impl,
            logp_old.detach(),
            advantage,
            clip_low,
            high,
            adv_clip,
            weight,
            mask,
            kl_coef,
            denominator,
        )
    )


def policy_loss_grad(
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
) -> PolicyGrad:
    """`policy_loss` in the functional form, (loss, metrics, gradients), for loops that own their backward."""
    high = clip_low if clip_high is None else clip_high
    _check(
        logp,
        (clip_low, high, adv_clip),
        denominator,
        logp_old=logp_old,
        advantage=advantage,
        weight=weight,
        mask=mask,
        kl=kl,
        log_ratio=log_ratio,
    )
    if torch.compiler.is_compiling():
        with torch.no_grad():
            out = library.policy_loss(
                logp, logp_old, advantage, clip_low, high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator
            )
        return PolicyGrad(out[0], out[1], out[2], None if kl is None else out[3])
    impl = _implementation(logp, logp_old, advantage, weight, kl, log_ratio)
    with torch.no_grad():
        return PolicyGrad(
            *impl.policy(
                logp, logp_old, advantage, clip_low, high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator
            )
        )
