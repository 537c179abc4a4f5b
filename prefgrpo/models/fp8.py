"""A frozen base in fp8: the Linear layers of a denoiser's repeated blocks, in half of bf16's memory.

A weight is kept in float8_e4m3fn with one fp32 scale per output channel, W ≈ weight · scale. A product scales and casts
the rows of its input (`ops/quantise_rows.py`) and multiplies in fp8 (`torch._scaled_mm`, row-wise, accumulated in
fp32); where there are no such products, it multiplies by W in the input's dtype, made for that product alone. The
gradient is dX = dY · W with the stored weights: the rounding of the input passes it unchanged.
Invariants: rows of the output depend on rows of the input as in torch's products, so a replay has the rollout's bits;
nothing is kept for the backward pass that a frozen Linear does not keep.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from prefgrpo.ops.quantise_rows import FP8, dequantise_rows, quantise_rows


class Fp8Linear(nn.Linear):
    """A frozen Linear [out, in] in fp8. Inputs and outputs have the dtype of the denoiser."""

    weight_scale: nn.Parameter
    """fp32 [out]."""
    dtype: torch.dtype
    """Dtype of the products' outputs, and of a LoRA's products beside them."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        flat = x.to(self.dtype).flatten(0, -2)
        out = _Product.apply(flat, self.weight, self.weight_scale, self.bias)
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])


def product_dtype(layer: Any) -> torch.dtype:
    """The dtype in which a Linear computes."""
    return layer.dtype if isinstance(layer, Fp8Linear) else layer.weight.dtype


@torch.no_grad()
def to_fp8(layer: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Turn an nn.Linear into an `Fp8Linear` on the device, in place; dtype: of its products."""
    weight, scale = quantise_rows(layer.weight.to(device))
    layer.__class__ = Fp8Linear
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = nn.Parameter(scale.flatten(), requires_grad=False)
    layer.dtype = dtype
    if layer.bias is not None:
        layer.bias.data = layer.bias.to(device, dtype)


def multiplies_in_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has row-wise products in fp8 with outputs of `dtype`: on CPUs since 2.13 at the latest (2.11 has
    none), and in bf16 on some GPUs."""
    if device.type == "meta":
        return True
    return (device.type == "cpu" or dtype == torch.bfloat16) and _multiplies_rows(device)


@lru_cache(None)
def _multiplies_rows(device: torch.device) -> bool:
    """Whether a product of ones is right: torch has kernels for sm_89, 90, 100 and 120, but not in every build."""
    ones = torch.ones(16, 16, device=device)
    scale = ones[:, :1].contiguous()
    try:
        product = torch._scaled_mm(ones.to(FP8), ones.to(FP8).t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return bool((product == 16).all())


class _Product(torch.autograd.Function):
    """x Wᵀ + b of x [N, in], differentiable in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.stored = weight, scale  # no saved tensors: recomputation of a block need not run up to this product
        odd = x.device.type == "cuda" and any(size % 16 for size in weight.shape)  # which cuBLAS does not support
        if odd or not multiplies_in_fp8(x.device, x.dtype):
            return F.linear(x, dequantise_rows(weight, scale[:, None], x.dtype), bias)
        rows, scales = _rows(x)
        return torch._scaled_mm(rows, weight.t(), scales, scale[None], bias=bias, out_dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        weight, scale = ctx.stored
        return g @ dequantise_rows(weight, scale[:, None], g.dtype), None, None, None


_recent: deque[tuple[ReferenceType[Tensor], tuple[Any, ...], tuple[Tensor, Tensor]]] = deque(maxlen=2)
"""The inputs of the last products while they are alive, what they depend on, and their rows in fp8; two, because joint
attention projects text and latents in turn."""


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_rows(x)`, once for layers with one input, which follow each other."""
    owner = x if x._base is None else x._base
    state = (x._version, x.data_ptr(), x.shape, x.stride())
    for known, its_state, rows in tuple(_recent):
        if known() is owner and its_state == state:
            return rows
    rows = quantise_rows(x)
    _recent.append((ref(owner, _forget), state, rows))
    return rows


def _forget(dead: ReferenceType[Tensor]) -> None:
    """Drop the rows of an input that no longer exists."""
    alive = [entry for entry in _recent if entry[0] is not dead]
    _recent.clear()
    _recent.extend(alive)
