"""Replay, loss and gradient of a stored step in functional form, for loops that do their own backward.

    logp (and KL, Guard log-ratio) → clipped policy loss → dv: three launches, nothing saved in between

Invariant: loss, metrics and dv are bitwise those of `affine_logp` and `policy_loss` followed by backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.affine import affine_logp, affine_step, unpack_guidance
from prefgrpo.ops.args import (
    Guidance,
    NoiseAddress,
    Replay,
    check_affine,
    check_clips,
    check_out,
    coef_rows,
    copy_to,
    rows_index,
)
from prefgrpo.ops.policy import policy_loss_grad


class ReplayGrad(NamedTuple):
    """Result of `replay_policy_grad`."""

    loss: Tensor
    """Scalar fp32."""
    dv: Tensor
    """[B, …] d loss/d v in v's dtype (d loss/d c with a guidance pair)."""
    metrics: Tensor
    """fp32 [8] in the order of `METRICS`."""
    du: Tensor | None
    """[B, …] d loss/d u of a guidance pair."""
    logp: Tensor
    """[B] fp32."""


def replay_policy_grad(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | int | None,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    v_ref: Tensor | None = None,
    v_old: Tensor | None = None,
    guidance: Guidance | None = None,
    out: Tensor | None = None,
    **loss: Any,
) -> ReplayGrad:
    """(loss, dv, metrics) of a replayed step; then `v.backward(dv)` trains the model.

    Arguments as in `affine_logp`; `loss`: options of `policy_loss` (clip_low is required). v_ref turns on the KL term,
    v_old GRPO-Guard's log-ratio. out: memory for dv; it must not overlap an input.
    """
    check_out(out, v.shape, v.dtype, v.device, x, v, x_next, v_ref, v_old, guidance and guidance.uncond)
    index = rows_index(index, x)
    with torch.no_grad():
        new = affine_logp(x, v, x_next, coef, index, v_ref=v_ref, v_old=v_old, guidance=guidance)
        p = policy_loss_grad(new.logp, logp_old, advantage, kl=new.kl, log_ratio=new.log_ratio, **loss)
        g_logp, g_guard = (p.d_log_ratio, None) if v_old is None else (None, p.d_log_ratio)
        a = Replay(x, v, x_next, coef, index, *unpack_guidance(guidance), v_ref, v_old, g_logp, p.d_kl, g_guard, out)
        dv, du = library.affine_grad(a)
    return ReplayGrad(p.loss, copy_to(dv, out), p.metrics, du, new.logp)


def on_policy_grad(
    like: Tensor,
    coef: Tensor,
    index: Tensor | int | None,
    noise: NoiseAddress,
    advantage: Tensor,
    *,
    adv_clip: float = 5.0,
    weight: Tensor | None = None,
    denominator: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dv [B, …] of the first, on-policy update (ratio 1), recomputed from the noise address alone.

    On-policy, x' − a·x − b·v = s·ε, hence dv = A·2·w·b·s / (D·denominator)·ε: x, v and x' are not read. Exact for
    latents stored in fp32; for other dtypes it differs by their rounding. like: any tensor of v's shape and dtype (its
    values are not read). out: memory for the result.
    """
    index = rows_index(index, like)
    a = Replay(like, like, like, coef, index, *unpack_guidance(None), None, None)
    check_affine(a)
    check_clips(0.0, 0.0, adv_clip, 0.0, denominator)
    batch, numel = like.shape[0], like[0].numel() if like.shape[0] else 1
    if advantage.shape != (batch,) or (weight is not None and weight.shape != (batch,)):
        got = list(advantage.shape), None if weight is None else list(weight.shape)
        raise ValueError(f"advantage and weight: expected [{batch}] each, got {got[0]} and {got[1]}")
    rows = coef_rows(a).double()
    factor = advantage.double().clamp(-adv_clip, adv_clip) * 2.0 * rows[:, 3] * rows[:, 1] * rows[:, 2]
    factor = factor / (numel * (denominator or max(batch, 1)))
    if weight is not None:
        factor = factor * weight
    scale = torch.nn.functional.pad(factor.float()[:, None], (2, 2))  # rows (0, 0, factor, 0, 0)
    zero = like.new_zeros(1, *like.shape[1:]).expand(like.shape)  # one sample of zeros, expanded to the batch
    step = noise.step if noise.step is not None else index
    return affine_step(zero, zero, scale, noise=noise._replace(step=step), out_dtype=like.dtype, out=out).x_next
