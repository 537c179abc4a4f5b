"""One step of any SDE sampler with its log-prob, and the replay of a stored step.

    x' = a·x + b·v + s·ε                     logp = w · mean_D (x' − a·x − b·v)² + c
    KL = mean_D (b(v − v_ref))² / (2 s²)     Guard log-ratio = mean_D [ε̂·(μ − μ_old)],  ε̂ = (x' − μ_old)/s

Coefficient rows are (a, b, s, w, c). Invariant: logp is computed from the stored value (x' after rounding to the
storage dtype), with a fixed summation order that depends on D only; a step and its replay with the same inputs are
bitwise equal. Where w = 0 or s = 0, logp is c and KL and log-ratio are 0, whatever the latents contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, cuda_scratch, launch, op
from prefgrpo.ops._inputs import DTYPES, check_ids, check_latents, check_offset, check_step, constant, int64_seed
from prefgrpo.ops.noise import PhiloxNoise, reference_normal


class SdeStep(NamedTuple):
    """Result of `sde_step`."""

    x_next: Tensor
    """[B, …] in the storage dtype."""
    logp: Tensor
    """[B] fp32; without noise c, which is 0 for rows without a log-prob (s = 0)."""
    mean: Tensor | None = None
    """[B, …] fp32 a·x + b·v, if asked for."""


class SdeLogp(NamedTuple):
    """Result of `sde_logp`; [B] fp32 except the mean, all differentiable in v."""

    logp: Tensor
    kl: Tensor | None = None
    """KL to `v_ref`, if it was given."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio to `v_old`, if it was given."""
    mean: Tensor | None = None
    """[B, …] fp32 a·x + b·v, if asked for."""


class Part(NamedTuple):
    """Which elements of each sample are here, where sequence parallelism splits samples over processes."""

    offset: int
    """Elements of a sample before those of this process; a multiple of 4."""
    size: int
    """Elements of a whole sample, D."""
    add: Callable[[Tensor], Tensor]
    """Adds fp64 [n, B] over the processes that share the samples; without gradient, and it may work in place."""


# ---- reference: plain torch in the promoted dtype of the inputs, at least fp32
def expand(column: Tensor, like: Tensor) -> Tensor:
    """[B] → [B, 1, …], to broadcast over the latent dimensions of `like`."""
    return column.view(-1, *([1] * (like.dim() - 1)))


def mean_d(t: Tensor) -> Tensor:
    """Mean over all but the batch dimension, [B]; one reduction per sample, so that its order suits any batch size."""
    t = t.reshape(t.shape[0], -1 if t.numel() else 0)
    return torch.stack([sample.mean() for sample in t.unbind(0)]) if t.shape[0] else t.mean(1)


def reference_mean(x: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """a·x + b·v."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, v.dtype), torch.float32)
    a, b = (expand(rows[:, k].to(dtype), x) for k in (0, 1))
    return a * x.to(dtype) + b * v.to(dtype)


def reference_terms(
    x: Tensor, v: Tensor, y: Tensor, rows: Tensor, v_ref: Tensor | None, v_old: Tensor | None
) -> list[Tensor | None]:
    """The means over D [B] of (x' − μ)², (v − v_ref)² and (x' − μ_old)·(v − v_old)."""
    mean = reference_mean(x, v, rows)
    y = y.to(mean.dtype)
    v = v.to(mean.dtype)
    terms: list[Tensor | None] = [mean_d((y - mean).square()), None, None]
    if v_ref is not None:
        terms[1] = mean_d((v - v_ref.to(mean.dtype)).square())
    if v_old is not None:
        terms[2] = mean_d((y - reference_mean(x, v_old, rows)) * (v - v_old.to(mean.dtype)))
    return terms


def finish(terms: Sequence[Tensor | None], rows: Tensor) -> list[Tensor | None]:
    """(logp, KL, log-ratio) [B] from the means of `reference_terms`, in the dtype of `rows`."""
    squares, kl, product = (None if t is None else t.to(rows.dtype) for t in terms)
    assert squares is not None
    _, b, s, w, c = rows.unbind(1)
    noisy = s > 0
    s = torch.where(noisy, s, 1.0)
    logp = torch.where(w != 0, w * torch.where(w != 0, squares, 0.0) + c, c)
    results: list[Tensor | None] = [logp, None, None]
    if kl is not None:
        results[1] = torch.where(noisy, b * b / (2 * s * s) * kl, 0.0)
    if product is not None:
        results[2] = torch.where(noisy, b / s * product, 0.0)
    return results


def _scaled(factor: Tensor, t: Tensor) -> Tensor:
    """factor · t per sample; exactly 0 where the factor is 0, even if t is NaN or infinite there."""
    factor = expand(factor, t)
    return torch.where(factor != 0, factor * t, 0.0)


def reference_grad(
    x: Tensor, v: Tensor, y: Tensor, rows: Tensor, v_ref: Tensor | None, v_old: Tensor | None, size: int,
    *g: Tensor | None,
) -> Tensor:  # fmt: skip
    """∂/∂v of Σ (g₀·logp + g₁·KL + g₂·log-ratio), elementwise; size: elements of a whole sample."""
    mean = reference_mean(x, v, rows)
    dtype = mean.dtype
    b, s, w = rows[:, 1:4].to(dtype).unbind(1)
    b_over_s = torch.where(s > 0, b / torch.where(s > 0, s, 1.0), 0.0)
    grad = torch.zeros_like(mean)
    if g[0] is not None:
        factor = torch.where(w != 0, -2 * w * b / size * g[0].to(dtype), 0.0)
        grad = _scaled(factor, y.to(dtype) - mean)
    if g[1] is not None and v_ref is not None:
        factor = torch.where(b_over_s != 0, b_over_s.square() / size * g[1].to(dtype), 0.0)
        grad = grad + _scaled(factor, v.to(dtype) - v_ref.to(dtype))
    if g[2] is not None and v_old is not None:
        factor = torch.where(b_over_s != 0, b_over_s / size * g[2].to(dtype), 0.0)
        grad = grad + _scaled(factor, y.to(dtype) - reference_mean(x, v_old, rows))
    return grad


# ---- custom ops: contiguous tensors of one shape [B, …]; coef fp32 or fp64, index int64. size 0: that of x[0], which a
# compiled graph must not see. A result in fp64 gets the sum over D that it is made of.
def _rows(coef: Tensor, index: Tensor | None, batch: int) -> Tensor:
    """[B, 5]; without index, row i of sample i or the only row."""
    return coef.expand(batch, 5) if index is None else coef.index_select(0, index)


def _plan(x: Tensor, v: Tensor, y: Tensor, coef: Tensor, index: Tensor | None, size: int) -> tuple[str, dict[str, Any]]:
    """(backend, the fields that all kernels have); an empty batch is torch's."""
    batch = x.shape[0]
    dim = x.numel() // max(batch, 1)
    fields: dict[str, Any] = {"batch": batch, "dim": dim, "size": size or dim}
    backend = backend_of(x.device, x.dtype, v.dtype, y.dtype) if batch else "torch"
    if backend != "torch":
        if x.dtype != torch.float32 and torch.float32 in (v.dtype, y.dtype):
            x = x.float()  # to the kernels' dtypes, exactly
        fields |= {"x": x, "v": v, "coef": coef.float(), "rows": coef.shape[0], "index": index, "y": y}
    return backend, fields


def _store(results: Sequence[Tensor | None], terms: Sequence[Tensor | None], rows: Tensor, dim: int) -> None:
    """Write results, or sums, from the reference's means."""
    dtype = torch.promote_types(terms[0].dtype, torch.float32)  # type: ignore[union-attr]
    values = finish(terms, rows.to(dtype))
    for out, term, value in zip(results, terms, values, strict=True):
        if out is not None and term is not None and value is not None:
            out.copy_(term * dim if out.dtype == torch.float64 else value)


@op("sde_step", mutates=("out", "logp", "mean"))
def _step(
    x: Tensor, v: Tensor, coef: Tensor, index: Tensor | None, eps: Tensor | None, seed: int, sample: Tensor | None,
    step: Tensor | None, number: int, offset: int, size: int, out: Tensor, logp: Tensor, mean: Tensor | None,
) -> None:  # fmt: skip
    backend, fields = _plan(x, v, out, coef, index, size)
    dim = fields["dim"]
    if backend != "torch":
        partial = cuda_scratch(backend, x, dim, fields["size"], int(eps is not None or sample is not None))
        fields |= {
            "seed": seed, "sample": sample, "step": step, "number": number, "offset": offset, "partial": partial,
            "eps": None if eps is None else eps.float(), "mean": mean, "logp": logp, "kl": None, "log_ratio": None,
        }  # fmt: skip
        launch(backend, "sde_step", x, fields=fields)
        return
    rows = _rows(coef, index, x.shape[0])
    if sample is not None:
        eps = reference_normal(seed, sample, number if step is None else step, dim, offset).view(x.shape)
    plain = reference_mean(x, v, rows)
    if eps is None:
        out.copy_(plain)
        logp.copy_(rows[:, 4])
    else:
        out.copy_(plain + expand(rows[:, 2].to(plain.dtype), plain) * eps.to(plain.dtype))
        _store([logp, None, None], reference_terms(x, v, out, rows, None, None), rows, dim)
    if mean is not None:
        mean.copy_(plain)


@op("sde_logp", mutates=("logp", "kl", "log_ratio"))
def _logp(
    x: Tensor, v: Tensor, y: Tensor, coef: Tensor, index: Tensor | None, v_ref: Tensor | None, v_old: Tensor | None,
    size: int, logp: Tensor, kl: Tensor | None, log_ratio: Tensor | None,
) -> None:  # fmt: skip
    backend, fields = _plan(x, v, y, coef, index, size)
    if backend == "torch":
        rows = _rows(coef, index, x.shape[0])
        _store([logp, kl, log_ratio], reference_terms(x, v, y, rows, v_ref, v_old), rows, fields["dim"])
        return
    sums = 1 + (kl is not None) + (log_ratio is not None)
    partial = cuda_scratch(backend, x, fields["dim"], fields["size"], sums)
    fields |= {"v_ref": v_ref, "v_old": v_old, "logp": logp, "kl": kl, "log_ratio": log_ratio, "partial": partial}
    launch(backend, "sde_logp", x, fields=fields)


@op("sde_grad", mutates=("dv",))
def _grad(
    x: Tensor, v: Tensor, y: Tensor, coef: Tensor, index: Tensor | None, v_ref: Tensor | None, v_old: Tensor | None,
    size: int, g_logp: Tensor | None, g_kl: Tensor | None, g_log_ratio: Tensor | None, dv: Tensor,
) -> None:  # fmt: skip
    backend, fields = _plan(x, v, y, coef, index, size)
    upstream = {"g_logp": g_logp, "g_kl": g_kl, "g_log_ratio": g_log_ratio}
    if backend == "torch":
        rows = _rows(coef, index, x.shape[0])
        dv.copy_(reference_grad(x, v, y, rows, v_ref, v_old, fields["size"], *upstream.values()))
        return
    launch(backend, "sde_grad", x, fields=fields | upstream | {"v_ref": v_ref, "v_old": v_old, "dv": dv})


def _whole(sums: Sequence[Tensor | None], coef: Tensor, index: Tensor | None, part: Part) -> list[Tensor | None]:
    """fp32 (logp, KL, log-ratio) of whole samples from the sums of this process, rounded as in the kernels."""
    totals = part.add(torch.stack([t for t in sums if t is not None]))
    means = iter(totals / part.size)
    terms = [None if t is None else next(means) for t in sums]
    rows = _rows(coef.float(), index, totals.shape[1])
    logp = finish([terms[0], None, None], rows)[0]
    rest = finish(terms, rows.double())[1:]
    return [logp, *(None if t is None else t.float() for t in rest)]


def _replay(
    v: Tensor, x: Tensor, y: Tensor, coef: Tensor, index: Tensor | None, v_ref: Tensor | None, v_old: Tensor | None,
    part: Part | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(logp, KL or None, log-ratio or None)."""
    dtype = torch.float32 if part is None else torch.float64
    results = [None if t is None else x.new_empty(x.shape[0], dtype=dtype) for t in (x, v_ref, v_old)]
    _logp(x, v, y, coef, index, v_ref, v_old, 0 if part is None else part.size, *results)
    return tuple(results if part is None else _whole(results, coef, index, part))


class _SdeLogp(torch.autograd.Function):
    """`_replay`; only v has a gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, *rest[:-1])
        ctx.size = 0 if rest[-1] is None else rest[-1].size
        return _replay(v, *rest)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("sde_logp cannot be differentiated twice; run its backward without create_graph=True")
        v, x, y, coef, index, v_ref, v_old = ctx.saved_tensors
        dv = torch.empty_like(v)
        fp32 = (None if g is None else g.contiguous() for g in upstream)
        _grad(x, v, y, coef, index, v_ref, v_old, ctx.size, *fp32, dv)
        return dv, *[None] * 7


def _mean(v: Tensor, x: Tensor, coef: Tensor, index: Tensor | None) -> Tensor:
    """a·x + b·v in fp32: a step without noise."""
    mean = torch.empty_like(x, dtype=torch.float32)
    _step(x, v, coef, index, None, 0, None, None, 0, 0, 0, mean, mean.new_empty(x.shape[0]), None)
    return mean


class _Mean(torch.autograd.Function):
    """`_mean`; only v has a gradient, b times the mean's."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, x: Tensor, coef: Tensor, index: Tensor | None) -> Tensor:
        ctx.save_for_backward(coef, index)
        ctx.dtype = v.dtype
        return _mean(v, x, coef, index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        coef, index = ctx.saved_tensors
        b = coef[:, 1].float()
        if index is not None:  # NaN outside the table, as in the kernels
            inside = index.clamp(0, coef.shape[0] - 1)
            b = torch.where(inside == index, b[inside], torch.nan)
        return (expand(b, upstream) * upstream).to(ctx.dtype), None, None, None


# ---- public functions
def _check_part(part: Part, x: Tensor) -> None:
    dim = x.numel() // max(x.shape[0], 1)
    if check_offset(part.offset) + dim > part.size:
        raise ValueError(f"part: expected offset + {dim} elements of x within size {part.size}, got {part.offset}")


def sde_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | int | None = None,
    *,
    noise: Tensor | PhiloxNoise | None,
    out_dtype: torch.dtype | None = None,
    want_mean: bool = False,
    part: Part | None = None,
) -> SdeStep:
    """One denoising step of any rule; no gradient.

    x, v: [B, …] bf16/fp32 (fp16 and fp64: in torch); strided ones are copied. coef: fp32 [T, 5] rows (a, b, s, w, c),
    selected by index (int64 or int32 [B], or one number for all samples); without index, [B, 5]. noise: ε like x,
    counters, or None (no noise). out_dtype: storage dtype of x' (default: x's). want_mean: also return a·x + b·v.
    part: which elements of the samples these are, if other processes have the others; logp is of the whole samples.
    Raises ValueError, TypeError or IndexError for arguments that do not fit together.
    """
    dtype = out_dtype or x.dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: expected fp32, bf16, fp16 or fp64, got {dtype}")
    eps = noise if isinstance(noise, Tensor) else None
    default = index
    coef, index = check_latents(coef, index, x, {"v": v, "noise": eps})
    seed = 0
    sample = None
    step = None
    number = 0
    if isinstance(noise, PhiloxNoise):
        seed = int64_seed(noise.seed)
        sample = check_ids("noise.sample", noise.sample, x.shape[0], x.device)
        given = default if index is None else index
        given = given if noise.step is None else noise.step
        if given is None:
            raise ValueError("noise: counters need a step: set the noise's `step`, or pass `index`")
        step, number = check_step("noise.step", given, sample)
    if part is not None:
        _check_part(part, x)
    x = constant(x)
    eps = None if eps is None else constant(eps)
    out = torch.empty_like(x, dtype=dtype)
    mean = torch.empty_like(x, dtype=torch.float32) if want_mean else None
    is_sum = part is not None and noise is not None
    logp = x.new_empty(x.shape[0], dtype=torch.float64 if is_sum else torch.float32)
    place = (0, 0) if part is None else (part.offset, part.size)
    _step(x, constant(v), coef, index, eps, seed, sample, step, number, *place, out, logp, mean)
    if part is not None and is_sum:
        logp = _whole([logp, None, None], coef, index, part)[0]  # type: ignore[assignment]
    return SdeStep(out, logp, mean)


def sde_logp(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | int | None = None,
    *,
    v_ref: Tensor | None = None,
    v_old: Tensor | None = None,
    want_mean: bool = False,
    part: Part | None = None,
) -> SdeLogp:
    """Log-prob of a stored step, with its KL to `v_ref` and Guard log-ratio to `v_old`; arguments as in `sde_step`.

    The gradient flows to v; if another input requires one, ValueError asks to detach it. Backward keeps nothing of
    size D except the inputs. No second derivative. v_ref and v_old are velocities after guidance, used in v's dtype.
    want_mean: also return a·x + b·v, the bits of `sde_step`'s, with one more launch.
    """
    coef, index = check_latents(coef, index, x, {"v": v, "x_next": x_next, "v_ref": v_ref, "v_old": v_old})
    constants = {"x": x, "x_next": x_next, "coef": coef, "v_ref": v_ref, "v_old": v_old}
    wrong = [name for name, t in constants.items() if t is not None and t.requires_grad]
    if wrong:
        raise ValueError(f"sde_logp: gradients flow only to v; detach {', '.join(wrong)}")
    if part is not None:
        _check_part(part, x)
    others = [None if t is None else t.to(v.dtype).contiguous() for t in (v_ref, v_old)]
    x = x.contiguous()
    v = v.contiguous()
    has_gradient = v.requires_grad and torch.is_grad_enabled()
    run: Any = _SdeLogp.apply if has_gradient else _replay
    mean_of: Any = _Mean.apply if has_gradient else _mean
    mean = mean_of(v, x, coef, index) if want_mean else None
    return SdeLogp(*run(v, x, x_next.contiguous(), coef, index, *others, part))._replace(mean=mean)
