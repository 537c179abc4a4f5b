"""Rows of a matrix in fp8, for products with row-wise scales: scale = max |x| / 448 per row, y = x / scale in e4m3.

448 is the largest number of e4m3. `dequantise_rows` is the way back. Everything is computed in fp32 and rounded once.
Invariant: a row of the result depends on that row alone, so it has the same bits in any batch and with split tokens. It
has no gradient: its callers decide what passes through the rounding (`models/fp8.py`: the gradient, unchanged).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from prefgrpo.ops._backend import launch, op, triton_or_torch
from prefgrpo.ops._inputs import unit_stride

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST = 1e-30
"""max |x| of a row counts as at least this, so that no scale is 0 or subnormal."""


def reference_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(y, scale)."""
    wide = x.float()
    scale = (wide.abs().amax(1).clamp_min(SMALLEST) / LARGEST).unsqueeze(1)  # with strides that torch._scaled_mm takes
    return (wide / scale).to(FP8), scale


@lru_cache(None)
def _has_numbers(device: torch.device) -> bool:
    """Whether the device has instructions for e4m3, which Triton requires: GPUs before sm_89 do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@op("quantise_rows", mutates=("out", "scale"))
def _quantise(x: Tensor, out: Tensor, scale: Tensor) -> None:
    if out.numel():
        launch("triton", "quantise_rows", x, unit_stride(x), out, scale)


@torch.no_grad()
def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(y [N, K] in float8_e4m3fn, scale [N, 1] in fp32) with y · scale ≈ x; without a gradient.

    x: [N, K] with K > 0, bf16 or fp32 (fp16 and fp64: in torch, by way of fp32). Raises ValueError for another shape or
    dtype. A row with NaN is NaN, with an infinity NaN or 0.
    """
    if x.dim() != 2 or not x.shape[1] or not x.is_floating_point() or x.itemsize < 2:
        raise ValueError(f"x: expected bf16, fp32, fp16 or fp64 [N, K], K > 0, got {x.dtype} {list(x.shape)}")
    if triton_or_torch(x.device, x.dtype) == "torch" or not _has_numbers(x.device):
        return reference_quantise(x)
    out = x.new_empty(x.shape, dtype=FP8)
    scale = x.new_empty((len(x), 1), dtype=torch.float32)
    _quantise(x, out, scale)
    return out, scale


@op("dequantise_rows", mutates=("out",))
def _dequantise(y: Tensor, scale: Tensor, out: Tensor) -> None:
    if out.numel():
        launch("triton", "dequantise_rows", out, y.contiguous().view(torch.uint8), scale.contiguous(), out)


@torch.no_grad()
def dequantise_rows(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """y · scale [N, K] in `dtype`, multiplied in fp32, in one pass; without a gradient.

    y: [N, K] in float8_e4m3fn. scale: fp32 [N, 1]. dtype: bf16 or fp32 (fp16 and fp64: in torch). Raises ValueError for
    other tensors.
    """
    if y.dim() != 2 or (y.dtype, scale.dtype, scale.shape) != (FP8, torch.float32, (len(y), 1)):
        found = f"y {y.dtype} {list(y.shape)}, scale {scale.dtype} {list(scale.shape)}"
        raise ValueError(f"expected y float8_e4m3fn [N, K] and scale fp32 [N, 1], got {found}")
    if triton_or_torch(y.device, dtype) == "torch":
        return y.to(dtype).mul_(scale)
    out = y.new_empty(y.shape, dtype=dtype)
    _dequantise(y, scale, out)
    return out
