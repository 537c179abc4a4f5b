"""What the public functions accept: their tensors are checked once, here, before a kernel reads their memory."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_int(n: int) -> int:
    """`n` (possibly a NumPy integer) as a Python int; a SymInt is returned as it is. Raises TypeError for a float."""
    return n if isinstance(n, int | torch.SymInt) else operator.index(n)


def int64_seed(seed: int) -> int:
    """A 64-bit seed as a signed integer, because op schemas have only int64."""
    seed = as_int(seed) & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def constant(t: Tensor) -> Tensor:
    """`t` without its gradient, in contiguous memory."""
    return t if t.is_contiguous() and not t.requires_grad else t.detach().contiguous()


def check_ids(name: str, t: Tensor, batch: int, device: torch.device) -> Tensor:
    """`t` as contiguous int64 [batch]; raises ValueError unless it is int64 or int32 [batch] on `device`."""
    if t.dtype == torch.int32:
        t = t.long()
    if t.dtype != torch.int64 or t.shape != (batch,) or t.device != device:
        raise ValueError(
            f"{name}: expected int64 or int32 [{batch}] on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    return t.contiguous()


def check_step(name: str, step: Tensor | int, sample: Tensor) -> tuple[Tensor | None, int]:
    """(the step of each sample, or None; else that of all)."""
    if isinstance(step, Tensor):
        return check_ids(name, step, sample.shape[0], sample.device), 0
    return None, as_int(step)


def check_offset(offset: int) -> int:
    """`offset`; raises ValueError unless a counter block of noise, of four elements, begins there."""
    offset = as_int(offset)
    if offset < 0 or offset % 4:
        raise ValueError(f"offset: expected a multiple of 4 elements, got {offset}")
    return offset


def check_latents(
    coef: Tensor, index: Tensor | int | None, x: Tensor, others: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """(coef, index) as contiguous tensors, for a number the one row and None, so that no launch fills an index.

    Raises ValueError, TypeError or IndexError unless everything fits together.
    """
    shape = x.shape
    device = x.device
    if not shape or 0 in shape[1:]:
        raise ValueError(f"x: expected [B, …] with at least one element per sample, got {list(shape)}")
    for name, t in (("x", x), *others.items()):
        if t is None:
            continue
        if t.dtype not in DTYPES:
            raise TypeError(f"{name}: expected fp32, bf16, fp16 or fp64, got {t.dtype}; cast it first")
        if t.shape != shape or t.device != device:
            raise ValueError(f"{name}: expected {list(shape)} on {device}, as x, got {list(t.shape)} on {t.device}")
    if coef.dim() != 2 or coef.shape[1] != 5 or coef.dtype not in DTYPES or coef.device != device:
        got = f"{coef.dtype} {list(coef.shape)} on {coef.device}"
        raise ValueError(f"coef: expected fp32 [T, 5] on {device}, got {got}")
    if isinstance(index, Tensor):
        index = check_ids("index", index, shape[0], device)
    elif index is not None:
        row = as_int(index)
        if not 0 <= row < coef.shape[0]:
            raise IndexError(f"index: expected 0 … {coef.shape[0] - 1}, a row of coef, got {row}")
        coef = coef[row : row + 1]
        index = None
    elif coef.shape[0] != shape[0]:
        raise ValueError(f"coef: expected one row for each of {shape[0]} samples, or an index, got {len(coef)} rows")
    return coef.contiguous(), index


def aligned(t: Tensor | None) -> Tensor | None:
    """`t`, copied unless it begins on 16 bytes: off them, Triton's sums over a row would have another order."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def unit_stride(t: Tensor | None) -> Tensor | None:
    """`t`, copied unless its last dimension is contiguous and it begins on 16 bytes."""
    return t if t is None else aligned(t if t.stride(-1) == 1 else t.contiguous())


def check_tokens(x: Tensor, others: dict[str, Tensor], vectors: dict[str, Tensor]) -> None:
    """Raise ValueError or TypeError unless x is [B, S, C], `others` are like it, and `vectors` [B, C] of its sample."""
    if x.dim() != 3 or x.dtype not in DTYPES:
        raise ValueError(f"x: expected fp32, bf16, fp16 or fp64 [B, S, C], got {x.dtype} {list(x.shape)}")
    batch, _, channels = x.shape
    for name, t in others.items():
        if t.shape != x.shape or t.dtype != x.dtype or t.device != x.device:
            want = f"{x.dtype} {list(x.shape)} on {x.device}, as x"
            raise ValueError(f"{name}: expected {want}, got {t.dtype} {list(t.shape)} on {t.device}")
    for name, t in vectors.items():
        if t.shape != (batch, channels) or t.device != x.device:
            want = f"[{batch}, {channels}] on {x.device}"
            raise ValueError(f"{name}: expected {want}, one vector per sample, got {list(t.shape)} on {t.device}")
        if t.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{name}: expected {x.dtype}, as x, or fp32, got {t.dtype}; cast it first")
