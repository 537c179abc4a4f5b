"""What the public functions accept: their tensors are checked once, here, and brought into the kernels' dtypes."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.compiler import is_compiling

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_int(n: int) -> int:
    """`n` (possibly a NumPy integer) as a Python int; a SymInt is returned as it is. Raises TypeError for a float."""
    return n if isinstance(n, int | torch.SymInt) else operator.index(n)


def int64_seed(seed: int) -> int:
    """A 64-bit seed as a signed integer, because op schemas have only int64."""
    seed = as_int(seed) & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def samples(t: Tensor) -> Tensor:
    """`t` itself if each sample is contiguous memory, else a contiguous copy; a lazily negated view is resolved."""
    if not is_compiling() and t.is_neg():
        t = t.resolve_neg()
    return t if t.is_contiguous() or (t.shape[0] > 0 and t[0].is_contiguous()) else t.contiguous()


def contiguous(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in contiguous memory and in `dtype`; a lazily negated view is resolved."""
    if not is_compiling() and t.is_neg():
        t = t.resolve_neg()
    return t.contiguous() if t.dtype == dtype else t.to(dtype).contiguous()


def check_ids(name: str, t: Tensor, batch: int, device: torch.device) -> Tensor:
    """`t` as contiguous int64 [batch]; raises ValueError unless it is int64 or int32 [batch] on `device`."""
    if t.dtype == torch.int32:
        t = t.long()
    if t.dtype != torch.int64 or t.shape != (batch,) or t.device != device:
        raise ValueError(
            f"{name}: expected int64 or int32 [{batch}] on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    return t.contiguous()


def check_latents(
    coef: Tensor, index: Tensor | int | None, x: Tensor, others: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """(coef, index) in the kernels' dtypes; raises ValueError or TypeError unless everything fits together."""
    shape = x.shape
    device = x.device
    exact = x.dtype == torch.float64
    if not shape:
        raise ValueError("x: expected [B, …], got a 0-d tensor")
    if 0 in shape[1:]:
        raise ValueError(f"x: expected at least one element per sample, got {list(shape)}")
    check_dtype("x", x.dtype)
    for name, t in others.items():
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name}: expected the shape of x, {list(shape)}, got {list(t.shape)}")
        check_dtype(name, t.dtype)
        if t.device != device:
            raise ValueError(f"{name}: is on {t.device}, but x is on {device}; move one of them")
        exact |= t.dtype == torch.float64
    if coef.dim() != 2 or coef.shape[1] != 5 or coef.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"coef: expected fp32 [T, 5], got {coef.dtype} {list(coef.shape)}")
    if coef.device != device:
        raise ValueError(f"coef: is on {coef.device}, but x is on {device}; move it once")
    if isinstance(index, Tensor):
        index = check_ids("index", index, shape[0], device)
    elif index is not None:
        index = torch.full(shape[:1], as_int(index), dtype=torch.int64, device=device)
    elif coef.shape[0] != shape[0]:
        got = f"got {list(coef.shape)}; pass an index [B] into a [T, 5] table"
        raise ValueError(f"coef rows: expected [{shape[0]}, 5], {got}")
    return contiguous(coef, coef.dtype if exact else torch.float32), index


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name}: expected fp32, bf16, fp16 or fp64, got {dtype}; cast it first")
