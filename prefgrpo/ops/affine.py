"""One affine step and its log-prob, for any rule.

    x' = a·x + b·v + s·ε          logp = w · mean_D (x' − a·x − b·v)² + c

Invariant: logp is computed from the stored value (x' after rounding to the storage dtype), with a fixed summation
order that depends on D only; a step and its replay with the same inputs are bitwise equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.args import (
    DTYPES,
    Guidance,
    NoiseAddress,
    Normal,
    Replay,
    Step,
    as_int,
    check_affine,
    check_ids,
    check_out,
    check_step,
    copy_to,
    int32_to_int64,
    int64_seed,
    rows_index,
)


class AffineStep(NamedTuple):
    """Result of `affine_step`."""

    x_next: Tensor
    """[B, …] in the storage dtype."""
    logp: Tensor
    """[B] fp32; 0 for rows without a log-prob (s = 0)."""
    mean: Tensor | None = None
    """[B, …] fp32 a·x + b·v, if asked for."""


class AffineLogp(NamedTuple):
    """Result of `affine_logp`; all [B] fp32, differentiable in v (and guidance.uncond)."""

    logp: Tensor
    kl: Tensor | None = None
    """mean_D (b(v − v_ref))² / (2 s²) if `v_ref` was given; 0 where s = 0."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio mean_D [ε̂·(μ − μ_old)], ε̂ = (x' − μ_old)/s, if `v_old` was given; 0 where s = 0."""


def philox_normal(
    seed: int,
    sample: Tensor,
    step: Tensor,
    numel: int,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Addressed N(0, 1) noise [B, numel]: elements offset … offset + numel − 1 of each sample's latent.

    sample, step: int64 or int32 [B]. docs/ops.md defines the map from (seed, sample, step, element) to a number; the
    backends agree to 1e-6. dtype: fp32, bf16, fp16 or fp64, else TypeError. out: memory for the result. Raises
    ValueError for ids of another dtype or shape, a negative size or offset, or an `out` that does not fit.
    """
    numel, offset, sample, step = as_int(numel), as_int(offset), int32_to_int64(sample), int32_to_int64(step)
    check_ids("sample", sample, sample.numel(), sample.device)
    check_ids("step", step, sample.numel(), sample.device)
    if numel < 0 or offset < 0:
        raise ValueError(f"numel and offset: expected 0 or more, got {numel} and {offset}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected fp32, bf16, fp16 or fp64, got {dtype}")
    check_out(out, (sample.numel(), numel), dtype, sample.device)
    return copy_to(library.philox_normal(Normal(int64_seed(seed), sample, step, numel, offset, dtype, out))[0], out)


def unpack_guidance(guidance: Guidance | None) -> tuple[Tensor | None, float, bool, bool]:
    """(uncond, scale, from_cond, rescale), as in the fields of `Step` and `Replay`."""
    return guidance or (None, 0.0, False, False)


def affine_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | int | None = None,
    *,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype | None = None,
    guidance: Guidance | None = None,
    want_mean: bool = False,
    out: Tensor | None = None,
) -> AffineStep:
    """One denoising step of any rule; no gradient.

    x, v: [B, …] bf16/fp16/fp32 (fp64: computed in torch), any strides; results are contiguous. coef: fp32 [T, 5] rows
    (a, b, s, w, c), selected by index (int64 or int32 [B], or one number for all samples); without index, [B, 5].
    noise: ε like x, an address, or None (no noise). out_dtype: storage dtype of x' (default: x's). guidance: v is the
    conditional half of a pair. want_mean: also return a·x + b·v. out: memory for x'; it must not overlap an input.
    Raises ValueError, TypeError or IndexError for arguments that do not fit together.
    """
    eps, seed, sample, step, offset = None, 0, None, None, 0
    row = rows_index(index, x)
    if isinstance(noise, NoiseAddress):
        seed, sample, offset = int64_seed(noise.seed), int32_to_int64(noise.sample), as_int(noise.offset)
        step = row if noise.step is None else int32_to_int64(noise.step)
    else:
        eps = noise
    pair, dtype = unpack_guidance(guidance), out_dtype or x.dtype
    a = Step(x, v, coef, row, *pair, eps, seed, sample, step, offset, dtype, want_mean, out)
    if out is not None:
        check_out(out, x.shape, dtype, x.device, x, v, eps, pair[0])
    check_step(a)
    results = library.affine_step(a)
    results[0] = copy_to(results[0], out)
    return AffineStep(*results)


def affine_logp(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | int | None = None,
    *,
    v_ref: Tensor | None = None,
    v_old: Tensor | None = None,
    guidance: Guidance | None = None,
) -> AffineLogp:
    """Log-prob of a stored step, with its KL to `v_ref` and Guard log-ratio to `v_old`; shapes as in `affine_step`.

    The gradient flows to v, and with a guidance pair to c (= v) and u. If another input requires a gradient, ValueError
    asks to detach it. Backward keeps nothing of size D but the inputs; autograd cannot detect that inference-mode
    inputs were overwritten before it. No second derivative. v_ref and v_old are velocities after guidance.
    """
    row = rows_index(index, x)
    a = Replay(x, v, x_next, coef, row, *unpack_guidance(guidance), v_ref, v_old)
    check_affine(a, x_next=x_next, v_ref=v_ref, v_old=v_old)
    return AffineLogp(*library.affine_logp(a))
