"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i weight_i · max(−A r, −A clip(r, 1 − c_lo, 1 + c_hi)) / denominator

Whether a ratio is clipped is decided by its logarithm, which is exact for any clip range; exp and all sums are fp64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, launch, op

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
    """(loss, metrics, d loss/d delta) for log-ratios `delta` in fp64; the loss is differentiable."""
    n = max(len(delta), 1)
    a = advantage.clamp(-adv_clip, adv_clip)
    ratio = delta.exp()
    above = delta > math.log1p(clip_high)
    below = delta < (math.log1p(-clip_low) if clip_low < 1 else -math.inf)
    clipped = (above & (a > 0)) | (below & (a < 0))
    bounded = torch.where(above, 1 + clip_high, torch.full_like(ratio, 1 - clip_low))
    term = -a * torch.where(clipped, bounded, ratio)
    if weight is not None:
        term = term * weight
    total = term.sum() if kl is None else term.sum() + kl_coef * kl.sum()
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
                ratio.new_zeros(()) if kl is None else kl.sum() / n,
            ]
        )
    return total / denominator, metrics, torch.where(clipped, 0.0, term) / denominator


# logp_old None: `logp` is a log-ratio. denominator 0: the number of samples, which a compiled graph must not see
@op("policy_loss", mutates=("loss", "metrics", "d_logp", "d_kl"))
def _loss(
    logp: Tensor,
    logp_old: Tensor | None,
    advantage: Tensor,
    weight: Tensor | None,
    kl: Tensor | None,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    kl_coef: float,
    denominator: float,
    loss: Tensor,
    metrics: Tensor,
    d_logp: Tensor,
    d_kl: Tensor | None,
) -> None:
    backend = backend_of(logp.device)
    inputs = (logp, logp_old, advantage, weight, kl)
    options = (clip_low, clip_high, adv_clip, kl_coef, denominator or float(max(logp.shape[0], 1)))
    results = (loss, metrics, d_logp, d_kl)
    if backend == "torch":
        delta = logp if logp_old is None else logp - logp_old
        arguments: list[Any] = [None if t is None else t.double() for t in (delta, advantage, weight, kl)]
        arguments += options
        for out, value in zip(results[:3], reference_loss(*arguments), strict=True):
            out.copy_(value)
        if d_kl is not None:
            d_kl.fill_(kl_coef / options[-1])
    else:
        launch(backend, "policy_loss", logp, logp.shape[0], *inputs, *options, *results)


def _run(*inputs: Any) -> tuple[Tensor | None, ...]:
    """(loss, metrics, d loss/d logp, d loss/d kl)."""
    logp, *_, kl = inputs[:5]
    loss = logp.new_empty(())
    metrics = logp.new_empty(8)
    gradients = (torch.empty_like(logp), None if kl is None else torch.empty_like(kl))
    _loss(*inputs, loss, metrics, *gradients)
    return loss, metrics, *gradients


class _PolicyLoss(torch.autograd.Function):
    """`_run`, differentiable in logp and kl. The gradients are computed with the loss; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        loss, metrics, *gradients = _run(*inputs)
        ctx.mark_non_differentiable(metrics)
        ctx.save_for_backward(*gradients)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("policy_loss cannot be differentiated twice; run its backward without create_graph=True")
        d_logp, d_kl = ctx.saved_tensors
        return (d_logp * upstream, None, None, None, None if d_kl is None else d_kl * upstream, *[None] * 5)


def _fp32(name: str, t: Tensor | None, like: Tensor) -> Tensor | None:
    """`t` as contiguous fp32; raises ValueError unless it is [B] as `like`."""
    if t is None:
        return None
    if t.shape != like.shape or t.dtype not in (torch.float32, torch.float64) or t.device != like.device:
        got = f"{t.dtype} {list(t.shape)} on {t.device}"
        raise ValueError(f"{name}: expected fp32 {list(like.shape)} on {like.device}, as logp, got {got}")
    return t.float().contiguous()


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
    log_ratio: replaces logp − logp_old (Guard). denominator: default: B. A NaN makes the loss NaN. Raises ValueError
    for tensors that do not fit, for a negative or NaN clip, and if logp_old, advantage or weight requires a gradient.
    """
    high = clip_low if clip_high is None else clip_high
    if logp.dim() != 1:
        raise ValueError(f"logp: expected [B], got {list(logp.shape)}")
    if not (clip_low >= 0 and high >= 0 and adv_clip >= 0):
        raise ValueError(f"clip_low, clip_high, adv_clip: expected 0 or more, got {clip_low}, {high}, {adv_clip}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator: expected more than 0, got {denominator}")
    if logp_old.requires_grad or advantage.requires_grad or (weight is not None and weight.requires_grad):
        raise ValueError("policy_loss: no gradient flows to logp_old, advantage and weight; detach them")
    current: Any = _fp32("logp", logp, logp)
    old = _fp32("logp_old", logp_old, logp)
    if log_ratio is not None:
        current = _fp32("log_ratio", log_ratio, logp)
        old = None
    factors = (_fp32("advantage", advantage, logp), _fp32("weight", weight, logp))
    penalty = _fp32("kl", kl, logp)
    is_differentiable = current.requires_grad or (penalty is not None and penalty.requires_grad)
    run: Any = _PolicyLoss.apply if is_differentiable and torch.is_grad_enabled() else _run
    loss, metrics, *_ = run(current, old, *factors, penalty, clip_low, high, adv_clip, kl_coef, denominator or 0.0)
    return PolicyLoss(loss, metrics)
