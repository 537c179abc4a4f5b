"""LayerNorm without weights and modulation (adaLN): y = (x − mean)/√(variance + eps) · (1 + scale) + shift over C.

In Triton, y is computed in fp32 and rounded once; the reference rounds where diffusers' modules do. Invariants: y of a
token depends on that token and its sample's vectors alone, and has the same bits with and without gradient. Backward
keeps x and scale, and computes the statistics again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import check_tokens, unit_stride


def reference_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """y, as AdaLayerNormZero computes it, and in fp32 where the vectors are, as Wan's blocks do."""
    dtype = torch.promote_types(x.dtype, scale.dtype)
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps)
    return (normed * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


@op("layernorm_modulate", mutates=("out",))
def _modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float, out: Tensor) -> None:
    if out.numel():
        launch("triton", "layernorm_modulate", x, *map(unit_stride, (x, shift, scale)), eps, out)


@op("layernorm_modulate_grad", mutates=("dx", "d_shift", "d_scale"))
def _grad(
    x: Tensor, scale: Tensor, g: Tensor, eps: float, dx: Tensor, d_shift: Tensor | None, d_scale: Tensor | None
) -> None:
    launch("triton", "layernorm_modulate_grad", x, *map(unit_stride, (x, scale, g)), eps, dx, d_shift, d_scale)


def _run(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    _modulate(x, shift, scale, eps, out)
    return out


class _Modulate(torch.autograd.Function):
    """`_run`, differentiable in x, shift and scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.eps = eps
        ctx.shift_dtype = shift.dtype
        return _run(x, shift, scale, eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("layernorm_modulate cannot be differentiated twice")
        x, scale = ctx.saved_tensors
        _, wants_shift, wants_scale, _ = ctx.needs_input_grad
        dx = x.new_empty(x.shape)
        d_shift = scale.new_empty(scale.shape, dtype=ctx.shift_dtype) if wants_shift else None
        d_scale = scale.new_empty(scale.shape) if wants_scale else None
        _grad(x, scale, g, ctx.eps, dx, d_shift, d_scale)
        return dx, d_shift, d_scale, None


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm(x)·(1 + scale) + shift, [B, S, C] in x's dtype; differentiable in x, shift and scale, once.

    x: bf16 or fp32 (fp16 and fp64: in torch). shift, scale: [B, C] in x's dtype or in fp32. Views whose last dimension
    is contiguous (a slice of the tokens, chunks of [B, 6 C], expanded ones) are read in place, others copied.
    Raises ValueError or TypeError for arguments that do not fit together.
    """
    check_tokens(x, {}, {"shift": shift, "scale": scale})
    if triton_or_torch(x.device, x.dtype, shift.dtype, scale.dtype) == "torch":
        return reference_modulate(x, shift, scale, eps)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or shift.requires_grad or scale.requires_grad)
    run: Any = _Modulate.apply if needs_grad else _run
    return run(x, shift, scale, eps)
