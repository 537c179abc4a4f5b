"""GELU (tanh approximation) of a linear layer with a LoRA: gelu(x + small · upᵀ).

x is the base layer's output, small that of the LoRA's A. In Triton the sum stays in registers, in fp32; the reference
rounds it to x's dtype, as separate operators do. Invariants: a row of the result depends on that row alone, and has the
same bits with and without gradient; an up of zeros changes nothing. Backward keeps x and small and recomputes the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import unit_stride


def reference_gelu(x: Tensor, small: Tensor | None, up: Tensor | None) -> Tensor:
    """gelu(x + small · upᵀ)."""
    z = x if small is None or up is None else torch.addmm(x, small, up.t())
    return F.gelu(z, approximate="tanh")


@op("low_rank_gelu", mutates=("out",))
def _gelu(x: Tensor, small: Tensor | None, up: Tensor | None, out: Tensor) -> None:
    if out.numel():
        launch("triton", "low_rank_gelu", x, x.contiguous(), unit_stride(small), _whole(up), out)


@op("low_rank_gelu_grad", mutates=("dz",))
def _grad(x: Tensor, small: Tensor | None, up: Tensor | None, g: Tensor, dz: Tensor) -> None:
    if dz.numel():
        launch("triton", "low_rank_gelu_grad", x, x.contiguous(), unit_stride(small), _whole(up), g.contiguous(), dz)


def _whole(up: Tensor | None) -> Tensor | None:
    return None if up is None else up.contiguous()


def _run(x: Tensor, small: Tensor | None, up: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape)
    _gelu(x, small, up, out)
    return out


class _LowRankGelu(torch.autograd.Function):
    """`_run`, differentiable in all three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor | None, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, small, up)
        return _run(x, small, up)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("low_rank_gelu cannot be differentiated twice")
        x, small, up = ctx.saved_tensors
        dz = x.new_empty(x.shape)
        _grad(x, small, up, g, dz)
        if small is None:
            return dz, None, None
        return dz, dz @ up, dz.t() @ small


def low_rank_gelu(x: Tensor, small: Tensor | None, up: Tensor | None) -> Tensor:
    """gelu(x + small · upᵀ) [N, C] in x's dtype; differentiable in all three, once.

    x: [N, C] bf16 or fp32 (fp16 and fp64: in torch). small [N, r] and up [C, r] in x's dtype, or both None.
    Raises ValueError for arguments that do not fit together.
    """
    if small is not None and up is not None:
        want = (x.shape, x.dtype, x.dtype)
        found = ((small.shape[0], up.shape[0]), small.dtype, up.dtype)
        if found != want or small.shape[1:] != up.shape[1:]:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not fit small {list(small.shape)} {small.dtype} "
                f"and up {list(up.shape)} {up.dtype}: expected [N, C], [N, r] and [C, r] of one dtype"
            )
    if triton_or_torch(x.device, x.dtype) == "torch":
        return reference_gelu(x, small, up)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, small, up))
    run: Any = _LowRankGelu.apply if needs_grad else _run
    return run(x, small, up)
