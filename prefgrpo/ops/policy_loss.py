"""The clipped policy loss of GRPO with its metrics.

    r = exp(logp − logp_old)      loss = Σ_i (w_i · max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)) + kl_coef · KL_i) / N

Whether a ratio is clipped is decided by its logarithm, which is exact for any clip range; exp and all sums are fp64.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

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
    "ratio_std",
    "ppo_kl",
)
"""Order of `PolicyLoss.metrics`. approx_kl is the mean of ½·Δ², Δ = logp − logp_old; ppo_kl, verl's name, that of −Δ;
ratio_std has n − 1 in the denominator, as torch's, and is NaN for a single number."""


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`."""

    loss: Tensor
    """fp32 scalar, or shaped like logp without reduction; differentiable in logp and kl."""
    metrics: Tensor
    """fp32 [10] in the order of `METRICS`; no gradient."""


def metrics_by_name(metrics: Tensor) -> dict[str, Tensor]:
    """`PolicyLoss.metrics` as {name: value}, still on the device."""
    return dict(zip(METRICS, metrics.unbind(-1), strict=True))


def reference_loss(
    delta: Tensor, advantage: Tensor, weight: Tensor | None, kl: Tensor | None, epsilon_low: float, epsilon_high: float,
    adv_clip: float, kl_coef: float, denominator: float, per_sample: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, metrics, d loss/d delta) for log-ratios `delta` in fp64; the loss is differentiable."""
    n = max(len(delta), 1)
    a = advantage.clamp(-adv_clip, adv_clip)
    ratio = delta.exp()
    above = delta > math.log1p(epsilon_high)
    below = delta < (math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf)
    clipped = (above & (a > 0)) | (below & (a < 0))
    bounded = torch.where(above, 1 + epsilon_high, torch.full_like(ratio, 1 - epsilon_low))
    term = -a * torch.where(clipped, bounded, ratio)
    if weight is not None:
        term = term * weight
    loss = term if kl is None else term + kl_coef * kl
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
                ratio.std() if n > 1 else ratio.new_full((), torch.nan),
                0.0 - delta.sum() / n,
            ]
        )
    return (loss if per_sample else loss.sum()) / denominator, metrics, torch.where(clipped, 0.0, term) / denominator


# denominator 0: the number of samples, which a compiled graph must not see. loss: [B], each sample's own, or []
@op("policy_loss", mutates=("loss", "metrics", "d_logp", "d_kl"))
def _loss(
    logp: Tensor, logp_old: Tensor | None, advantage: Tensor, weight: Tensor | None, kl: Tensor | None,
    epsilon_low: float, epsilon_high: float, adv_clip: float, kl_coef: float, denominator: float,
    loss: Tensor, metrics: Tensor, d_logp: Tensor, d_kl: Tensor | None,
) -> None:  # fmt: skip
    backend = backend_of(logp.device)
    batch = logp.shape[0]
    options: dict[str, Any] = {
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "adv_clip": adv_clip,
        "kl_coef": kl_coef,
    }
    options |= {"denominator": denominator or float(max(batch, 1)), "per_sample": loss.dim() == 1}
    if backend != "torch":
        options |= {"batch": batch, "logp": logp, "logp_old": logp_old, "advantage": advantage, "weight": weight}
        options |= {"kl": kl, "loss": loss, "metrics": metrics, "d_logp": d_logp, "d_kl": d_kl}
        launch(backend, "policy_loss", logp, fields=options)
        return
    delta = logp if logp_old is None else logp - logp_old
    exact: Any = [None if t is None else t.double() for t in (delta, advantage, weight, kl)]
    for out, value in zip((loss, metrics, d_logp), reference_loss(*exact, **options), strict=True):
        out.copy_(value)
    if d_kl is not None:
        d_kl.fill_(kl_coef / options["denominator"])


def _run(per_sample: bool, *inputs: Any) -> tuple[Tensor | None, ...]:
    """(loss, metrics, d loss/d logp, d loss/d kl)."""
    logp, *_, kl = inputs[:5]
    loss = torch.empty_like(logp) if per_sample else logp.new_empty(())
    metrics = logp.new_empty(len(METRICS))
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
        return (None, d_logp * upstream, None, None, None, None if d_kl is None else d_kl * upstream, *[None] * 5)


def _fp32(name: str, t: Tensor | None, like: Tensor) -> Tensor | None:
    """`t` as fp32 in one contiguous dimension; raises ValueError unless it is shaped as `like`."""
    if t is None:
        return None
    if t.shape != like.shape or t.dtype not in (torch.float32, torch.float64) or t.device != like.device:
        got = f"{t.dtype} {list(t.shape)} on {t.device}"
        raise ValueError(f"{name}: expected fp32 {list(like.shape)} on {like.device}, as logp, got {got}")
    return t.float().flatten().contiguous()


def policy_loss(
    logp: Tensor,
    logp_old: Tensor | None,
    advantage: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float | None = None,
    adv_clip: float = 5.0,
    weight: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    reduction: Literal["mean", "none"] = "mean",
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped-ratio loss with its metrics over B samples, or over [B, S], S steps of each; fp32 (fp64 is cast).

    All tensors have the shape of logp: `advantage[:, None].expand_as(logp)` is each sample's for all of its steps.
    logp_old: None if `logp` is the log-ratio itself, as GRPO-Guard's. epsilon_high: default: epsilon_low. weight:
    factor per sample on the policy term (GRPO-Guard: 1/|Δ|). kl: KL per sample. reduction: "none" returns the loss of
    each. denominator: N (default: the number of losses; 1 without reduction). A NaN makes the loss NaN. Raises
    ValueError for tensors that do not fit, a negative or NaN clip, and if logp_old, advantage or weight requires a
    gradient.
    """
    high = epsilon_low if epsilon_high is None else epsilon_high
    if logp.dim() not in (1, 2):
        raise ValueError(f"logp: expected [B] or [B, S], got {list(logp.shape)}")
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction: expected mean or none, got '{reduction}'")
    if not (epsilon_low >= 0 and high >= 0 and adv_clip >= 0):
        got = f"{epsilon_low}, {high}, {adv_clip}"
        raise ValueError(f"epsilon_low, epsilon_high, adv_clip: expected 0 or more, got {got}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator: expected more than 0, got {denominator}")
    if any(t is not None and t.requires_grad for t in (logp_old, advantage, weight)):
        raise ValueError("policy_loss: no gradient flows to logp_old, advantage and weight; detach them")
    names = ("logp", "logp_old", "advantage", "weight", "kl")
    inputs: Any = [_fp32(n, t, logp) for n, t in zip(names, (logp, logp_old, advantage, weight, kl), strict=True)]
    needs_grad = torch.is_grad_enabled() and (logp.requires_grad or (kl is not None and kl.requires_grad))
    run: Any = _PolicyLoss.apply if needs_grad else _run
    per_sample = reduction == "none"
    norm = denominator or float(per_sample)
    loss, metrics, *_ = run(per_sample, *inputs, epsilon_low, high, adv_clip, kl_coef, norm)
    return PolicyLoss(loss.view(logp.shape) if per_sample else loss, metrics)
