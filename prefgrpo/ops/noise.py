"""Counter-based noise: ε of element e of sample i at step k is Philox4x32-10(seed; e, k, i), mapped to N(0, 1).

A word w becomes the uniform ((w >> 9) + ½)·2⁻²³; of a counter block's four words, (0, 1) and (2, 3) are Box-Muller
pairs. Invariant: all backends agree to 1e-6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, launch, op
from prefgrpo.ops._inputs import as_int, check_ids, check_offset, check_step, int64_seed

_MUL = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class PhiloxNoise(NamedTuple):
    """The noise of a batch, as counters: element e of sample i at step k is Philox(seed; e, k, sample id)."""

    seed: int
    """64-bit key of the run."""
    sample: Tensor
    """int64 or int32 [B], unique per sample over the run."""
    step: Tensor | int | None = None
    """Step of each sample, int64 or int32 [B], or one number; None: the row index of the coefficient table."""


def philox_uint32(seed: int, sample: Tensor, step: Tensor, blocks: Tensor) -> Tensor:
    """Philox4x32-10 words [B, n, 4] (uint32 values in int64) for counters (block, step, sample lo, sample hi).

    `sample`, `step` are int64 [B]; `blocks` is int64 [n] (element // 4). Source: Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3" (SC 2011).
    """
    shape = (sample.numel(), blocks.numel())
    c = [
        blocks[None, :].expand(shape) & _MASK,
        step[:, None].expand(shape) & _MASK,
        sample[:, None].expand(shape) & _MASK,
        (sample[:, None].expand(shape) >> 32) & _MASK,
    ]
    k = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        p0 = _MUL[0] * c[0]
        p1 = _MUL[1] * c[2]  # int64 wraps around: its bits are those of the 64-bit product
        hi0 = (p0 >> 32) & _MASK
        lo0 = p0 & _MASK
        hi1 = (p1 >> 32) & _MASK
        lo1 = p1 & _MASK
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
        k = [(k[0] + _KEY[0]) & _MASK, (k[1] + _KEY[1]) & _MASK]
    return torch.stack(c, dim=-1)


def reference_normal(seed: int, sample: Tensor, step: Tensor | int, numel: int, offset: int = 0) -> Tensor:
    """The noise [B, numel] in fp64 from element `offset` on, in plain torch."""
    if not isinstance(step, Tensor):
        step = torch.full_like(sample, step)
    blocks = torch.arange(offset // 4, (offset + numel + 3) // 4, device=sample.device)
    words = philox_uint32(seed, sample, step, blocks)  # [B, n, 4]
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    radius = torch.sqrt(-2.0 * torch.log(u[..., 0::2]))  # [B, n, 2]
    angle = (2.0 * math.pi) * u[..., 1::2]
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)  # [B, n, 2, 2]
    return z.flatten(1)[:, :numel]


# number: the step of all samples, if `step` is None
@op("philox_normal", mutates=("out",))
def _normal(sample: Tensor, step: Tensor | None, number: int, seed: int, offset: int, out: Tensor) -> None:
    backend = backend_of(out.device)
    batch, dim = out.shape
    if backend == "torch":
        out.copy_(reference_normal(seed, sample, number if step is None else step, dim, offset))
        return
    fields = {"batch": batch, "dim": dim, "out": out}
    fields |= {"seed": seed, "sample": sample, "step": step, "number": number, "offset": offset}
    launch(backend, "normal", out, fields=fields)


def philox_normal(seed: int, sample: Tensor, step: Tensor | int, numel: int, *, offset: int = 0) -> Tensor:
    """Counter-based N(0, 1) noise fp32 [B, numel] of each sample, from its element `offset` (a multiple of 4) on.

    sample: int64 or int32 [B]; step: likewise, or one number. Raises ValueError for ids of another dtype or shape, a
    negative size, or another offset.
    """
    numel = as_int(numel)
    sample = check_ids("sample", sample, sample.numel(), sample.device)
    steps, number = check_step("step", step, sample)
    if numel < 0:
        raise ValueError(f"numel: expected 0 or more, got {numel}")
    out = torch.empty(sample.shape[0], numel, dtype=torch.float32, device=sample.device)
    _normal(sample, steps, number, int64_seed(seed), check_offset(offset), out)
    return out
