"""sde_step and sde_logp on every backend.

Oracles: golden numbers measured in fp64 from the published formulas; the same formulas in fp64 torch on random shapes
(hypothesis: D = 1, odd D, more than one tile, 5-D), dtypes and parts; and three properties that training relies on:
step and replay give the same logp bit for bit, a sample's bits do not depend on its batch, x' is within 1 ulp of torch.
"""

import pytest
import sde_formulas
import torch
from hypothesis import strategies as st
from ops_cases import (
    DEVICE,
    DTYPES,
    SHAPES,
    assert_close,
    compiled,
    each_backend,
    fuzz,
    make,
    row,
    serve,
    truth_logp,
    ulps,
)

from prefgrpo.ops import Guidance, PhiloxNoise, sde_logp, sde_step, use_backend

GUIDANCES = st.sampled_from([None, (3.0, False, False), (1.5, True, False), (3.5, False, True), (0.7, True, True)])


@each_backend
@sde_formulas.golden
def test_golden_numbers(backend, case):
    *step, _, std, x_next, logp = case
    coef = torch.tensor([row(*step)], device=DEVICE)
    x, v, z = (torch.tensor([t], device=DEVICE) for t in sde_formulas.INPUTS)
    with serve(backend):
        out = sde_step(x, v, coef, noise=z)
        again = sde_logp(x, v, out.x_next, coef)
    assert float(coef[0, 2]) == pytest.approx(std, abs=1e-6)
    assert out.x_next[0].tolist() == pytest.approx(x_next, abs=1e-6)
    assert float(out.logp) == pytest.approx(logp, abs=2e-6)
    assert torch.equal(out.logp, again.logp)


INPUTS = {"shape": SHAPES, "batch": st.integers(1, 4), "x_dtype": DTYPES, "v_dtype": DTYPES, "guidance": GUIDANCES}


@fuzz(**INPUTS, out_dtype=DTYPES, how=st.sampled_from(["given", "none", "address"]))
def test_step_and_replay_against_fp64(backend, shape, batch, x_dtype, v_dtype, out_dtype, guidance, how):
    c = make(shape, batch, x_dtype, v_dtype)
    pair = None if guidance is None else Guidance(c.u, *guidance)
    sample = torch.arange(batch, device=DEVICE) + 2**33
    noise = {"given": c.eps, "none": None, "address": PhiloxNoise(7, sample, offset=3)}[how]
    more = {"want_mean": True, "guidance": pair, "out_dtype": out_dtype}
    with serve(backend):
        got = sde_step(c.x, c.v, c.coef, c.index, noise=noise, **more)
        replay = sde_logp(c.x, c.v, got.x_next, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old, guidance=pair)
    with use_backend("torch"):
        want = sde_step(c.x, c.v, c.coef, c.index, noise=noise, **more)
    assert got.x_next.shape == c.x.shape and got.x_next.dtype == out_dtype
    assert torch.equal(got.logp, replay.logp), "the logp of step and replay differ"
    if how != "address" and not (guidance and guidance[2]):  # same ε, same v: only the last rounding may differ
        assert ulps(got.x_next, want.x_next) <= 1 and ulps(got.mean, want.mean) <= 1
    for name in ("x_next", "mean"):
        eps = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[getattr(got, name).dtype]
        assert_close(getattr(got, name), getattr(want, name), eps, eps)
    check_values(c, got.x_next, replay, pair)
    assert (got.logp[c.index == 3] == 0).all()


def check_values(c, x_next, got, pair):
    logp, kl, guard = truth_logp(c, x_next, pair)
    with use_backend("torch"):
        plain = sde_logp(c.x, c.v, x_next, c.coef, c.index, guidance=pair).logp
    assert_close(got.logp, logp, 1e-5, 1e-6)
    slack = 2 * (plain.double() - logp).abs() + 4e-7 * logp.abs().clamp_min(1)  # 4e-7: 3 roundings of the result itself
    assert bool(((got.logp.double() - logp).abs() <= slack).all()), "less accurate than plain torch"
    assert_close(got.kl, kl, 1e-5, 1e-7)
    assert_close(got.log_ratio, guard, 1e-4, 2e-6)


@fuzz(**INPUTS, parts=st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]))
def test_gradient_against_fp64_autograd(backend, shape, batch, x_dtype, v_dtype, guidance, parts):
    c = make(shape, batch, x_dtype, v_dtype, seed=1)
    v, u = c.v.clone().requires_grad_(), c.u.clone().requires_grad_()
    pair = None if guidance is None else Guidance(u, *guidance)
    x_next = (c.x.float() + 0.3 * c.eps).to(x_dtype)
    g = torch.randn(3, batch, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    g = g * torch.tensor(parts, device=DEVICE)[:, None]
    gradients = []
    for block in (serve(backend), use_backend("torch")):
        with block:
            out = sde_logp(c.x, v, x_next, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old, guidance=pair)
            leaves = (v,) if pair is None else (v, u)
            gradients.append(torch.autograd.grad(sum((g[k] * t).sum() for k, t in enumerate(out) if parts[k]), leaves))
    truth = truth_logp(c, x_next, None if pair is None else pair._replace(uncond=c.u), grad=g)[3:]
    rtol = 1e-4 if v_dtype == torch.float32 else 1e-2
    tiny = 6e-6 if v_dtype == torch.float16 else 1e-12  # the spacing of fp16 subnormals is 6e-8
    largest = torch.stack([want.abs().flatten(1).amax(1) for want in truth]).amax(0).clamp_min(tiny)
    for mine, plain, want in zip(*gradients, truth, strict=True):
        assert mine.dtype == v_dtype
        scale = largest.view(-1, *[1] * (want.dim() - 1))
        spare = 2 * (plain.double() - want).abs()  # cancellation in x' − a·x − b·v limits fp32 itself
        error = ((mine.double() - want).abs() - rtol * want.abs() - spare) / scale
        assert float(error.max()) <= (1e-5 if v_dtype == torch.float32 else 1e-2)


@pytest.mark.full
@each_backend
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [None, (3.0, False, True)])
def test_a_latent_of_a_megapixel(backend, x_dtype, guidance):
    """Slightly larger than FLUX's latent at 1024² (Triton: 512²): several tiles per block, the last one partial."""
    c = make((1027 if backend == "triton" else 4099, 64), 1, x_dtype, torch.bfloat16)
    v, u = c.v.clone().requires_grad_(), c.u.clone().requires_grad_()
    pair = guidance and Guidance(u, *guidance)
    results = []
    for block in (serve(backend), use_backend("torch")):
        plain = pair and pair._replace(uncond=c.u)
        with block:
            given = sde_step(c.x, c.v, c.coef, c.index, noise=c.eps, guidance=plain)
            drawn = sde_step(c.x, c.v, c.coef, c.index, noise=PhiloxNoise(7, c.index), guidance=plain)
            replay = sde_logp(c.x, v, given.x_next, c.coef, c.index, v_ref=c.v_ref, guidance=pair)
            again = sde_logp(c.x, c.v, drawn.x_next, c.coef, c.index, guidance=plain)
            gradient = torch.autograd.grad((replay.logp + replay.kl).sum(), (v, u) if pair else v)
        if not results:
            assert torch.equal(given.logp, replay.logp.detach()) and torch.equal(drawn.logp, again.logp)
        results.append((given.x_next, drawn.x_next, given.logp, replay.kl.detach(), *gradient))
    for k, (got, want) in enumerate(zip(*results, strict=True)):
        close = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[got.dtype]
        assert_close(got, want, close, close * float(want.abs().max()))
        assert k > 0 or guidance or ulps(got, want) <= 1


@each_backend
@pytest.mark.parametrize("guidance", [None, (3.0, False, True)])
def test_a_sample_has_the_same_bits_in_any_batch(backend, guidance):
    c = make((40, 60), 6, torch.float32, torch.bfloat16)
    sample = torch.arange(6, device=DEVICE)

    def run(keep):
        pair = None if guidance is None else Guidance(c.u[keep], *guidance)
        x, v, index = c.x[keep], c.v[keep].clone().requires_grad_(), c.index[keep]
        step = sde_step(x, v, c.coef, index, noise=PhiloxNoise(3, sample[keep]), guidance=pair)
        out = sde_logp(x, v, step.x_next, c.coef, index, v_ref=c.v_ref[keep], v_old=c.v_old[keep], guidance=pair)
        (out.logp.sum() + out.kl.sum() + out.log_ratio.sum()).backward()
        return *step[:2], *out, v.grad

    with serve(backend):
        whole, alone, swapped = run(slice(None)), run(slice(2, 3)), run([5, 2, 0, 2])
    for a, b, s in zip(whole, alone, swapped, strict=True):
        assert torch.equal(a[2], b[0].detach()) and torch.equal(a[2], s[1]) and torch.equal(a[2], s[3])


@each_backend
def test_strided_samples_and_transposed_latents(backend):
    c = make((6, 10), 4, torch.float32, torch.float32)
    store = torch.randn(4, 3, 6, 10, device=DEVICE)
    store[:, 1] = c.x
    turned = c.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    with serve(backend):
        want = sde_step(c.x, c.v, c.coef, c.index, noise=c.eps)
        got = sde_step(store[:, 1], turned, c.coef, c.index, noise=c.eps.expand_as(c.eps))
        lazy = sde_step(*(torch._neg_view(-t) for t in (c.x, c.v)), c.coef, c.index, noise=torch._neg_view(-c.eps))
        shared = sde_step(c.x, c.v[:1].expand(4, 6, 10), c.coef, c.index, noise=c.eps)
        copied = sde_step(c.x, c.v[:1].repeat(4, 1, 1), c.coef, c.index, noise=c.eps)
    for out in (got, lazy):  # a lazily negated view's memory holds the opposite sign
        assert torch.equal(out.x_next, want.x_next) and torch.equal(out.logp, want.logp)
    assert torch.equal(shared.x_next, copied.x_next)


@each_backend
def test_empty_batch(backend):
    c = make((5, 3), 0, torch.float32, torch.float32)
    with serve(backend):
        step = sde_step(c.x, c.v, c.coef, c.index, noise=PhiloxNoise(1, c.index))
        v = c.v.clone().requires_grad_()
        out = sde_logp(c.x, v, step.x_next, c.coef, c.index, v_ref=c.v_ref)
        out.logp.sum().backward()
    assert step.x_next.shape == (0, 5, 3) and out.kl.shape == (0,) and v.grad.shape == (0, 5, 3)


@each_backend
def test_nan_stays_in_its_sample_and_never_reaches_a_step_without_logp(backend):
    c = make((9,), 4, torch.float32, torch.float32)
    c.v[1, 3] = c.v[3, 3] = torch.nan
    with serve(backend):
        out = sde_step(c.x, c.v, c.coef, c.index, noise=c.eps)
    assert torch.isnan(out.logp).tolist() == [False, True, False, False]
    assert float(out.logp[3]) == 0.0
    assert torch.isnan(out.x_next).sum() == 2


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [None, (3.0, False, False), (3.0, False, True)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_without_logp_has_gradient_zero_whatever_its_latents_hold(backend, dtype, guidance, bad):
    """Sample 3 has w = s = 0; sample 0 has upstream gradient 0 (clipped). The other samples must not be affected."""
    c = make((3, 5), 4, dtype, dtype)
    x_next = c.eps.to(dtype)

    def gradients(spoil):
        given = [t.clone() for t in (c.x, c.v, x_next, c.u, c.v_ref, c.v_old)]
        for t in given:
            t[[0, 3], 1, 2] = spoil
        x, v, y, u, ref, old = given
        leaves = [v.requires_grad_(), u.requires_grad_()] if guidance else [v.requires_grad_()]
        pair = Guidance(u, *guidance) if guidance else None
        out = sde_logp(x, v, y, c.coef, c.index, v_ref=ref, v_old=old, guidance=pair)
        upstream = torch.tensor([0.0, 1.0, 2.0, 3.0], device=DEVICE)
        return out, torch.autograd.grad([*out], leaves, [upstream] * 3)

    with serve(backend):
        (_, clean), (out, spoilt) = gradients(0.5), gradients(bad)
    for g, want in zip(spoilt, clean, strict=True):
        assert torch.equal(g[1:3], want[1:3]) and not g[[0, 3]].any()
    assert [float(t[3]) for t in out] == [0.0, 0.0, 0.0]


@each_backend
def test_latents_of_inference_mode_can_be_replayed(backend):
    c = make((6, 7), 3, torch.float32, torch.bfloat16)
    v = c.v.clone().requires_grad_()
    with serve(backend):
        with torch.inference_mode():
            x, coef, index, ref = c.x.clone(), c.coef.clone(), c.index.clone(), c.v_ref.clone()
            y = sde_step(x, c.v, coef, index, noise=c.eps).x_next
        got, want = (
            torch.autograd.grad(sum(t.sum() for t in sde_logp(*given, v_ref=r)[:2]), v)[0]
            for given, r in (((x, v, y, coef, index), ref), ((c.x, v, y.clone(), c.coef, c.index), c.v_ref))
        )
    assert y.is_inference() and want.any() and torch.equal(got, want)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_and_rounded_like_torch(backend, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, -1).to(DEVICE)
    half = torch.cat([every, (every.float() * (1 + 2**-9)).to(dtype)], 1)
    coef = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]], device=DEVICE)
    fine = (half.float() * (1 + 2**-8 + 2**-12)).nan_to_num(1.0, 1.0, 1.0)
    for x, v, out in ((half, torch.zeros_like(half), torch.float32), (fine, torch.zeros_like(fine), dtype)):
        with serve(backend):
            got = sde_step(x, v, coef, noise=None, out_dtype=out).x_next
        want = x.float().to(out)
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(got), nan) and torch.equal(got[~nan], want[~nan])


@each_backend
def test_nothing_of_size_d_is_saved_beyond_the_inputs(backend):
    c = make((6, 7), 3, torch.float32, torch.bfloat16)
    v = c.v.requires_grad_()
    known = {t.data_ptr() for t in (c.x, c.v, c.eps, c.v_ref, c.v_old, c.coef, c.index)}
    saved = []
    with serve(backend), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sde_logp(c.x, v, c.eps, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old)
    assert saved and all(t.data_ptr() in known for t in saved)
