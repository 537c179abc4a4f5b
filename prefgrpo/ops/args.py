"""Arguments and results of each op, the same for every backend, and argument checks of the affine ops.

The fields of an op's NamedTuple are the arguments of torch.ops.prefgrpo.<op>, in order; its `results` allocates the
tensors that the op returns. Invariant: after `check_affine` all tensors are on one device, x, v and the tensors like
them have one shape [B, …], and the coefficient table has 5 columns. No check reads tensor values: for an index outside
the table, the kernel raises IndexError on the CPU and gives NaN on a GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Std = Literal["group", "global", "none"]
Combine = Literal["weighted_sum", "weighted_advantage_sum", "geometric_mean"]
Results = list[Any]
"""Tensors, and None for results that were not requested."""


class NoiseAddress(NamedTuple):
    """Philox counter of a batch's ε: element e of sample i at step k is Philox(seed; e, k, sample id)."""

    seed: int
    """64-bit key of the run."""
    sample: Tensor
    """int64 or int32 [B], unique per sample over the run."""
    step: Tensor | None = None
    """Likewise [B]; None: the row index of the coefficient table."""
    offset: int = 0
    """Global index of the latent's first element, for slices of a larger latent."""


class Guidance(NamedTuple):
    """The second half of a guidance pair; the op computes v = u + g·(c − u) itself, its argument `v` being c."""

    uncond: Tensor
    """u, like v."""
    scale: float
    """g."""
    from_cond: bool = False
    """c + g·(c − u) instead (Z-Image)."""
    rescale: bool = False
    """Restore the norm over the last dimension to ‖c‖ (Qwen-Image's true guidance); x is then [B, …, D]."""


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_per_sample(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


class Normal(NamedTuple):
    """philox_normal."""

    seed: int
    """As a signed 64-bit number."""
    sample: Tensor
    step: Tensor
    numel: int
    offset: int
    dtype: torch.dtype
    out: Tensor | None = None
    """The caller's memory for the noise. Like `out` of Step, not an argument of the custom op."""

    def results(self) -> Results:
        """Noise [B, numel]."""
        if self.out is not None:
            return [self.out]
        return [torch.empty(self.sample.shape[0], self.numel, dtype=self.dtype, device=self.sample.device)]


class Step(NamedTuple):
    """affine_step: latents, velocity, a guidance pair, one kind of noise or none, and which extra results to return."""

    x: Tensor
    v: Tensor
    coef: Tensor
    """[T, 5] rows (a, b, s, w, c)."""
    row: Tensor | None
    """int64 [B] rows of coef; None: T = B."""
    uncond: Tensor | None
    """This and the next three fields: the guidance pair."""
    scale: float
    from_cond: bool
    rescale: bool
    eps: Tensor | None
    seed: int
    """This and the next three fields: addressed noise; the seed is a signed 64-bit number."""
    sample: Tensor | None
    step: Tensor | None
    offset: int
    out_dtype: torch.dtype
    want_mean: bool
    out: Tensor | None = None
    """The caller's memory for x'."""

    def results(self) -> Results:
        """x', logp, mean."""
        out = _empty_like(self.x, self.out_dtype) if self.out is None else self.out
        mean = _empty_like(self.x, torch.float32) if self.want_mean else None
        return [out, _empty_per_sample(self.x), mean]


class Replay(NamedTuple):
    """affine_logp, or with upstream gradients affine_grad."""

    x: Tensor
    v: Tensor
    x_next: Tensor
    coef: Tensor
    row: Tensor | None
    uncond: Tensor | None
    scale: float
    from_cond: bool
    rescale: bool
    v_ref: Tensor | None
    v_old: Tensor | None
    g_logp: Tensor | None = None
    """[B] upstream gradient of logp; the next two, of KL and Guard log-ratio. Only affine_grad takes them."""
    g_kl: Tensor | None = None
    g_guard: Tensor | None = None

    def results(self) -> Results:
        """logp, kl, Guard log-ratio, [B] each."""
        return [None if t is None else _empty_per_sample(t) for t in (self.x, self.v_ref, self.v_old)]

    def gradients(self) -> Results:
        """dv (dc of a guidance pair) and du, in the dtypes of v and u."""
        dv = _empty_like(self.x, self.v.dtype)
        return [dv, None if self.uncond is None else _empty_like(self.x, self.uncond.dtype)]


class Policy(NamedTuple):
    """policy_loss; tensors are [B]."""

    logp: Tensor
    logp_old: Tensor
    advantage: Tensor
    clip_low: float
    clip_high: float
    adv_clip: float = 5.0
    weight: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    log_ratio: Tensor | None = None
    denominator: float | None = None

    def results(self) -> Results:
        """loss, metrics [8], d loss/d log-ratio [B], d loss/d kl [B]."""
        like = self.logp.float().contiguous()
        return [
            like.new_empty(()),
            like.new_empty(8),
            torch.empty_like(like),
            None if self.kl is None else torch.empty_like(like),
        ]


class Winrate(NamedTuple):
    """winrate_advantage."""

    wins: Tensor
    counts: Tensor
    use_std: bool
    eps: float
    ddof: int

    def results(self) -> Results:
        """Win rate and advantage, [P, G] each."""
        rate = self.wins.new_empty(*self.wins.shape[:2], dtype=torch.float32)
        return [rate, torch.empty_like(rate)]


Affine = Step | Replay


def coef_rows(a: Affine) -> Tensor:
    """Coefficient rows [B, 5]."""
    return a.coef if a.row is None else a.coef.index_select(0, a.row)


def rescaled_dim(a: Affine) -> int:
    """Length of the dimension whose norm is restored, or 0."""
    return a.x.shape[-1] if a.uncond is not None and a.rescale else 0


def contiguous_samples(t: Tensor) -> Tensor:
    """`t` itself if each sample is contiguous, else a contiguous copy."""
    return t if t.is_contiguous() or (t.shape[0] > 0 and t[0].is_contiguous()) else t.contiguous()


def int64_seed(seed: int) -> int:
    """A 64-bit seed as a signed integer, because op schemas have only int64."""
    seed = as_int(seed) & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def as_int(n: int) -> int:
    """`n` (possibly a NumPy integer) as a Python int; a SymInt is returned as it is. Raises TypeError for a float."""
    return n if isinstance(n, int | torch.SymInt) else operator.index(n)


def check_clips(low: float, high: float, adv_clip: float, kl_coef: float, denominator: float | None) -> None:
    """Raise ValueError for a negative or NaN clip, a KL coefficient that is not finite, a denominator not above 0."""
    if not (low >= 0 and high >= 0 and adv_clip >= 0):
        raise ValueError(f"clip_low, clip_high, adv_clip: expected 0 or more, got {low}, {high}, {adv_clip}")
    if not abs(kl_coef) < math.inf:
        raise ValueError(f"kl_coef: expected a finite number, got {kl_coef}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator: expected more than 0, got {denominator}")


def rows_index(index: Tensor | int | None, x: Tensor) -> Tensor | None:
    """int64 rows of a coefficient table; a single number is repeated for all samples of `x`."""
    if index is None or isinstance(index, Tensor):
        return index if index is None or index.dtype != torch.int32 else index.long()
    return torch.full(x.shape[:1] or (0,), as_int(index), dtype=torch.int64, device=x.device)


def int32_to_int64(t: Tensor) -> Tensor:
    """`t`, cast to int64 if it is int32; `check_ids` rejects any other dtype."""
    return t.long() if t.dtype == torch.int32 else t


def check_out(out: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *inputs: Any) -> None:
    """Raise ValueError unless `out` is None, or fits this result and overlaps none of the tensors `inputs`."""
    if out is None:
        return
    if out.shape != torch.Size(shape) or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out: expected {dtype} {list(shape)} on {device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out: expected contiguous memory, got strides {list(out.stride())}")
    if any(t is not None and _overlap(t, out) for t in inputs) or out.requires_grad:
        raise ValueError("out: expected a tensor that requires no gradient and shares no memory with an input")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same object or (not checked in a graph or vmap) overlap in a common storage."""
    if a is b or torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return a is b
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (a_first, a_end), (b_first, b_end) = (_extent(t) for t in (a, b))
    return a_first < b_end and b_first < a_end


def _extent(t: Tensor) -> tuple[Any, Any]:
    """Byte offsets in its storage of the start of `t` and of its end (exclusive)."""
    size = t.element_size() if t.numel() else 0
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    offset = int(t.storage_offset())
    return offset * t.element_size(), (offset + reach) * t.element_size() + size


def copy_to(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy `result` into `out`, unless there is no `out` or the backend has already written to it."""
    return result if out is None or result is out else out.copy_(result)


def check_ids(name: str, t: Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless `t` (after `int32_to_int64`) is int64 [batch] on `device`."""
    if t.dtype != torch.int64 or t.shape != (batch,):
        raise ValueError(f"{name}: expected int64 or int32 [{batch}], got {t.dtype} {list(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: is on {t.device}, expected {device}")


def check_affine(a: Affine, **like: Tensor | None) -> None:
    """Raise ValueError or TypeError, stating what was expected, unless the inputs of an affine op fit together."""
    x, coef = a.x, a.coef
    if not x.dim():
        raise ValueError("x: expected [B, …], got a 0-d tensor")
    shape, device = x.shape, x.device
    for name, t in (("x", x), ("v", a.v), *like.items(), ("guidance.uncond", a.uncond)):
        if t is None:
            continue
        if t is not x and t.shape != shape:
            raise ValueError(f"{name}: expected the shape of x, {list(shape)}, got {list(t.shape)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name}: expected fp32, bf16, fp16 or fp64, got {t.dtype}; cast it first")
        if t is not x and t.device != device:
            raise ValueError(f"{name}: is on {t.device}, but x is on {device}; move one of them")
    if not x.numel() and shape[0]:
        raise ValueError(f"x: expected at least one element per sample, got {list(shape)}")
    if a.rescale and len(shape) == 1:
        raise ValueError(f"guidance.rescale: expected x [B, …, D], whose last dimension has a norm, got {list(shape)}")
    if coef.dim() != 2 or coef.shape[1] != 5 or coef.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"coef: expected fp32 [T, 5], got {coef.dtype} {list(coef.shape)}")
    if coef.device != device:
        raise ValueError(f"coef: is on {coef.device}, but x is on {device}; move it once, outside the loop")
    if a.row is not None:
        check_ids("index", a.row, shape[0], device)
    elif coef.shape[0] != shape[0]:
        raise ValueError(
            f"coef rows: expected [{shape[0]}, 5], got {list(coef.shape)}; pass an index [B] into a [T, 5] table"
        )


def check_step(a: Step) -> None:
    """`check_affine`, and checks of a step's noise and dtypes; the same errors."""
    check_affine(a, noise=a.eps)
    if a.sample is not None:
        if a.step is None:
            raise ValueError("noise: a NoiseAddress needs a step: set its `step`, or pass `index`")
        check_ids("noise.sample", a.sample, a.x.shape[0], a.x.device)
        check_ids("noise.step", a.step, a.x.shape[0], a.x.device)
        if a.offset < 0:
            raise ValueError(f"noise.offset: expected 0 or more, got {a.offset}")
    if a.out_dtype not in DTYPES:
        raise TypeError(f"out_dtype: expected fp32, bf16, fp16 or fp64, got {a.out_dtype}")
