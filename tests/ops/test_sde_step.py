"""sde_step and sde_logp on every backend.

Oracles: the formulas in fp64 torch on random shapes, strides and dtypes; and three properties that training relies on:
step and replay give the same logp bit for bit, a sample's bits do not depend on its batch, x' is within 1 ulp of torch.
"""

import itertools

import pytest
import torch
from ops_cases import (
    BF16,
    DEVICE,
    F32,
    F64,
    INTERPRETED,
    Counted,
    assert_close,
    compiled,
    draw,
    each_backend,
    few,
    make,
    sde,
    seeds,
    serve,
    truth_logp,
    ulps,
)

from prefgrpo.ops import Part, PhiloxNoise, philox_normal, sde_logp, sde_step, use_backend

STORED = {F32: 2e-6, BF16: 2**-7}
"""Largest relative error of a number in this dtype."""


def check_step(backend, c, out_dtype, noise):
    """x', its mean and its logp against torch; the replay against the step, bit for bit. Returns x'."""
    options = {"noise": noise, "want_mean": True, "out_dtype": out_dtype}
    with serve(backend):
        got = sde_step(c.x, c.v, c.coef, c.index, **options)
        replay = sde_logp(c.x, c.v, got.x_next, c.coef, c.index)
    with use_backend("torch"):
        want = sde_step(c.x, c.v, c.coef, c.index, **options)
    assert got.x_next.shape == c.x.shape and got.x_next.dtype == out_dtype and got.x_next.is_contiguous()
    if noise is None:
        assert torch.equal(got.logp, c.rows[:, 4]), "nothing is summed: the logp of the mean"
    else:
        assert torch.equal(got.logp, replay.logp), "the logp of step and replay differ"
    if not isinstance(noise, PhiloxNoise):  # the same ε: only the last rounding may differ
        assert ulps(got.x_next, want.x_next) <= 1 and ulps(got.mean, want.mean) <= 1
    for mine, plain in ((got.x_next, want.x_next), (got.mean, want.mean)):
        assert_close(mine, plain, STORED[mine.dtype], STORED[mine.dtype])
    assert (got.logp[c.index == 3] == 0).all()
    return got.x_next


def check_replay(backend, c, x_next, parts, g):
    """logp, KL and log-ratio against fp64, and the gradient of those in `parts` against fp64 autograd."""
    logp, kl, log_ratio, truth = truth_logp(c, x_next, g)
    gradients = []
    results = []
    for block in (serve(backend), use_backend("torch")):
        v = c.v.detach().requires_grad_()
        with block:
            out = sde_logp(c.x, v, x_next, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old)
            total = sum((g[k] * t).sum() for k, t in enumerate(out[:3]) if parts[k])
            gradients += torch.autograd.grad(total, v)
        results.append(out)
    got, plain = results
    assert_close(got.logp, logp, 1e-5, 2e-6)  # cancellation in fp32 itself; the next line is the sharp one
    slack = 2 * (plain.logp.double() - logp).abs() + 4e-7 * logp.abs().clamp_min(1)  # 4e-7: 3 roundings of the result
    assert bool(((got.logp.double() - logp).abs() <= slack).all()), "less accurate than plain torch"
    assert_close(got.kl, kl, 1e-5, 1e-7)
    assert_close(got.log_ratio, log_ratio, 1e-4, 2e-6)
    mine, plain = gradients
    assert mine.dtype == c.v.dtype and mine.shape == c.v.shape
    rtol = 1e-4 if mine.dtype == F32 else 1e-2
    largest = truth.abs().flatten(1).amax(1).clamp_min(1e-12).view(-1, *[1] * (truth.dim() - 1))
    spare = 2 * (plain.double() - truth).abs()  # cancellation in x' − a·x − b·v limits fp32 itself
    error = ((mine.double() - truth).abs() - rtol * truth.abs() - spare) / largest
    assert float(error.max()) <= (1e-5 if mine.dtype == F32 else 1e-2)


PARTS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]


@each_backend
@seeds
def test_random_cases_against_fp64(backend, cases):
    for seed in few(backend, cases):
        c, out_dtype, pick = draw(seed)
        ids = torch.arange(len(c.x), device=DEVICE) + 2**33
        noise = pick.choice([c.eps, None, PhiloxNoise(seed, ids)])
        x_next = check_step(backend, c, out_dtype, noise)
        parts = pick.choice(PARTS)
        g = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(seed))
        check_replay(backend, c, x_next, parts, (g * torch.tensor(parts)[:, None]).to(DEVICE))


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_reference_is_the_formula(parts):
    """In fp64, where it has no error of its own, of which the random cases allow other backends and itself twice."""
    c = make((7, 30), 4, F64, F64)
    g = torch.linspace(0.5, 2.0, 4, device=DEVICE) * torch.tensor(parts, device=DEVICE)[:, None]
    x_next = c.x + 0.1 * c.eps
    *results, truth = truth_logp(c, x_next, g)
    v = c.v.requires_grad_()
    with use_backend("torch"):
        out = sde_logp(c.x, v, x_next, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old)
        (mine,) = torch.autograd.grad([*out[:3]], v, [*g])
    assert_close(mine, truth, 1e-12, 1e-14)
    for result, exact in zip(out[:3], results, strict=True):
        assert_close(result, exact, 1e-7, 1e-12)


@pytest.mark.full
@each_backend
@pytest.mark.parametrize("x_dtype", [F32, BF16])
def test_a_latent_of_a_megapixel(backend, x_dtype):
    """Slightly larger than FLUX's latent at 1024² (Triton: 512²): several tiles per block, the last one partial."""
    c = make((1027 if backend == "triton" and INTERPRETED else 4099, 64), 1, x_dtype, BF16)
    check_replay(backend, c, check_step(backend, c, x_dtype, c.eps), (1, 1, 1), torch.ones(3, 1, device=DEVICE))
    check_step(backend, c, x_dtype, PhiloxNoise(7, c.index))


@each_backend
def test_a_sample_has_the_same_bits_in_any_batch(backend):
    c = make((40, 60), 6, F32, BF16)
    sample = torch.arange(6, device=DEVICE)

    def run(keep):
        x = c.x[keep]
        v = c.v[keep].clone().requires_grad_()
        index = c.index[keep]
        step = sde_step(x, v, c.coef, index, noise=PhiloxNoise(3, sample[keep]))
        out = sde_logp(x, v, step.x_next, c.coef, index, v_ref=c.v_ref[keep], v_old=c.v_old[keep])
        (out.logp.sum() + out.kl.sum() + out.log_ratio.sum()).backward()
        return *step[:2], *out[:3], v.grad

    with serve(backend):
        whole = run(slice(None))
        alone = run(slice(2, 3))
        swapped = run([5, 2, 0, 2])
    for a, b, s in zip(whole, alone, swapped, strict=True):
        assert torch.equal(a[2], b[0].detach()) and torch.equal(a[2], s[1]) and torch.equal(a[2], s[3])


@each_backend
def test_forms_of_the_row_index(backend):
    """A number for all samples, int32, a table of one row per sample: the same step."""
    c = make((6, 10), 3)
    two = torch.full((3,), 2, device=DEVICE)
    with serve(backend):
        want = sde_step(c.x, c.v, c.coef, two, noise=c.eps)
        forms = [(c.coef, 2), (c.coef, two.int()), (c.coef[two], None), (c.coef.double(), two)]
        got = [sde_step(c.x, c.v, coef, index, noise=c.eps) for coef, index in forms]
        counted = [
            sde_step(c.x, c.v, c.coef, index, noise=PhiloxNoise(3, torch.arange(3, device=DEVICE)))
            for index in (two, 2)
        ]
        replayed = [sde_logp(c.x, c.v, c.eps, c.coef, index, v_ref=c.v_ref, v_old=c.v_old) for index in (two, 2)]
        for outside in (4, -1):
            with pytest.raises(IndexError, match="expected 0 … 3"):
                sde_step(c.x, c.v, c.coef, outside, noise=c.eps)
    for out in got:
        assert torch.equal(out.x_next, want.x_next) and torch.equal(out.logp, want.logp)
    for a, b in (*zip(*counted, strict=True), *zip(*replayed, strict=True)):
        assert (a is None and b is None) or torch.equal(a, b)


CUTS = [0, 32, 64, 128], [0, 3, 4, 75, 128]
"""Tokens of 64 channels at which a sample is split: on the blocks of 2048 elements, and not."""


@each_backend
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(("x_dtype", "index"), [(BF16, 1), (F32, None)])
def test_the_parts_of_a_sample_are_the_sample(backend, cuts, x_dtype, index):
    """As in sequence parallelism: every part runs once to tell its sums, and once with those of all, added in place.

    Where the parts begin on blocks, the log-probs of kernels are exactly those of the whole.
    """
    is_slow = backend == "triton" and INTERPRETED
    is_exact = cuts is CUTS[0] and backend != "torch"
    c = make((128, 64), 1 if is_slow else 3, x_dtype, BF16)
    index = c.index if index is None else index
    ids = torch.arange(len(c.x), device=DEVICE) + 2**40
    upstream = torch.linspace(0.5, 2.0, len(c.x), device=DEVICE)

    def run(noise, keep, part=None):
        x, v, ref, old = (t[:, keep] for t in (c.x, c.v, c.v_ref, c.v_old))
        given = noise[:, keep] if noise is c.eps else noise
        step = sde_step(x, v, c.coef, index, noise=given, out_dtype=BF16, part=part)
        leaf = v.clone().requires_grad_()
        out = sde_logp(x, leaf, step.x_next, c.coef, index, v_ref=ref, v_old=old, part=part)
        dv = torch.autograd.grad([*out[:3]], leaf, [upstream, upstream, -upstream])
        return step.x_next, *dv, step.logp, *(t.detach() for t in out[:3])

    keeps = [slice(*ends) for ends in itertools.pairwise(cuts)]
    with serve(backend):
        drawn = philox_normal(7, ids, 5, 128 * 64).view(c.x.shape)
        for keep in keeps:
            part = philox_normal(7, ids, 5, drawn[0, keep].numel(), offset=64 * keep.start)
            assert torch.equal(part, drawn[:, keep].flatten(1))
        noises = (PhiloxNoise(7, ids, 5), c.eps, PhiloxNoise(7, ids), None)
        for noise in noises[: 2 if is_slow else 4]:
            sums = {1: [], 3: []}
            whole = run(noise, slice(None))
            tell = lambda t, sums=sums: sums[len(t)].append(t.clone()) or t  # noqa: E731
            add = lambda t, sums=sums: t.copy_(sum(sums[len(t)]))  # noqa: E731
            for keep in keeps:
                run(noise, keep, Part(64 * keep.start, 128 * 64, tell))
            for keep in keeps:
                x_next, dv, *results = run(noise, keep, Part(64 * keep.start, 128 * 64, add))
                assert torch.equal(x_next, whole[0][:, keep]) and torch.equal(dv, whole[1][:, keep])
                assert noise is None or torch.equal(*results[:2]), "step and replay differ"
                for n, (mine, plain) in enumerate(zip(results, whole[2:], strict=True)):
                    assert_close(mine, plain, 0.0 if is_exact and n < 3 else 2e-6, 1e-6 * (not is_exact))


@each_backend
@pytest.mark.parametrize(("x_dtype", "v_dtype"), [(F32, F32), (F32, BF16), (BF16, BF16), (F64, F64)])
def test_the_mean_of_a_replay(backend, x_dtype, v_dtype):
    """The bits of the step's, with the gradient of a·x + b·v, which adds to that of the log-prob."""
    c = make((7, 30), 5, x_dtype, v_dtype)
    index = c.index.flip(0)
    g = torch.randn(5, 7, 30, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    upstream = torch.linspace(0.5, 2.0, 5, device=DEVICE)
    b = c.coef[index, 1].double().view(5, 1, 1)
    strided = c.v.repeat_interleave(2, -1)[..., ::2].detach().requires_grad_()
    with serve(backend):
        step = sde_step(c.x, c.v, c.coef, index, noise=c.eps, want_mean=True)
        plain = sde_logp(c.x, c.v, step.x_next, c.coef, index, want_mean=True)
        alone = sde_logp(c.x, c.v, step.x_next, c.coef, index)
        assert alone.mean is None and torch.equal(plain.logp, alone.logp)
        for rows, at in ((c.coef, index), (c.coef[index], None), (c.coef, index.int())):
            out = sde_logp(c.x, strided, step.x_next, rows, at, v_ref=c.v_ref, want_mean=True)
            assert torch.equal(out.mean, step.mean) and torch.equal(out.mean, plain.mean) and out.mean.dtype == F32
            (of_mean,) = torch.autograd.grad(out.mean, strided, g, retain_graph=True)
            assert of_mean.dtype == v_dtype
            assert_close(of_mean, b * g.double(), 2**-8 if v_dtype == BF16 else 2e-7, 1e-12)
            (of_logp,) = torch.autograd.grad(out.logp, strided, upstream, retain_graph=True)
            (both,) = torch.autograd.grad([out.mean, out.logp], strided, [g, upstream])
            assert torch.equal(both, of_mean + of_logp)
        (one,) = torch.autograd.grad(sde_logp(c.x, strided, step.x_next, c.coef, 1, want_mean=True).mean, strided, g)
        assert_close(one, c.coef[1, 1].double() * g.double(), 2**-8 if v_dtype == BF16 else 2e-7, 1e-12)


@compiled
def test_the_mean_outside_the_table_is_nan(backend):
    c = make((4, 6), 3)
    index = torch.tensor([0, 4, -1], device=DEVICE)
    with serve(backend):
        mean = sde_logp(c.x, c.v.requires_grad_(), c.eps, c.coef, index, want_mean=True).mean
        (dv,) = torch.autograd.grad(mean.sum(), c.v)
    for t in (mean, dv):
        assert torch.isnan(t).flatten(1).all(1).tolist() == [False, True, True] and torch.isfinite(t[0]).all()


def test_a_call_runs_its_kernels_and_nothing_else(monkeypatch):
    """No fill, copy or cast, whatever the form of the index and of the step; CUDA's kernels: tests/ops/test_gpu.py."""
    c = make((6, 10), 3, F32, BF16)
    y = c.eps.bfloat16()
    ids = torch.arange(3)
    upstream = torch.ones(3)
    leaf = c.v.clone().requires_grad_()
    noises = (c.eps, PhiloxNoise(1, ids), PhiloxNoise(1, ids, -1), None)
    launched = []
    launch = sde.launch
    monkeypatch.setattr(sde, "launch", lambda *args, **more: (launched.append(args[1]), launch(*args, **more)))
    with Counted() as counted:
        for index, noise in itertools.product((1, c.index), noises):
            sde_step(c.x, c.v, c.coef, index, noise=noise, out_dtype=BF16, want_mean=True)
        out = sde_logp(c.x, leaf, y, c.coef, 1, v_ref=c.v_ref, v_old=c.v_old)
        torch.autograd.grad(out.logp, leaf, upstream)
        sde_logp(c.x, c.v, y, c.coef, 1, want_mean=True)
    assert launched == ["sde_step"] * 8 + ["sde_logp", "sde_grad", "sde_step", "sde_logp"]
    assert [name for name in counted.names if name != "aten::detach"] == []


@each_backend
def test_empty_batch(backend):
    c = make((5, 3), 0)
    with serve(backend):
        step = sde_step(c.x, c.v, c.coef, c.index, noise=PhiloxNoise(1, c.index))
        v = c.v.clone().requires_grad_()
        out = sde_logp(c.x, v, step.x_next, c.coef, c.index, v_ref=c.v_ref)
        out.logp.sum().backward()
    assert step.x_next.shape == (0, 5, 3) and out.kl.shape == (0,) and v.grad.shape == (0, 5, 3)


@each_backend
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(backend, dtype, bad):
    """Sample 3 has w = s = 0; sample 0 has upstream gradient 0 (clipped): their gradients are 0 whatever they hold."""
    c = make((3, 5), 4, dtype, dtype)
    upstream = torch.tensor([0.0, 1.0, 2.0, 3.0], device=DEVICE)

    def run(spoil):
        tensors = [t.clone() for t in (c.x, c.v, c.eps.to(dtype), c.v_ref, c.v_old)]
        for t in tensors:
            t[[0, 3], 1, 2] = spoil
        x, v, y, ref, old = tensors
        out = sde_logp(x, v.requires_grad_(), y, c.coef, c.index, v_ref=ref, v_old=old)
        return out, *torch.autograd.grad([*out[:3]], v, [upstream] * 3), sde_step(x, v, c.coef, c.index, noise=c.eps)

    with serve(backend):
        (_, clean, _), (out, spoilt, step) = run(0.5), run(bad)
    assert torch.equal(spoilt[1:3], clean[1:3]) and not spoilt[[0, 3]].any()
    assert [float(t.detach()[3]) for t in out[:3]] == [0.0, 0.0, 0.0]
    assert torch.isfinite(step.logp).tolist() == [False, True, True, True] and float(step.logp[3]) == 0.0
    assert torch.isfinite(step.x_next).flatten(1).all(1).tolist() == [False, True, True, False]


@compiled
def test_every_bf16_number_is_read_and_rounded_like_torch(backend):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(1, -1).to(DEVICE)
    half = torch.cat([every, (every.float() * (1 + 2**-9)).to(BF16)], 1)
    coef = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]], device=DEVICE)
    fine = (half.float() * (1 + 2**-8 + 2**-12)).nan_to_num(1.0, 1.0, 1.0)
    for x, v, out in ((half, torch.zeros_like(half), F32), (fine, torch.zeros_like(fine), BF16)):
        with serve(backend):
            got = sde_step(x, v, coef, noise=None, out_dtype=out).x_next
        want = x.float().to(out)
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(got), nan) and torch.equal(got[~nan], want[~nan])


def test_nothing_of_size_d_is_saved_beyond_the_inputs():
    c = make((6, 7), 3, F32, BF16)
    inputs = {t.data_ptr() for t in (c.x, c.v, c.eps, c.v_ref, c.v_old)}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sde_logp(c.x, c.v.requires_grad_(), c.eps, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old)
    large = [t for t in saved if t.numel() >= c.x.numel()]
    assert large and all(t.data_ptr() in inputs for t in large)


@compiled
def test_an_index_outside_the_table_gives_nan(backend):
    c = make((4, 6), 3)
    for outside in (4, -1):
        with serve(backend):
            out = sde_step(c.x, c.v, c.coef, torch.tensor([0, outside, 1], device=DEVICE), noise=c.eps)
        assert torch.isnan(out.logp).tolist() == [False, True, False] and torch.isnan(out.x_next[1]).all()
