"""Concatenation in blocks without the copies of torch.cat.

`join` and `split`: streams that the previous block left adjacent in memory are joined without a copy, and so are their
gradients. `beside_gelu` and `beside_swiglu` write an activation next to attention's output, where the
projection reads both.
Invariant: values and gradients have the bits that torch.cat gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """torch.cat([a, b], 1), in place if b's tokens follow a's in memory, sample by sample."""
    same_kind = (a.dtype, a.stride(), a.shape[:1], a.shape[2:]) == (b.dtype, b.stride(), b.shape[:1], b.shape[2:])
    start = a.storage_offset()
    follows = b.storage_offset() == start + a.shape[1] * a.stride(1)
    if not (same_kind and follows and a.untyped_storage()._cdata == b.untyped_storage()._cdata):
        return torch.cat([a, b], 1)
    return a.as_strided((len(a), a.shape[1] + b.shape[1], *a.shape[2:]), a.stride(), start)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.count = a.shape[1]
        return _joined(a.detach(), b.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g[:, : ctx.count], g[:, ctx.count :]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        x = x.detach()
        return x[:, :count], x[:, count:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return _joined(a, b), None


def join(a: Tensor, b: Tensor) -> Tensor:
    """torch.cat([a, b], 1) of [B, M, C] and [B, N, C]; shares their memory if they come from `split`."""
    return _Join.apply(a, b)


def split(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens and the others, in the memory of x [B, S, C]."""
    return _Split.apply(x, count)


class _Beside(torch.autograd.Function):
    """Concatenates attention's output and an activation, given as two functions: `write` and `gradients`."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, write: Callable[..., Any], gradients: Callable[..., Any], *inputs: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.width = attended.shape[-1]
        ctx.save_for_backward(*inputs)
        out = attended.new_empty(*attended.shape[:-1], ctx.width + inputs[0].shape[-1])
        out[..., : ctx.width] = attended
        write(*inputs, out=out[..., ctx.width :])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g[..., : ctx.width], None, None, *ctx.gradients(g[..., ctx.width :], *ctx.saved_tensors)


def beside_gelu(attended: Tensor, x: Tensor, approximate: str) -> Tensor:
    """[attended, gelu(x)], [B, S, C + C'] of [B, S, C] and [B, S, C']."""

    def write(x: Tensor, out: Tensor) -> None:
        torch.ops.aten.gelu.out(x, approximate=approximate, out=out)

    def gradients(g: Tensor, x: Tensor) -> tuple[Tensor]:
        return (torch.ops.aten.gelu_backward(g, x, approximate=approximate),)

    return _Beside.apply(attended, write, gradients, x)


def beside_swiglu(attended: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """[attended, silu(gate) · x], [B, S, C + C'] of [B, S, C] and twice [B, S, C']."""

    def write(gate: Tensor, x: Tensor, out: Tensor) -> None:
        torch.mul(F.silu(gate), x, out=out)

    def gradients(g: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.silu_backward(g * x, gate), g * F.silu(gate)

    return _Beside.apply(attended, write, gradients, gate, x)
