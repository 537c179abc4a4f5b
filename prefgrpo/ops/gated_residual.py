"""The gated residual of a transformer block: x + gate · y.

In Triton it is computed in fp32 and rounded once; the reference rounds where diffusers' blocks do. Backward keeps the
gate, and y if the gate has a gradient. Without one, the gate is no saved tensor: a recomputation of the block around it
(torch.utils.checkpoint) runs up to the last of these, and would repeat the product that made y for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import check_tokens, unit_stride


def reference_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate · y, as FLUX's blocks compute it, and in fp32 where the gate is, as Wan's do."""
    return (x + gate[:, None] * y).to(x.dtype)


@op("gated_residual", mutates=("out",))
def _residual(x: Tensor, y: Tensor, gate: Tensor, out: Tensor) -> None:
    if out.numel():
        launch("triton", "gated_residual", x, *map(unit_stride, (x, y, gate)), out)


@op("gated_residual_grad", mutates=("dy", "d_gate"))
def _grad(y: Tensor | None, gate: Tensor, g: Tensor, dy: Tensor | None, d_gate: Tensor | None) -> None:
    launch("triton", "gated_residual_grad", g, *map(unit_stride, (y, gate, g)), dy, d_gate)


def _run(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    _residual(x, y, gate, out)
    return out


class _Residual(torch.autograd.Function):
    """`_run`, differentiable in x, y and the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(y, gate)
        else:
            ctx.gate = gate
        return _run(x, y, gate)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("gated_residual cannot be differentiated twice")
        _, wants_y, wants_gate = ctx.needs_input_grad
        dy = g.new_empty(g.shape) if wants_y else None
        if wants_gate:
            y, gate = ctx.saved_tensors
            d_gate = gate.new_empty(gate.shape)
        else:
            y = None
            gate = ctx.gate
            d_gate = None
        if wants_y or wants_gate:
            _grad(y, gate, g, dy, d_gate)
        return g, dy, d_gate


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate[:, None] · y, [B, S, C] in x's dtype; differentiable in all three, once.

    x, y: [B, S, C] bf16 or fp32 (fp16 and fp64: in torch). gate: [B, C] in x's dtype or in fp32. Layouts and errors as
    in `layernorm_modulate`.
    """
    check_tokens(x, {"y": y}, {"gate": gate})
    if triton_or_torch(x.device, x.dtype, gate.dtype) == "torch":
        return reference_residual(x, y, gate)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or gate.requires_grad)
    run: Any = _Residual.apply if needs_grad else _run
    return run(x, y, gate)
