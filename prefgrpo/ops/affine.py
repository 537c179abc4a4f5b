"""One affine step and its log-prob, for any rule.

    x' = a·x + b·v + s·ε          logp = w · mean_D (x' − a·x − b·v)² + c

Invariant: logp is scored on the value that is stored (x' after rounding to the storage dtype), with a fixed
summation order that depends on D only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import reference
from prefgrpo.ops.reference import philox_normal

__all__ = ["AffineLogp", "AffineStep", "NoiseAddress", "affine_logp", "affine_step", "philox_normal"]


class NoiseAddress(NamedTuple):
    """Where ε of a batch lives: element e of sample i at step k is Philox(seed; e, k, sample id)."""

    seed: int
    """64-bit key of the run."""
    sample: Tensor
    """int64 [B], unique per sample over the run."""
    step: Tensor | None = None
    """int64 [B]; None: the row index of the coefficient table."""
    offset: int = 0
    """Global index of the latent's first element, for slices of a larger latent."""


class AffineStep(NamedTuple):
    """Result of `affine_step`."""

    x_next: Tensor
    """[B, …] in the storage dtype."""
    logp: Tensor
    """[B] fp32; 0 for rows without a log-prob (s = 0)."""


class AffineLogp(NamedTuple):
    """Result of `affine_logp`; all [B] fp32, differentiable in v."""

    logp: Tensor
    kl: Tensor | None
    """mean_D (b(v − v_ref))² / (2 s²) if `v_ref` was given."""


def _rows(coef: Tensor, index: Tensor | None, batch: int) -> Tensor:
    rows = coef if index is None else coef.index_select(0, index)
    if rows.shape != (batch, 5):
        raise ValueError(f"coef rows: expected [{batch}, 5], got {list(rows.shape)}; pass an int64 index [B] into a [T, 5] table")
    return rows


def affine_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | None = None,
    *,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype | None = None,
) -> AffineStep:
    """One denoising step of any rule.

    x, v: [B, …] bf16/fp16/fp32. coef: fp32 [T, 5] rows (a, b, s, w, c) with index int64 [B], or [B, 5] without.
    noise: ε like x, an address, or None (no noise is added). out_dtype: storage dtype of x' (default x's).
    """
    rows = _rows(coef, index, x.shape[0])
    eps: Tensor | None
    if isinstance(noise, NoiseAddress):
        step = noise.step if noise.step is not None else index
        if step is None:
            raise ValueError("an addressed noise needs a step: pass `index`, or `step` in the NoiseAddress")
        eps = philox_normal(noise.seed, noise.sample, step, x[0].numel(), noise.offset).view(x.shape)
    else:
        eps = noise
    return AffineStep(*reference.affine_step(x, v, rows, eps, out_dtype or x.dtype))


def affine_logp(
    x: Tensor, v: Tensor, x_next: Tensor, coef: Tensor, index: Tensor | None = None, *, v_ref: Tensor | None = None
) -> AffineLogp:
    """Log-prob (and KL to `v_ref`) of a stored step; shapes as in `affine_step`. Gradient flows to v only."""
    rows = _rows(coef, index, x.shape[0])
    logp = reference.affine_logp(x, v, x_next, rows)
    return AffineLogp(logp, None if v_ref is None else reference.affine_kl(v, v_ref, rows))
