"""torch.library custom ops over the same implementations, for torch.compile.

Eager calls never come here (the dispatcher costs more than the small ops); a compiled graph sees one opaque op with
a fake kernel and a registered gradient. Invariant: an absent optional result is an empty tensor inside the op only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.ops.args import Affine, Guidance, NoiseAddress
from prefgrpo.ops.backend import backend_of, implementation

Optional3 = tuple[Tensor, Tensor | None, Tensor | None]


def signed(seed: int) -> int:
    """A 64-bit key as the int64 that an op's schema can carry."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def _impl(*tensors: Tensor | None) -> Any:
    given = [t for t in tensors if t is not None]
    return implementation(backend_of(given[0].device, *(t.dtype for t in given)))


def _filled(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if t is None else t


def _guidance(uncond: Tensor | None, scale: float, from_cond: bool, rescale: bool) -> Guidance | None:
    return None if uncond is None else Guidance(uncond, scale, from_cond, rescale)


@torch.library.custom_op("prefgrpo::philox_normal", mutates_args=())
def philox_normal(seed: int, sample: Tensor, step: Tensor, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
    """`ops.philox_normal`."""
    impl = implementation(backend_of(sample.device, dtype))
    return impl.normal(seed % 2**64, sample, step, numel, offset, dtype)


@philox_normal.register_fake
def _(seed: int, sample: Tensor, step: Tensor, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
    return sample.new_empty((sample.shape[0], numel), dtype=dtype)


@torch.library.custom_op("prefgrpo::affine_step", mutates_args=())
def affine_step(
    x: Tensor,
    v: Tensor,
    coef: Tensor,
    index: Tensor | None,
    uncond: Tensor | None,
    scale: float,
    from_cond: bool,
    rescale: bool,
    eps: Tensor | None,
    seed: int,
    sample: Tensor | None,
    step: Tensor | None,
    offset: int,
    out_dtype: torch.dtype,
    want_mean: bool,
    sigma: Tensor | None,
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`ops.affine_step` with its arguments spread out; absent results are empty."""
    noise: Tensor | NoiseAddress | None = eps if sample is None else NoiseAddress(seed % 2**64, sample, step, offset)
    a = Affine(x, v, coef, index, _guidance(uncond, scale, from_cond, rescale))
    out = _impl(x, v, uncond, eps).step(a, noise, out_dtype, want_mean, sigma, copy_dtype)
    return out[0], out[1], *(_filled(t, x) for t in out[2:])


@affine_step.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out_dtype, want_mean, sigma, copy_dtype = rest[-4:]

    def full(wanted: bool, dtype: torch.dtype | None) -> Tensor:
        return x.new_empty(x.shape if wanted else 0, dtype=dtype if wanted else torch.float32)

    logp = x.new_empty(x.shape[0], dtype=torch.float32)
    extra = full(want_mean, torch.float32), full(sigma is not None, out_dtype), full(copy_dtype is not None, copy_dtype)
    return full(True, out_dtype), logp, *extra


def _spread(a: Affine) -> tuple[Tensor | None, float, bool, bool]:
    """A guidance pair as four arguments."""
    g = a.guidance
    return (None, 0.0, False, False) if g is None else (g.uncond, g.scale, g.from_cond, g.rescale)


def call_step(
    a: Affine,
    noise: Tensor | NoiseAddress | None,
    out_dtype: torch.dtype,
    want_mean: bool,
    sigma: Tensor | None,
    copy_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The custom op with the functions' usual arguments."""
    eps = noise if isinstance(noise, Tensor) else None
    place: tuple[int, Tensor | None, Tensor | None, int] = (0, None, None, 0)
    if isinstance(noise, NoiseAddress):
        place = (signed(noise.seed), noise.sample, noise.step, noise.offset)
    out = affine_step(a.x, a.v, a.coef, a.row, *_spread(a), eps, *place, out_dtype, want_mean, sigma, copy_dtype)
    wanted = (want_mean, sigma is not None, copy_dtype is not None)
    extra = [t if want else None for t, want in zip(out[2:], wanted, strict=True)]
    return out[0], out[1], extra[0], extra[1], extra[2]


@torch.library.custom_op("prefgrpo::affine_logp", mutates_args=())
def affine_logp(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | None,
    uncond: Tensor | None,
    scale: float,
    from_cond: bool,
    rescale: bool,
    v_ref: Tensor | None,
    v_old: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.affine_logp`; absent results are empty."""
    a = Affine(x, v, coef, index, _guidance(uncond, scale, from_cond, rescale))
    logp, kl, guard = _impl(x, v, uncond, x_next, v_ref, v_old).logp(a, x_next, v_ref, v_old)
    return logp, _filled(kl, x), _filled(guard, x)


@affine_logp.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    v_ref, v_old = rest[-2:]
    sizes = (x.shape[0], 0 if v_ref is None else x.shape[0], 0 if v_old is None else x.shape[0])
    return tuple(x.new_empty(n, dtype=torch.float32) for n in sizes)


@torch.library.custom_op("prefgrpo::affine_grad", mutates_args=())
def affine_grad(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    coef: Tensor,
    index: Tensor | None,
    uncond: Tensor | None,
    scale: float,
    from_cond: bool,
    rescale: bool,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    g_logp: Tensor | None,
    g_kl: Tensor | None,
    g_guard: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradient of `affine_logp` in v and u."""
    a = Affine(x, v, coef, index, _guidance(uncond, scale, from_cond, rescale))
    dv, du = _impl(x, v, uncond, x_next, v_ref, v_old).grad(a, x_next, v_ref, v_old, g_logp, g_kl, g_guard)
    return dv, _filled(du, x)


@affine_grad.register_fake
def _(x: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    uncond = rest[3]
    du = x.new_empty(0, dtype=torch.float32) if uncond is None else x.new_empty(x.shape, dtype=uncond.dtype)
    return x.new_empty(x.shape, dtype=v.dtype), du


def _logp_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, v, x_next, coef, index, uncond, *pair, v_ref, v_old = inputs
    ctx.save_for_backward(x, v, x_next, coef, index, uncond, v_ref, v_old)
    ctx.pair = pair


def _logp_backward(ctx: Any, g_logp: Tensor, g_kl: Tensor, g_guard: Tensor) -> tuple[Tensor | None, ...]:
    x, v, x_next, coef, index, uncond, v_ref, v_old = ctx.saved_tensors
    g_kl_given, g_guard_given = (None if ref is None else g for ref, g in ((v_ref, g_kl), (v_old, g_guard)))
    dv, du = affine_grad(x, v, x_next, coef, index, uncond, *ctx.pair, v_ref, v_old, g_logp, g_kl_given, g_guard_given)
    return None, dv, None, None, None, None if uncond is None else du, None, None, None, None, None


affine_logp.register_autograd(_logp_backward, setup_context=_logp_setup)


def call_logp(a: Affine, x_next: Tensor, v_ref: Tensor | None, v_old: Tensor | None) -> Optional3:
    """The custom op with the functions' usual arguments."""
    logp, kl, guard = affine_logp(a.x, a.v, x_next, a.coef, a.row, *_spread(a), v_ref, v_old)
    return logp, None if v_ref is None else kl, None if v_old is None else guard


def call_grad(
    a: Affine,
    x_next: Tensor,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The custom op of the gradient with the functions' usual arguments."""
    dv, du = affine_grad(a.x, a.v, x_next, a.coef, a.row, *_spread(a), v_ref, v_old, *upstream)
    return dv, None if a.guidance is None else du


@torch.library.custom_op("prefgrpo::policy_loss", mutates_args=())
def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    weight: Tensor | None,
    mask: Tensor | None,
    kl: Tensor | None,
    kl_coef: float,
    log_ratio: Tensor | None,
    denominator: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.policy_loss_grad`: (loss, metrics, d log-ratio, d kl); without kl the last is empty."""
    loss, metrics, d_delta, d_kl = _impl(logp, logp_old, advantage, weight, kl, log_ratio).policy(
        logp, logp_old, advantage, clip_low, clip_high, adv_clip, weight, mask, kl, kl_coef, log_ratio, denominator
    )
    return loss, metrics, d_delta, _filled(d_kl, logp)


@policy_loss.register_fake
def _(logp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    kl = rest[7]
    d_kl = logp.new_empty(0) if kl is None else torch.empty_like(logp)
    return logp.new_empty(()), logp.new_empty(8), torch.empty_like(logp), d_kl


def _policy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], output[3])
    ctx.has_kl, ctx.has_ratio = inputs[8] is not None, inputs[10] is not None


def _policy_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_delta, d_kl = ctx.saved_tensors
    delta = d_delta * grad
    kl = d_kl * grad if ctx.has_kl else None
    direct, ratio = (None, delta) if ctx.has_ratio else (delta, None)
    return direct, None, None, None, None, None, None, None, kl, None, ratio, None


policy_loss.register_autograd(_policy_backward, setup_context=_policy_setup)


@torch.library.custom_op("prefgrpo::group_advantage", mutates_args=())
def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    combine: str,
    std: str,
    eps: float,
    ddof: int,
    rank: bool,
    batch_norm: bool,
) -> Tensor:
    """`ops.group_advantage`."""
    impl = implementation(backend_of(rewards.device))
    return impl.group_advantage(rewards, group_ids, weights, combine, std, eps, ddof, rank, batch_norm)


@group_advantage.register_fake
def _(rewards: Tensor, *rest: Any) -> Tensor:
    return rewards.new_empty(rewards.shape[1], dtype=torch.float32)


@torch.library.custom_op("prefgrpo::winrate_advantage", mutates_args=())
def winrate_advantage(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    """`ops.winrate_advantage`."""
    return implementation(backend_of(wins.device)).winrate_advantage(wins, counts, std, eps, ddof)


@winrate_advantage.register_fake
def _(wins: Tensor, counts: Tensor, std: str, eps: float, ddof: int) -> tuple[Tensor, Tensor]:
    return wins.new_empty(wins.shape[:2], dtype=torch.float32), wins.new_empty(wins.shape[:2], dtype=torch.float32)
