"""What an affine op takes, and the one check of it that all backends share.

Invariant: after `check_affine` every tensor is on one device, x, v and their companions have one shape [B, …], and
the coefficient table has 5 columns. Values are never read back: an index outside the table is an IndexError on the
CPU (found by the kernel) and gives NaN on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NoiseAddress(NamedTuple):
    """Where ε of a batch lives: element e of sample i at step k is Philox(seed; e, k, sample id)."""

    seed: int
    """64-bit key of the run."""
    sample: Tensor
    """int64 [B], unique per sample over the run."""
    step: Tensor | None = None
    """int64 [B]; None: the row index of the coefficient table."""
    offset: int = 0
    """Global index of the latent's first element, for slices of a larger latent."""


class Guidance(NamedTuple):
    """The second half of a guidance pair: v = u + g·(c − u) is combined inside the op, c being its `v`."""

    uncond: Tensor
    """u, like v."""
    scale: float
    """g."""
    from_cond: bool = False
    """c + g·(c − u) instead (Z-Image)."""
    rescale: bool = False
    """Restore the norm over the last dimension to ‖c‖ (Qwen-Image's true guidance)."""


class Affine(NamedTuple):
    """Inputs that the step, the replay and its gradient share."""

    x: Tensor
    v: Tensor
    coef: Tensor
    """[T, 5] rows (a, b, s, w, c)."""
    row: Tensor | None
    """int64 [B] rows of coef; None: T = B."""
    guidance: Guidance | None


def rows_of(a: Affine) -> Tensor:
    """Coefficient rows [B, 5]."""
    return a.coef if a.row is None else a.coef.index_select(0, a.row)


def _like(name: str, t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    if t.shape != x.shape:
        raise ValueError(f"{name}: expected the shape of x, {list(x.shape)}, got {list(t.shape)}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name}: expected fp32, bf16, fp16 or fp64, got {t.dtype}; cast it first")
    if t.device != x.device:
        raise ValueError(f"{name}: is on {t.device}, but x is on {x.device}; move one of them")


def check_ids(name: str, t: Tensor, batch: int, device: torch.device) -> None:
    """Raise unless `t` is int64 [batch] on `device`."""
    if t.dtype != torch.int64 or t.shape != (batch,):
        raise ValueError(f"{name}: expected int64 [{batch}], got {t.dtype} {list(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: is on {t.device}, expected {device}")


def check_affine(a: Affine, **like: Tensor | None) -> None:
    """Raise ValueError or TypeError, saying what was expected, unless the inputs of an affine op fit together."""
    x, coef, batch = a.x, a.coef, a.x.shape[0] if a.x.dim() else -1
    if batch < 0:
        raise ValueError("x: expected [B, …], got a 0-d tensor")
    for name, t in (("x", x), ("v", a.v), *like.items()):
        _like(name, t, x)
    if a.guidance is not None:
        _like("guidance.uncond", a.guidance.uncond, x)
    if coef.dim() != 2 or coef.shape[1] != 5 or coef.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"coef: expected fp32 [T, 5], got {coef.dtype} {list(coef.shape)}")
    if coef.device != x.device:
        raise ValueError(f"coef: is on {coef.device}, but x is on {x.device}; move it once, outside the loop")
    if a.row is None:
        if coef.shape[0] != batch:
            raise ValueError(
                f"coef rows: expected [{batch}, 5], got {list(coef.shape)}; pass an int64 index [B] into a [T, 5] table"
            )
    else:
        check_ids("index", a.row, batch, x.device)


def check_address(noise: NoiseAddress, index: Tensor | None, batch: int, device: torch.device) -> NoiseAddress:
    """The address with its step filled in. Raises ValueError where the step is unknown or ids do not fit."""
    step = noise.step if noise.step is not None else index
    if step is None:
        raise ValueError("an addressed noise needs a step: pass `index`, or `step` in the NoiseAddress")
    check_ids("noise.sample", noise.sample, batch, device)
    check_ids("noise.step", step, batch, device)
    if noise.offset < 0:
        raise ValueError(f"noise.offset: expected 0 or more, got {noise.offset}")
    return noise._replace(step=step)


def refuse_second_derivative(op: str) -> None:
    """Raise RuntimeError inside a backward that runs with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{op} cannot be differentiated twice; run its backward without create_graph=True")
