"""One affine step and its log-prob, for any rule.

    x' = a·x + b·v + s·ε          logp = w · mean_D (x' − a·x − b·v)² + c

Invariant: logp is scored on the value that is stored (x' after rounding to the storage dtype), with a fixed
summation order that depends on D only; the step and the replay of the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops import library
from prefgrpo.ops.args import (
    DTYPES,
    Affine,
    Guidance,
    NoiseAddress,
    check_address,
    check_affine,
    check_ids,
    refuse_second_derivative,
)
from prefgrpo.ops.backend import backend_of, implementation


class AffineStep(NamedTuple):
    """Result of `affine_step`."""

    x_next: Tensor
    """[B, …] in the storage dtype."""
    logp: Tensor
    """[B] fp32; 0 for rows without a log-prob (s = 0)."""


class AffineStepMore(NamedTuple):
    """Result of `affine_step_more`."""

    x_next: Tensor
    logp: Tensor
    mean: Tensor | None = None
    """[B, …] fp32 a·x + b·v, if asked for."""
    x0: Tensor | None = None
    """[B, …] in the storage dtype: x − σ·v, if `x0_sigma` was given."""
    copy: Tensor | None = None
    """[B, …] x' in `copy_dtype`, for the next model call."""


class AffineLogp(NamedTuple):
    """Result of `affine_logp`; all [B] fp32, differentiable in v (and guidance.uncond)."""

    logp: Tensor
    kl: Tensor | None = None
    """mean_D (b(v − v_ref))² / (2 s²) if `v_ref` was given; 0 where s = 0."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio mean_D [ε̂·(μ − μ_old)], ε̂ = (x' − μ_old)/s, if `v_old` was given; 0 where s = 0."""


def philox_normal(
    seed: int, sample: Tensor, step: Tensor, numel: int, offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Addressed N(0, 1) noise [B, numel]: elements offset … offset + numel − 1 of each sample's latent.

    sample, step: int64 [B]. The map from (seed, sample, step, element) to a number is in docs/ops.md; every backend
    gives the same to 1e-6. Raises ValueError for ids of another dtype or shape, a negative size or offset.
    """
    check_ids("sample", sample, sample.numel(), sample.device)
    check_ids("step", step, sample.numel(), sample.device)
    if numel < 0 or offset < 0:
        raise ValueError(f"numel and offset: expected 0 or more, got {numel} and {offset}")
    if torch.compiler.is_compiling():
        return library.philox_normal(library.signed(seed), sample, step, numel, offset, dtype)
    impl = implementation(backend_of(sample.device, dtype))
    return impl.normal(seed, sample, step, numel, offset, dtype)


def affine_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | None = None,
    *,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype | None = None,
    guidance: Guidance | None = None,
) -> AffineStep:
    """One denoising step of any rule, in one launch; no gradient.

    x, v: [B, …] bf16/fp16/fp32, any strides. coef: fp32 [T, 5] rows (a, b, s, w, c) with index int64 [B], or [B, 5]
    without. noise: ε like x, an address, or None (no noise is added). out_dtype: storage dtype of x' (default x's).
    guidance: v is the conditional half of a pair. Raises ValueError, TypeError or IndexError for what does not fit.
    """
    more = affine_step_more(x, v, coef, index, noise=noise, out_dtype=out_dtype, guidance=guidance)
    return AffineStep(more.x_next, more.logp)


def affine_step_more(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | None = None,
    *,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype | None = None,
    guidance: Guidance | None = None,
    want_mean: bool = False,
    x0_sigma: Tensor | None = None,
    copy_dtype: torch.dtype | None = None,
) -> AffineStepMore:
    """`affine_step` with further results of the same launch.

    want_mean: also a·x + b·v. x0_sigma: fp32 σ, one per row of coef, read at `index`: also x − σ·v. copy_dtype: also
    x' in this dtype.
    """
    a = Affine(x, v, coef, index, guidance)
    given = noise if isinstance(noise, Tensor) else None
    check_affine(a, noise=given)
    if isinstance(noise, NoiseAddress):
        noise = check_address(noise, index, x.shape[0], x.device)
    if x0_sigma is not None and (
        x0_sigma.dim() != 1 or x0_sigma.numel() < coef.shape[0] or x0_sigma.device != x.device
    ):
        raise ValueError(
            f"x0_sigma: expected [{coef.shape[0]}] on {x.device}, one σ per row of coef, got {list(x0_sigma.shape)} on "
            f"{x0_sigma.device}"
        )
    out_dtype = out_dtype or x.dtype
    if out_dtype not in DTYPES or (copy_dtype or out_dtype) not in DTYPES:
        raise TypeError(f"out_dtype and copy_dtype: expected fp32, bf16, fp16 or fp64, got {out_dtype}, {copy_dtype}")
    if torch.compiler.is_compiling():
        with torch.no_grad():
            return AffineStepMore(*library.call_step(a, noise, out_dtype, want_mean, x0_sigma, copy_dtype))
    kinds = affine_kinds(a, given) | {out_dtype, copy_dtype or out_dtype}
    impl = implementation(backend_of(x.device, *kinds))
    with torch.no_grad():
        return AffineStepMore(*impl.step(a, noise, out_dtype, want_mean, x0_sigma, copy_dtype))


def affine_logp(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | None = None,
    *,
    v_ref: Tensor | None = None,
    v_old: Tensor | None = None,
    guidance: Guidance | None = None,
) -> AffineLogp:
    """Log-prob (KL to `v_ref`, Guard log-ratio to `v_old`) of a stored step; shapes as in `affine_step`.

    The gradient flows to v, and with a guidance pair to c (= v) and u; nothing of size D is kept for it beyond the
    inputs. It cannot be differentiated twice. v_ref and v_old are velocities after guidance.
    """
    a = Affine(x, v, coef, index, guidance)
    check_affine(a, x_next=x_next, v_ref=v_ref, v_old=v_old)
    uncond = None if guidance is None else guidance.uncond
    if torch.compiler.is_compiling():
        return AffineLogp(*library.call_logp(a, x_next, v_ref, v_old))
    if torch.is_grad_enabled() and (v.requires_grad or (uncond is not None and uncond.requires_grad)):
        return AffineLogp(*_Logp.apply(v, uncond, x, x_next, coef, index, v_ref, v_old, guidance))
    impl = implementation(backend_of(x.device, *affine_kinds(a, x_next, v_ref, v_old)))
    return AffineLogp(*impl.logp(a, x_next, v_ref, v_old))


def affine_kinds(a: Affine, *more: Tensor | None) -> set[torch.dtype]:
    """The dtypes that an op on these inputs touches."""
    found = {a.x.dtype, a.v.dtype, *(t.dtype for t in more if t is not None)}
    return found if a.guidance is None else found | {a.guidance.uncond.dtype}


class _Logp(torch.autograd.Function):
    """affine_logp with its analytic gradient; only the inputs are saved."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, uncond: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, x_next, coef, index, v_ref, v_old, guidance = rest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, uncond, x, x_next, coef, index, v_ref, v_old)
        ctx.guidance = None if guidance is None else guidance[1:]
        a = Affine(x, v, coef, index, guidance)
        ctx.backend = backend_of(x.device, *affine_kinds(a, x_next, v_ref, v_old))
        return implementation(ctx.backend).logp(a, x_next, v_ref, v_old)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("affine_logp")
        v, uncond, x, x_next, coef, index, v_ref, v_old = ctx.saved_tensors
        if all(g is None for g in grads):
            return (None,) * 9
        guidance = None if uncond is None else Guidance(uncond, *ctx.guidance)
        a = Affine(x, v, coef, index, guidance)
        dv, du = implementation(ctx.backend).grad(a, x_next, v_ref, v_old, *grads)
        return dv, du, None, None, None, None, None, None, None
