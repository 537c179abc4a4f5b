"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Whether a ratio is clipped is decided by its logarithm, which is exact for any clip range; exp and all sums are fp64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, native, op
from prefgrpo.ops._inputs import contiguous

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


def reference_loss(
    delta: Tensor,
    advantage: Tensor,
    weight: Tensor | None,
    kl: Tensor | None,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    kl_coef: float,
    denominator: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, metrics [8], d loss/d delta) for log-ratios `delta`, all fp64; the loss is differentiable."""
    n = max(len(delta), 1)
    norm = denominator or n
    a = advantage.clamp(-adv_clip, adv_clip)
    ratio = delta.exp()
    above = delta > math.log1p(clip_high)
    below = delta < (math.log1p(-clip_low) if clip_low < 1 else -math.inf)
    clipped = (above & (a > 0)) | (below & (a < 0))
    bounded = torch.where(above, 1 + clip_high, torch.full_like(ratio, 1 - clip_low))
    term = -a * torch.where(clipped, bounded, ratio)
    if weight is not None:
        term = term * weight
    per_sample = term if kl is None else term + kl_coef * kl
    with torch.no_grad():
        infinity = ratio.new_full((1,), torch.inf)
        metrics = torch.stack(
            [
                0.5 * delta.square().sum() / n,
                (above | below).sum() / n,
                above.sum() / n,
                below.sum() / n,
                torch.cat([ratio, infinity]).amin(),
                ratio.sum() / n,
                torch.cat([ratio, -infinity]).amax(),
                (torch.zeros_like(ratio) if kl is None else kl).sum() / n,
            ]
        )
    return per_sample.sum() / norm, metrics, torch.where(clipped, 0.0, term) / norm


@op("policy_loss", mutates=("loss", "metrics", "d_log_ratio", "d_kl"))
def _loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    weight: Tensor | None,
    kl: Tensor | None,
    log_ratio: Tensor | None,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    kl_coef: float,
    denominator: float,
    loss: Tensor,
    metrics: Tensor,
    d_log_ratio: Tensor,
    d_kl: Tensor | None,
) -> None:
    backend = backend_of(logp.device)
    options = (clip_low, clip_high, adv_clip, kl_coef, denominator)
    if backend == "torch":
        delta = (logp - logp_old if log_ratio is None else log_ratio).double()
        w, k = (None if t is None else t.double() for t in (weight, kl))
        values = reference_loss(delta, advantage.double(), w, k, *options)
        for out, value in zip((loss, metrics, d_log_ratio), values, strict=True):
            out.copy_(value)
        if d_kl is not None:
            d_kl.fill_(kl_coef / (denominator or max(len(logp), 1)))
        return
    inputs = (logp, logp_old, advantage, weight, kl, log_ratio)
    results = (loss, metrics, d_log_ratio, d_kl)
    if backend == "triton":
        from prefgrpo.kernels import policy_loss as kernels

        kernels.policy_loss(inputs, options, results)
    else:
        native(backend, "policy_loss", logp, logp.shape[0], *inputs, *options, *results)


def _run(*inputs: Any) -> tuple[Any, ...]:
    """(loss, metrics, d loss/d log-ratio, d loss/d kl)."""
    logp, kl, log_ratio, logp_old, advantage, weight, *options = inputs
    d_kl = None if kl is None else torch.empty_like(kl)
    results = logp.new_empty(()), logp.new_empty(8), torch.empty_like(logp), d_kl
    _loss(logp, logp_old, advantage, weight, kl, log_ratio, *options, *results)
    return results


class _PolicyLoss(torch.autograd.Function):
    """The gradient is computed together with the loss; backward only scales it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        loss, metrics, d_log_ratio, d_kl = _run(*inputs)
        ctx.mark_non_differentiable(metrics)
        ctx.save_for_backward(d_log_ratio, d_kl)
        ctx.of_ratio = inputs[2] is not None
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("policy_loss cannot be differentiated twice; run its backward without create_graph=True")
        d_log_ratio, d_kl = ctx.saved_tensors
        d_delta = d_log_ratio * upstream[0]
        d_kl = None if d_kl is None else d_kl * upstream[0]
        return (None, d_kl, d_delta, *[None] * 8) if ctx.of_ratio else (d_delta, d_kl, None, *[None] * 8)


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
    if logp.dim() != 1:
        raise ValueError(f"logp: expected [B], got {list(logp.shape)}")
    differentiable = False
    tensors = {"logp": logp, "kl": kl, "log_ratio": log_ratio}
    tensors |= {"logp_old": logp_old, "advantage": advantage, "weight": weight}
    for name, t in tensors.items():
        if t is None:
            continue
        if t.shape != logp.shape or t.device != logp.device:
            expected = f"{list(logp.shape)} on {logp.device}"
            raise ValueError(f"{name}: expected {expected}, got {list(t.shape)} on {t.device}")
        if t.dtype != torch.float32 and t.dtype != torch.float64:
            raise TypeError(f"{name}: expected torch.float32, got {t.dtype}")
        if t.requires_grad and torch.is_grad_enabled():
            if name not in ("logp", "kl", "log_ratio"):
                raise ValueError(f"policy_loss: gradients flow only to logp, kl, log_ratio; detach {name}")
            differentiable = True
    if not (clip_low >= 0 and high >= 0 and adv_clip >= 0):
        raise ValueError(f"clip_low, clip_high, adv_clip: expected 0 or more, got {clip_low}, {high}, {adv_clip}")
    if not abs(kl_coef) < math.inf:
        raise ValueError(f"kl_coef: expected a finite number, got {kl_coef}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator: expected more than 0, got {denominator}")
    fp32 = [None if t is None else contiguous(t, torch.float32) for t in tensors.values()]
    run: Any = _PolicyLoss.apply if differentiable else _run
    loss, metrics, *_ = run(*fp32, clip_low, high, adv_clip, kl_coef, denominator or 0.0)
    return PolicyLoss(loss, metrics)
