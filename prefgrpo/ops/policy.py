"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Invariant: a masked sample contributes nothing to the loss, its gradient or a metric.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from prefgrpo.ops import args, library

P = ParamSpec("P")
R = TypeVar("R")

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


def _check(a: args.Policy) -> None:
    shape, device = a.logp.shape, a.logp.device
    if len(shape) != 1:
        raise ValueError(f"logp: expected [B], got {list(shape)}")
    for k in library.policy_loss.tensors:
        name, t = a._fields[k], a[k]
        if not isinstance(t, Tensor):
            continue
        if t.shape != shape or t.device != device:
            raise ValueError(f"{name}: expected {list(shape)} on {device}, got {list(t.shape)} on {t.device}")
        wanted = torch.bool if name == "mask" else torch.float32
        if t.dtype != wanted and (name == "mask" or t.dtype != torch.float64):
            raise TypeError(f"{name}: expected {wanted}, got {t.dtype}")
    args.check_clips(a.clip_low, a.clip_high, a.adv_clip, a.kl_coef, a.denominator)


def _arguments(
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
) -> args.Policy:
    clips = (clip_low, clip_low if clip_high is None else clip_high, adv_clip)
    if advantage.dtype == torch.float64:
        advantage = advantage.float()
    if weight is not None and weight.dtype == torch.float64:
        weight = weight.float()
    a = args.Policy(logp, logp_old, advantage, *clips, weight, mask, kl, kl_coef, log_ratio, denominator)
    _check(a)
    return a


def _takes(arguments: Callable[P, args.Policy]) -> Callable[[Callable[[args.Policy], R]], Callable[P, R]]:
    """Gives an op on checked arguments the parameters of `arguments`."""

    def decorate(op: Callable[[args.Policy], R]) -> Callable[P, R]:
        @functools.wraps(op)
        def with_parameters(*args: P.args, **kwargs: P.kwargs) -> R:
            return op(arguments(*args, **kwargs))

        returns = inspect.signature(op).return_annotation
        signature = inspect.signature(arguments).replace(return_annotation=returns)
        with_parameters.__signature__ = signature  # type: ignore[attr-defined]
        return with_parameters

    return decorate


@_takes(_arguments)
def policy_loss(a: args.Policy) -> PolicyLoss:
    """Clipped-ratio loss over B samples with its metrics, in one launch; all tensors [B] fp32 (fp64 is cast).

    weight: factor per sample on the policy term (GRPO-Guard: 1/|Δ|). mask: bool, False = left out. kl: per-sample
    KL, added as kl_coef·kl. log_ratio: replaces logp − logp_old (Guard). denominator: default the unmasked count.
    A NaN in an unmasked sample makes the loss NaN. Raises ValueError or TypeError for tensors that do not fit, for a
    clip that is negative or NaN, and where an input other than logp, log_ratio and kl requires a gradient.
    """
    return PolicyLoss(*library.policy_loss(a)[:2])


@_takes(_arguments)
def policy_loss_grad(a: args.Policy) -> PolicyGrad:
    """`policy_loss` in the functional form, (loss, metrics, gradients), for loops that own their backward."""
    with torch.no_grad():
        return PolicyGrad(*library.policy_loss(a))
