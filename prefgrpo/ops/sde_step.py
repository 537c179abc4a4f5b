"""One step of any SDE sampler with its log-prob, and the replay of a stored step.

    x' = a·x + b·v + s·ε                     logp = w · mean_D (x' − a·x − b·v)² + c
    KL = mean_D (b(v − v_ref))² / (2 s²)     Guard log-ratio = mean_D [ε̂·(μ − μ_old)],  ε̂ = (x' − μ_old)/s

Coefficient rows are (a, b, s, w, c). Invariant: logp is computed from the stored value (x' after rounding to the
storage dtype), with a fixed summation order that depends on D only; a step and its replay with the same inputs are
bitwise equal. Where w = 0 or s = 0, logp is c and KL and log-ratio are 0, whatever the latents hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefgrpo.ops._backend import backend_of, cuda_scratch, launch, op
from prefgrpo.ops._inputs import DTYPES, check_ids, check_latents, constant, int64_seed
from prefgrpo.ops.noise import PhiloxNoise, reference_normal


class SdeStep(NamedTuple):
    """Result of `sde_step`."""

    x_next: Tensor
    """[B, …] in the storage dtype."""
    logp: Tensor
    """[B] fp32; 0 for rows without a log-prob (s = 0)."""
    mean: Tensor | None = None
    """[B, …] fp32 a·x + b·v, if asked for."""


class SdeLogp(NamedTuple):
    """Result of `sde_logp`; all [B] fp32, differentiable in v."""

    logp: Tensor
    kl: Tensor | None = None
    """KL to `v_ref`, if it was given."""
    log_ratio: Tensor | None = None
    """GRPO-Guard's log-ratio to `v_old`, if it was given."""


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


def reference_step(x: Tensor, v: Tensor, rows: Tensor, eps: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x' rounded to `dtype`, logp [B] of that rounded x')."""
    mean = reference_mean(x, v, rows)
    x_next = mean if eps is None else mean + expand(rows[:, 2].to(mean.dtype), x) * eps.to(mean.dtype)
    x_next = x_next.to(dtype)
    return x_next, reference_logp(x, v, x_next, rows)


def reference_logp(x: Tensor, v: Tensor, x_next: Tensor, rows: Tensor) -> Tensor:
    """logp [B]; differentiable in v."""
    mean = reference_mean(x, v, rows)
    w = rows[:, 3].to(mean.dtype)
    c = rows[:, 4].to(mean.dtype)
    squares = mean_d((x_next.to(mean.dtype) - mean).square())
    return torch.where(w != 0, w * torch.where(w != 0, squares, 0.0) + c, c)


def _b_over_s(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """b / s, [B]; 0 where s = 0."""
    b = rows[:, 1].to(dtype)
    s = rows[:, 2].to(dtype)
    return torch.where(s > 0, b / torch.where(s > 0, s, 1.0), 0.0)


def reference_kl(v: Tensor, v_ref: Tensor, rows: Tensor) -> Tensor:
    """KL [B] of two steps with the same standard deviation."""
    dtype = torch.promote_types(torch.promote_types(v.dtype, v_ref.dtype), torch.float32)
    kl = _b_over_s(rows, dtype).square() / 2 * mean_d((v.to(dtype) - v_ref.to(dtype)).square())
    return torch.where(rows[:, 2] > 0, kl, 0.0)


def reference_log_ratio(x: Tensor, v: Tensor, x_next: Tensor, v_old: Tensor, rows: Tensor) -> Tensor:
    """GRPO-Guard's log-ratio [B]."""
    old = reference_mean(x, v_old, rows)
    product = (x_next.to(old.dtype) - old) * (v.to(old.dtype) - v_old.to(old.dtype))
    return torch.where(rows[:, 2] > 0, _b_over_s(rows, old.dtype) * mean_d(product), 0.0)


def _scaled(factor: Tensor, t: Tensor) -> Tensor:
    """factor · t per sample; exactly 0 where the factor is 0, even if t is NaN or infinite there."""
    factor = expand(factor, t)
    return torch.where(factor != 0, factor * t, 0.0)


def reference_grad(
    x: Tensor, v: Tensor, y: Tensor, rows: Tensor, v_ref: Tensor | None, v_old: Tensor | None, *g: Tensor | None
) -> Tensor:
    """∂/∂v of Σ (g₀·logp + g₁·KL + g₂·log-ratio), elementwise."""
    mean = reference_mean(x, v, rows)
    dtype = mean.dtype
    count = x.numel() // max(x.shape[0], 1)
    b = rows[:, 1].to(dtype)
    w = rows[:, 3].to(dtype)
    b_over_s = _b_over_s(rows, dtype)
    grad = torch.zeros_like(mean)
    if g[0] is not None:
        factor = torch.where(w != 0, -2 * w * b / count * g[0].to(dtype), 0.0)
        grad = _scaled(factor, y.to(dtype) - mean)
    if g[1] is not None and v_ref is not None:
        factor = torch.where(b_over_s != 0, b_over_s.square() / count * g[1].to(dtype), 0.0)
        grad = grad + _scaled(factor, v.to(dtype) - v_ref.to(dtype))
    if g[2] is not None and v_old is not None:
        factor = torch.where(b_over_s != 0, b_over_s / count * g[2].to(dtype), 0.0)
        grad = grad + _scaled(factor, y.to(dtype) - reference_mean(x, v_old, rows))
    return grad


# ---- custom ops: contiguous tensors of one shape [B, …]; coef fp32 or fp64, index int64
def _rows(coef: Tensor, index: Tensor | None, batch: int) -> Tensor:
    """[B, 5]; without index, row i of sample i or the only row."""
    return coef.expand(batch, 5) if index is None else coef.index_select(0, index)


def _plan(x: Tensor, v: Tensor, y: Tensor) -> tuple[str, int, int]:
    """(backend, B, D); an empty batch is torch's."""
    batch = x.shape[0]
    return (backend_of(x.device, x.dtype, v.dtype, y.dtype), batch, x.numel() // batch) if batch else ("torch", 0, 0)


def _wide(x: Tensor, *others: Tensor) -> Tensor:
    """`x`, in fp32 if one of the others is: the kernels' pairs of dtypes. The cast is exact."""
    return x.float() if x.dtype != torch.float32 and any(t.dtype == torch.float32 for t in others) else x


@op("sde_step", mutates=("out", "logp", "mean"))
def _step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | None,
    eps: Tensor | None,
    seed: int,
    sample: Tensor | None,
    step: Tensor | None,
    out: Tensor,
    logp: Tensor,
    mean: Tensor | None,
) -> None:
    backend, batch, dim = _plan(x, v, out)
    if backend == "torch":
        rows = _rows(coef, index, x.shape[0])
        if sample is not None and step is not None:
            eps = reference_normal(seed, sample, step, dim).view(x.shape)
        x_next, score = reference_step(x, v, rows, eps, out.dtype)
        out.copy_(x_next)
        logp.copy_(score)
        if mean is not None:
            mean.copy_(reference_mean(x, v, rows))
        return
    x = _wide(x, v, out)
    coef = coef.float()
    eps = None if eps is None else eps.float()
    partial = cuda_scratch(backend, x, dim, 1)
    inputs = (batch, dim, x, v, coef, coef.shape[0], index, out, eps, seed, sample, step)
    launch(backend, "sde_step", x, *inputs, logp, mean, partial)


@op("sde_logp", mutates=("logp", "kl", "log_ratio"))
def _logp(
    x: Tensor,
    v: Tensor,
    y: Tensor,
    coef: Tensor,
    index: Tensor | None,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    logp: Tensor,
    kl: Tensor | None,
    log_ratio: Tensor | None,
) -> None:
    backend, batch, dim = _plan(x, v, y)
    if backend == "torch":
        rows = _rows(coef, index, x.shape[0])
        logp.copy_(reference_logp(x, v, y, rows))
        if kl is not None and v_ref is not None:
            kl.copy_(reference_kl(v, v_ref, rows))
        if log_ratio is not None and v_old is not None:
            log_ratio.copy_(reference_log_ratio(x, v, y, v_old, rows))
        return
    x = _wide(x, v, y)
    coef = coef.float()
    if backend != "triton":  # whose sums depend on the dtypes, which therefore are those of the step
        y = _wide(y, v, x)
    partial = cuda_scratch(backend, x, dim, 1 + (kl is not None) + (log_ratio is not None))
    inputs = (batch, dim, x, v, coef, coef.shape[0], index, y, v_ref, v_old)
    launch(backend, "sde_logp", x, *inputs, logp, kl, log_ratio, partial)


@op("sde_grad", mutates=("dv",))
def _grad(
    x: Tensor,
    v: Tensor,
    y: Tensor,
    coef: Tensor,
    index: Tensor | None,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    g_logp: Tensor | None,
    g_kl: Tensor | None,
    g_log_ratio: Tensor | None,
    dv: Tensor,
) -> None:
    backend, batch, dim = _plan(x, v, y)
    upstream = (g_logp, g_kl, g_log_ratio)
    if backend == "torch":
        dv.copy_(reference_grad(x, v, y, _rows(coef, index, x.shape[0]), v_ref, v_old, *upstream))
        return
    v_ref = None if g_kl is None else v_ref
    v_old = None if g_log_ratio is None else v_old
    x, y = _wide(x, v, y), _wide(y, v, x)
    coef = coef.float()
    inputs = (batch, dim, x, v, coef, coef.shape[0], index, y, v_ref, v_old)
    launch(backend, "sde_grad", x, *inputs, *upstream, dv)


def _replay(v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """(logp, KL or None, log-ratio or None) for (v, x, x', coef, index, v_ref, v_old)."""
    x, y, coef, index, v_ref, v_old = rest
    results = [None if t is None else _per_sample(t) for t in (x, v_ref, v_old)]
    _logp(x, v, y, coef, index, v_ref, v_old, *results)
    return tuple(results)


class _SdeLogp(torch.autograd.Function):
    """`_replay`; only v has a gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, *rest)
        return _replay(v, *rest)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("sde_logp cannot be differentiated twice; run its backward without create_graph=True")
        v, x, y, coef, index, v_ref, v_old = ctx.saved_tensors
        dv = torch.empty_like(v)
        fp32 = (None if g is None else g.contiguous() for g in upstream)
        _grad(x, v, y, coef, index, v_ref, v_old, *fp32, dv)
        return dv, *[None] * 6


# ---- public functions
def _per_sample(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def sde_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | int | None = None,
    *,
    noise: Tensor | PhiloxNoise | None,
    out_dtype: torch.dtype | None = None,
    want_mean: bool = False,
) -> SdeStep:
    """One denoising step of any rule; no gradient.

    x, v: [B, …] bf16/fp32 (fp16 and fp64: in torch); strided ones are copied. coef: fp32 [T, 5] rows (a, b, s, w, c),
    selected by index (int64 or int32 [B], or one number for all samples); without index, [B, 5]. noise: ε like x,
    counters, or None (no noise). out_dtype: storage dtype of x' (default: x's). want_mean: also return a·x + b·v.
    Raises ValueError, TypeError or IndexError for arguments that do not fit together.
    """
    dtype = out_dtype or x.dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: expected fp32, bf16, fp16 or fp64, got {dtype}")
    eps = noise if isinstance(noise, Tensor) else None
    number = index
    coef, index = check_latents(coef, index, x, {"v": v, "noise": eps})
    seed = 0
    sample = None
    step = None
    if isinstance(noise, PhiloxNoise):
        seed = int64_seed(noise.seed)
        sample = check_ids("noise.sample", noise.sample, x.shape[0], x.device)
        if noise.step is None and number is None:
            raise ValueError("noise: counters need a step: set the noise's `step`, or pass `index`")
        if noise.step is not None:
            step = check_ids("noise.step", noise.step, x.shape[0], x.device)
        else:
            step = sample.new_full(x.shape[:1], number) if index is None else index  # type: ignore[arg-type]
    x = constant(x)
    eps = None if eps is None else constant(eps)
    out = torch.empty_like(x, dtype=dtype)
    mean = torch.empty_like(x, dtype=torch.float32) if want_mean else None
    logp = _per_sample(x)
    _step(x, constant(v), coef, index, eps, seed, sample, step, out, logp, mean)
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
) -> SdeLogp:
    """Log-prob of a stored step, with its KL to `v_ref` and Guard log-ratio to `v_old`; shapes as in `sde_step`.

    The gradient flows to v; if another input requires one, ValueError asks to detach it. Backward keeps nothing of
    size D but the inputs. No second derivative. v_ref and v_old are velocities after guidance, used in v's dtype.
    """
    coef, index = check_latents(coef, index, x, {"v": v, "x_next": x_next, "v_ref": v_ref, "v_old": v_old})
    constants = {"x": x, "x_next": x_next, "coef": coef, "v_ref": v_ref, "v_old": v_old}
    wrong = [name for name, t in constants.items() if t is not None and t.requires_grad]
    if wrong:
        raise ValueError(f"sde_logp: gradients flow only to v; detach {', '.join(wrong)}")
    others = [None if t is None else t.to(v.dtype).contiguous() for t in (v_ref, v_old)]
    run: Any = _SdeLogp.apply if v.requires_grad and torch.is_grad_enabled() else _replay
    return SdeLogp(*run(v.contiguous(), x.contiguous(), x_next.contiguous(), coef, index, *others))
