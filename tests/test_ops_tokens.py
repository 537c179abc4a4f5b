"""affine_step and affine_logp with per-element options: masks, rows per token, packed samples, divisors, out=.

Oracle: the published formula element by element in fp64 torch with autograd, independent of tokens and kernels. Run on
every backend, with mixed dtypes and the usual layouts (tokens [B, L, C], clips [B, C, F, H, W]). Masked elements are
NaN, so any use of them shows. Slices of a latent must add up to the whole.
"""

import math

import pytest
import torch
from ops_cases import DEVICE, assert_close, each_backend, make, serve

from prefgrpo.ops import (
    Guidance,
    NoiseAddress,
    affine_logp,
    affine_step,
    group_advantage,
    on_policy_grad,
    philox_normal,
    replay_policy_grad,
)

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAMES = ("logp", "kl", "log_ratio")


def fitted(t, dims):
    """`t` with 1s after its dimensions, up to `dims` of them."""
    return t.view(*t.shape, *[1] * (dims - t.dim()))


def truth(c, x_next, index, mask, segment, divisor, scale, grad):
    """(logp, KL, Guard log-ratio, dv, du) in fp64; every element has its own row, mask and sample."""
    x, y, ref, old = (t.double() for t in (c.x, x_next, c.v_ref, c.v_old))
    v, u = (t.double().requires_grad_() for t in (c.v, c.u))
    index = fitted(index, x.dim()).expand(x.shape)
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else fitted(mask, x.dim()).expand(x.shape)
    q = u + scale * (v - u) if scale else v
    a, b, s, w, k = c.coef.double()[index].unbind(-1)
    safe = torch.where(s > 0, s, 1.0)
    moved = torch.where(s > 0, (y - a * x - b * old) * b / safe * (q - old), 0.0)
    each = (
        torch.where(w != 0, w * (y - a * x - b * q).square() + k, k),
        torch.where(s > 0, (b * (q - ref)).square() / (2 * safe.square()), 0.0),
        moved,
    )
    out = []
    for t in each:
        t = torch.where(keep, t, 0.0)
        out.append(torch.stack([t[segment == i].sum() for i in range(grad.shape[1])]))
    count = torch.stack([keep[segment == i].sum() for i in range(len(out[0]))]).double().clamp_min(1)
    out = [t / (count if divisor is None else divisor) for t in out]
    gradients = torch.autograd.grad(
        sum((g.double() * t).sum() for g, t in zip(grad, out, strict=True)), (v, u), allow_unused=True
    )
    return *(t.detach() for t in out), *gradients


def keep(*shape, seed=3):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4).to(DEVICE)


def rows(*shape):
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)


TOKENS, CLIP = (3, 7, 16), (2, 4, 3, 5, 6)  # [B, L, C] and [B, C, F, H, W]
CASES = {
    "tokens masked": (TOKENS, {"mask": keep(3, 7)}),
    "whole samples masked": (TOKENS, {"mask": torch.tensor([True, False, True], device=DEVICE)}),
    "elements masked": (TOKENS, {"mask": keep(3, 7, 16)}),
    "one mask for all": (TOKENS, {"mask": keep(1, 7)}),
    "one row for all": (TOKENS, {"index": 2, "divisor": 5.0}),
    "one row for all, as that of one frame": (TOKENS, {"index": rows(1, 1)}),
    "a row per token": (TOKENS, {"index": rows(3, 7)}),
    "a row per token, masked": (TOKENS, {"index": rows(3, 7).int(), "mask": keep(3, 7)}),
    "a row per element": (TOKENS, {"index": rows(3, 7, 16), "mask": keep(3, 7, 16)}),
    "a row per frame": (CLIP, {"index": rows(2, 1, 3)}),
    "a row per frame, places masked": (CLIP, {"index": rows(2, 1, 3, 1, 1), "mask": keep(2, 1, 1, 5, 6)}),
    "a row per frame, of all samples": (
        CLIP,
        {"index": rows(1, 1, 3) % 3, "mask": torch.tensor([[[False, True, True]]], device=DEVICE)},
    ),
    "packed": ((11, 16), {"cu_seqlens": [0, 4, 5, 11], "index": rows(3)}),
    "packed, a row per token": ((11, 16), {"cu_seqlens": [0, 4, 5, 11], "index": rows(11)}),
    "packed, some without tokens": ((6, 16), {"cu_seqlens": [0, 0, 2, 6, 6], "index": rows(4)}),
    "packed, as many as tokens": ((3, 16), {"cu_seqlens": [0, 2, 2, 3], "index": rows(3)}),
    "packed, as many, a row per token": ((3, 16), {"cu_seqlens": [0, 2, 2, 3], "index": rows(3, 1)}),
    "packed and masked": ((11, 16), {"cu_seqlens": [0, 4, 5, 11], "index": rows(3), "mask": keep(11)}),
    "packed, sums": ((11, 2, 8), {"cu_seqlens": [0, 2, 11], "index": 0, "divisor": 1}),
    "sums": (TOKENS, {"divisor": 1.0}),
    "a divisor per sample": (TOKENS, {"divisor": torch.tensor([3.0, 100.0, 7.0], device=DEVICE), "mask": keep(3, 7)}),
}


@each_backend
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16)], ids=["fp32", "mixed", "bf16"])
def test_against_the_formula_of_one_element(backend, name, guided, dtypes):
    if backend == "triton" and DEVICE == "cpu" and (guided or dtypes != (F32, BF16) or "element" in name):
        pytest.skip("the interpreter is slow: one mixture of dtypes, without guidance, not each element a sample")
    shape, options = CASES[name]
    c = make(shape[1:], shape[0], *dtypes)
    options = {"index": c.index, **options}
    mask, divisor, index = options.get("mask"), options.get("divisor"), options["index"]
    batch, segment, given = shape[0], torch.arange(shape[0]), dict(options)
    if lengths := options.get("cu_seqlens"):
        batch, segment = len(lengths) - 1, torch.repeat_interleave(torch.tensor(lengths).diff())
        given["cu_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        if isinstance(index, torch.Tensor) and index.shape == (batch,):
            index = index[segment.to(DEVICE)]
    index = torch.full((shape[0],), index, device=DEVICE) if isinstance(index, int) else index.long()
    ids = torch.arange(batch, device=DEVICE)
    noise = c.eps if lengths else NoiseAddress(5, ids, ids)
    spoil = None if mask is None else ~fitted(mask, len(shape))

    def bad(t):
        return t if spoil is None else t.masked_fill(spoil, math.nan)

    v, u = bad(c.v).requires_grad_(), bad(c.u).requires_grad_()
    pair = (lambda uncond: Guidance(uncond, 2.5)) if guided else (lambda _: None)
    g = torch.randn(3, batch, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with serve(backend):
        clean = affine_step(c.x, c.v, c.coef, noise=noise, guidance=pair(c.u), want_mean=True, **given)
        step = affine_step(bad(c.x), bad(c.v), c.coef, noise=noise, guidance=pair(bad(c.u)), **given)
        parts = {"v_ref": bad(c.v_ref), "v_old": bad(c.v_old), "guidance": pair(u)}
        got = affine_logp(bad(c.x), v, step.x_next, c.coef, **parts, **given)
        gradients = torch.autograd.grad(got, (v, u) if guided else (v,), list(g))
    assert torch.equal(step.logp, got.logp.detach()), "the logp of step and replay differ"
    assert torch.equal(step.logp, clean.logp) and torch.equal(bad(clean.x_next).isnan(), step.x_next.isnan())
    *values, dv, du = truth(c, clean.x_next, index, mask, segment.to(DEVICE), divisor, 2.5 if guided else 0.0, g)
    for which, mine, want in zip(NAMES, got, values, strict=True):
        assert mine.shape == (batch,) and mine.dtype == F32, which
        assert_close(mine, want, 2e-5, 1e-5 * float(want.abs().max().clamp_min(0.1)))
    assert bool((dv != 0).any())
    for mine, want in zip(gradients, (dv, du), strict=False):
        if spoil is not None:
            assert not mine[spoil.expand(mine.shape)].any(), "a masked element has a gradient"
        scale = float(want.abs().max())
        assert_close(mine.double() / scale, want / scale, *((1e-2, 1e-2) if mine.dtype == BF16 else (1e-4, 2e-5)))
    a, b, s, *_ = c.coef.double()[fitted(index, len(shape))].unbind(-1)
    q = c.u.double() + 2.5 * (c.v.double() - c.u.double()) if guided else c.v.double()
    mean = a * c.x.double() + b * q
    assert_close(clean.mean, mean, 1e-5, 1e-5)
    drawn = c.eps.double() if lengths else philox_normal(5, ids, ids, math.prod(shape[1:])).view(shape).double()
    tolerance = 1e-5 if c.x.dtype == F32 else 2**-7
    assert_close(clean.x_next, mean + s * drawn, tolerance, tolerance)


@each_backend
def test_slices_of_a_latent_add_up_to_the_whole(backend):
    """As in sequence parallelism: each rank has its slice of the latent and of the noise."""
    c, ids = make((40, 16), 3, F32, F32), torch.arange(3, device=DEVICE)
    with serve(backend):
        v = c.v.clone().requires_grad_()
        whole = affine_step(c.x, c.v, c.coef, c.index, noise=NoiseAddress(1, ids))
        logp = affine_logp(c.x, v, whole.x_next, c.coef, c.index, v_ref=c.v_ref)
        total, kl = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        pieces = v.split(10, 1)
        for k, piece in enumerate(pieces):
            at = slice(10 * k, 10 * k + 10)
            noise = NoiseAddress(1, ids, offset=160 * k)
            part = affine_step(c.x[:, at], c.v[:, at], c.coef, c.index, noise=noise, divisor=640)
            assert torch.equal(part.x_next, whole.x_next[:, at])
            again = affine_logp(c.x[:, at], piece, part.x_next, c.coef, c.index, v_ref=c.v_ref[:, at], divisor=640)
            assert torch.equal(again.logp.detach(), part.logp)
            total, kl = total + again.logp, kl + again.kl
        (want,) = torch.autograd.grad((logp.logp + logp.kl).sum(), v, retain_graph=True)
        (got,) = torch.autograd.grad((total + kl).sum(), v)
    assert_close(total, logp.logp, 1e-6, 1e-6)
    assert_close(kl, logp.kl, 1e-6, 1e-6)
    assert_close(got, want, 1e-5, 1e-8)


@each_backend
def test_results_in_the_callers_memory(backend):
    c, ids = make((9, 16), 3, F32, BF16), torch.arange(3, device=DEVICE)
    adv = torch.tensor([1.0, -1.0, 2.0], device=DEVICE)
    pair = Guidance(c.u, 2.0, rescale=True)
    calls = {
        "step": lambda out: affine_step(c.x, c.v, c.coef, c.index, noise=c.eps, out_dtype=BF16, out=out).x_next,
        "masked": lambda out: affine_step(c.x, c.v, c.coef, 1, noise=None, mask=keep(3, 9), out_dtype=BF16, out=out)[0],
        "per token": lambda out: (
            affine_step(c.x, c.v, c.coef, rows(3, 9), noise=NoiseAddress(1, ids, ids), out_dtype=BF16, out=out).x_next
        ),
        "normal": lambda out: philox_normal(3, ids, ids, 144, dtype=BF16, out=out if out is None else out.flatten(1)),
        "replay": lambda out: (
            replay_policy_grad(c.x, c.v, c.eps, c.coef, c.index, adv, adv, clip_low=9.0, guidance=pair, out=out).dv
        ),
        "on policy": lambda out: on_policy_grad(c.v, c.coef, c.index, NoiseAddress(1, ids), adv, out=out),
    }
    memory = torch.empty(2, 3, 9, 16, dtype=BF16, device=DEVICE)  # the steps of a trajectory
    for name, call in calls.items():
        with serve(backend):
            want = call(None)
            out = torch.empty_like(c.v) if name == "normal" else memory.fill_(7.0)[1]
            got = call(out)
        assert torch.equal(got.flatten(), want.flatten()) and got.data_ptr() == out.data_ptr(), name
        assert name == "normal" or bool((memory[0] == 7.0).all()), "wrote outside `out`"


def test_int32_and_plain_numbers_as_indices():
    c, ids = make((5, 8), 3, F32, F32), torch.arange(3, device=DEVICE)
    one = torch.full_like(c.index, 2)
    want = affine_step(c.x, c.v, c.coef, one, noise=NoiseAddress(1, ids, ids))
    for index in (one.int(), 2):
        got = affine_step(c.x, c.v, c.coef, index, noise=NoiseAddress(1, ids.int(), ids.int()))
        assert torch.equal(got.x_next, want.x_next) and torch.equal(got.logp, want.logp)
        assert torch.equal(affine_logp(c.x, c.v, got.x_next, c.coef, index).logp, want.logp)
    assert torch.equal(philox_normal(1, ids.int(), ids.int(), 8), philox_normal(1, ids, ids, 8))
    rewards = torch.rand(2, 3, device=DEVICE)
    assert torch.equal(group_advantage(rewards, (ids // 2).int()), group_advantage(rewards, ids // 2))


def tokens(**options):
    c = make((7, 16), 3, F32, F32)
    return affine_logp(c.x, c.v, c.eps, c.coef, **{"index": c.index, **options})


def step(out=None, **options):
    c = make((7, 16), 3, F32, F32)
    return affine_step(
        c.x, c.v, c.coef, **{"index": c.index, "noise": None, **options}, out=out(c) if callable(out) else out
    )


IDS = torch.arange(3, device=DEVICE)
REFUSED = {
    "mask shape": (lambda: tokens(mask=keep(3, 6)), ValueError, "mask: expected the leading dimensions"),
    "mask dtype": (lambda: tokens(mask=keep(3).float()), TypeError, r"mask: expected torch\.bool"),
    "index shape": (lambda: tokens(index=rows(3, 6)), ValueError, "index: expected the leading dimensions"),
    "index dtype": (lambda: tokens(index=rows(3, 7).float()), ValueError, "index: expected int64"),
    "divisor": (lambda: tokens(divisor=0), ValueError, "divisor: expected more than 0"),
    "divisor shape": (lambda: tokens(divisor=torch.ones(2, device=DEVICE)), ValueError, "divisor: expected a number"),
    "cu_seqlens": (lambda: tokens(cu_seqlens=torch.ones(2, device=DEVICE)), ValueError, "cu_seqlens: expected int32"),
    "a mask within a norm": (
        lambda: tokens(mask=keep(3, 7, 16), guidance=Guidance(make((7, 16), 3, F32, F32).u, 2.0, rescale=True)),
        ValueError, "one value for the last dimension",
    ),
    "packed noise": (
        lambda: step(cu_seqlens=torch.tensor([0, 1, 3], device=DEVICE), noise=NoiseAddress(1, IDS, IDS)),
        ValueError, "expected a tensor with cu_seqlens",
    ),
    "no step": (lambda: step(index=rows(3, 7), noise=NoiseAddress(1, IDS)), ValueError, "one step per sample"),
    "out shape": (lambda: step(out=torch.empty(3, 7, 15, device=DEVICE)), ValueError, r"out: expected torch\.float32"),
    "out dtype": (lambda: step(out=torch.empty(3, 7, 16, device=DEVICE).half()), ValueError, "out: expected"),
    "out strides": (lambda: step(out=torch.empty(3, 16, 7, device=DEVICE).mT), ValueError, "contiguous memory"),
    "out is x": (lambda: step(out=lambda c: c.x), ValueError, "shares no memory"),
    "out is a view of v": (lambda: step(out=lambda c: c.v[:]), ValueError, "shares no memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


OUTSIDE = torch.tensor([[0, 1, 0], [0, 4, 0], [3, 2, 1]], device=DEVICE)
BAD_PACKS = [[0, 2, 4], [0, 2, 2], [1, 3, 3], [0, 4, 3], [0, -1, 3]]


@each_backend
@pytest.mark.parametrize("packs", [None, *BAD_PACKS], ids=str)
def test_what_only_values_show_is_found_in_tokens_too(backend, packs):
    """An index outside the table; cu_seqlens that do not ascend from 0 to the token count, which touch no memory."""
    c = make((3, 16) if packs is None else (16,), 3, F32, F32)
    options = {"index": OUTSIDE} if packs is None else {"index": 0, "cu_seqlens": torch.tensor(packs, device=DEVICE)}
    if DEVICE == "cuda" and backend == "torch":
        pytest.skip("torch's own assertion on the GPU would end every later test of this process")
    with serve(backend):
        try:
            out = affine_logp(c.x, c.v, c.eps, c.coef, **options)
        except IndexError:
            assert DEVICE == "cpu" and backend != "triton"
        else:  # on a GPU nothing is read back
            assert out.logp.isnan().any()


def test_out_may_lie_beside_an_input():
    """`out` may share a buffer of several steps with an input, but an overlap is refused."""
    c = make((7, 16), 3, F32, F32)
    want = affine_step(c.x, c.v, c.coef, c.index, noise=c.eps)
    buffer = torch.stack((c.x, torch.zeros_like(c.x)))
    got = affine_step(buffer[0], c.v, c.coef, c.index, noise=c.eps, out=buffer[1])
    assert got.x_next.data_ptr() == buffer[1].data_ptr() and torch.equal(buffer[1], want.x_next)
    with pytest.raises(ValueError, match="shares no memory"):
        affine_step(buffer[0], c.v, c.coef, 0, noise=None, out=buffer.flatten()[1:][: c.x.numel()].view_as(c.x))
