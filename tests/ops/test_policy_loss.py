"""policy_loss on every backend: golden numbers, the plain formula in fp64 with autograd, edge values."""

import math

import pytest
import torch
from ops_cases import DEVICE, F64, assert_close, each_backend, few, seeds, serve

from prefgrpo.ops import METRICS, metrics_by_name, policy_loss


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def truth(delta, advantage, weight, kl, low, high, adv_clip, kl_coef, denominator):
    """(each sample's loss, metrics) by the textbook formula in fp64; the loss is differentiable."""
    n = max(len(delta), 1)
    ratio = delta.exp()
    a = advantage.clamp(-adv_clip, adv_clip)
    term = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    loss = term * (1.0 if weight is None else weight) + (0.0 if kl is None else kl_coef * kl)
    above, below = (ratio > 1 + high).sum() / n, (ratio < 1 - low).sum() / n
    squares = 0.5 * delta.square().sum() / n
    of_kl = ratio.new_zeros(()) if kl is None else kl.sum() / n
    metrics = [squares, above + below, above, below, ratio.amin(), ratio.sum() / n, ratio.amax(), of_kl]
    metrics += [ratio.std(), torch.mean(-delta)] if n > 1 else [ratio[0] * torch.nan, -delta[0]]
    return loss / denominator, torch.stack(metrics)


@each_backend
def test_golden_numbers(backend):
    delta = column(2e-4, -3e-4, 5e-5)
    with serve(backend):
        out = policy_loss(delta, torch.zeros_like(delta), column(2.0, -1.0, 7.0), epsilon_low=1e-4)
    assert float(out.loss.detach()) == pytest.approx(-2.0001833354, abs=1e-6)
    values = {name: float(value) for name, value in metrics_by_name(out.metrics).items()}
    assert list(values) == list(METRICS)
    assert values["approx_kl"] == pytest.approx(2.2083e-8, rel=1e-4)
    assert values["clip_fraction"] == pytest.approx(2 / 3)
    assert values["clip_fraction_high"] == values["clip_fraction_low"] == pytest.approx(1 / 3)
    assert values["ratio_max"] == pytest.approx(1.0002, abs=1e-6)
    assert values["ppo_kl"] == pytest.approx(5e-5 / 3, rel=1e-5)
    assert values["ratio_std"] == pytest.approx(2.565638e-4, rel=1e-6)


def random_case(seed):
    g = torch.Generator().manual_seed(seed)
    batch = 70_001 if seed == 6 else (1, 2, 5, 64, 257, 1152, 2049)[seed % 7]  # many chunks of a block or program
    use = [bool(seed >> k & 1) for k in range(4)]
    logp, noise, adv, weight, kl, log_ratio = torch.randn(6, batch, generator=g).to(DEVICE)
    clip = (1e-4, 1e-6, 0.2)[seed % 3]
    old = None if use[1] else logp + 3 * clip * noise
    inputs = {"logp": 3 * clip * log_ratio if use[1] else logp, "kl": kl if use[0] else None}
    options = {"weight": weight.abs() if use[2] else None, "denominator": 7.0 if use[3] else None, "kl_coef": 0.3}
    options["reduction"] = "none" if seed % 3 == 1 else "mean"
    return inputs, old, 4 * adv, options | {"epsilon_low": clip, "epsilon_high": 2 * clip}


@each_backend
@seeds
def test_random_cases_against_fp64(backend, cases):
    for seed in few(backend, cases):
        inputs, old, adv, options = random_case(seed)
        leaves = {k: t if t is None else t.clone().requires_grad_() for k, t in inputs.items()}
        with serve(backend):
            got = policy_loss(leaves["logp"], old, adv, kl=leaves["kl"], **options)
            upstream = torch.linspace(1.0, 3.0, got.loss.numel(), device=DEVICE).view(got.loss.shape)
            got.loss.backward(upstream)
        exact = {k: t if t is None else t.detach().double().requires_grad_() for k, t in inputs.items()}
        delta = exact["logp"]
        if old is not None:  # the difference is rounded once, in fp32, on every backend
            delta = (inputs["logp"] - old).double() + exact["logp"] - exact["logp"].detach()
        weight = None if options["weight"] is None else options["weight"].double()
        clips = (options["epsilon_low"], options["epsilon_high"], 5.0)
        norm = options["denominator"] or (1 if options["reduction"] == "none" else len(adv))
        loss, metrics = truth(delta, adv.double(), weight, exact["kl"], *clips, 0.3, norm)
        floor = 1e-6
        if options["reduction"] != "none":
            floor *= max(1.0, float(loss.detach().abs().sum()))  # samples of both signs cancel in the sum
            loss = loss.sum()
        loss.backward(upstream.double())
        assert_close(got.loss, loss, 1e-5, floor)
        one = len(adv) == 1
        assert not one or (torch.isnan(got.metrics).nonzero().flatten().tolist() == [METRICS.index("ratio_std")])
        assert_close(
            got.metrics.nan_to_num() if one else got.metrics, metrics.nan_to_num() if one else metrics, 1e-5, 1e-7
        )
        for name, leaf in leaves.items():
            if leaf is not None and exact[name].grad is not None:
                assert_close(leaf.grad, exact[name].grad, 1e-5, 1e-6)


@each_backend
def test_samples_with_several_steps(backend):
    """[B, S] is the same loss as [B·S], whatever the layout; the loss of each has the shape."""
    g = torch.Generator().manual_seed(0)
    logp, old, advantage, weight, kl = torch.randn(5, 6, 4, generator=g).to(DEVICE)
    old = logp + 0.1 * old
    options = {"epsilon_low": 0.05, "kl_coef": 0.3}

    def run(shape, **more):
        leaf, of_kl = (t.reshape(shape).clone().requires_grad_() for t in (logp, kl))
        rest = [t.reshape(shape) for t in (old, advantage)]
        out = policy_loss(leaf, *rest, weight=weight.abs().reshape(shape), kl=of_kl, **options, **more)
        return out, *torch.autograd.grad(out.loss.sum(), [leaf, of_kl])

    with serve(backend):
        for more in ({}, {"reduction": "none"}, {"denominator": 7.0}):
            flat = run((24,), **more)
            steps = run((6, 4), **more)
            assert torch.equal(flat[0].metrics, steps[0].metrics)
            assert torch.equal(flat[0].loss.flatten(), steps[0].loss.flatten())
            assert all(torch.equal(a.view(6, 4), b) for a, b in zip(flat[1:], steps[1:], strict=True))
            assert steps[0].loss.shape == ((6, 4) if "reduction" in more else ())
        leaf = logp.T.requires_grad_()  # another layout, and one advantage for all steps
        wide = advantage[:, 0].expand(4, 6)
        turned = policy_loss(leaf, old.T, wide, **options, reduction="none")
        plain = policy_loss(logp.T.contiguous(), old.T.contiguous(), wide.contiguous(), **options, reduction="none")
        assert torch.equal(turned.loss.detach(), plain.loss) and torch.equal(turned.metrics, plain.metrics)
        assert torch.autograd.grad(turned.loss.sum(), leaf)[0].shape == (4, 6)
        assert policy_loss(logp[:, :0], old[:, :0], kl[:, :0], **options, reduction="none").loss.shape == (6, 0)


@each_backend
def test_the_spread_of_ratios_near_one(backend):
    """Of 1e-6: a variance as mean of squares minus square of the mean would be rounding, in fp32 and nearly in fp64."""
    delta = 1e-6 * torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with serve(backend):
        found = metrics_by_name(policy_loss(delta, None, torch.ones_like(delta), epsilon_low=0.1).metrics)
    assert float(found["ratio_std"]) == pytest.approx(float(delta.double().exp().std()), rel=1e-6)
    assert float(found["ppo_kl"]) == pytest.approx(float(-delta.double().mean()), rel=1e-6)


@each_backend
@pytest.mark.parametrize("clip", [1e-6, 2e-6, 1e-4])
def test_whether_a_ratio_is_clipped_is_exact(backend, clip):
    """The nearest log-ratios on both sides of each bound: as ratios in fp32, most of them would be the bound itself."""
    low, high = math.log1p(-clip), math.log1p(clip)
    below, above = (column(bound).expand(2).clone() for bound in (low, high))
    edges = torch.cat([torch.nextafter(t, t + s) for t in (below, above) for s in (column(-1.0, 1.0),)])
    want = edges.double() > high, edges.double() < low
    leaf = edges.clone().requires_grad_()
    advantage = column(-1.0, -1.0, 1.0, 1.0)
    with serve(backend):
        out = policy_loss(leaf, torch.zeros_like(edges), advantage, epsilon_low=clip)
        out.loss.backward()
    assert metrics_by_name(out.metrics)["clip_fraction_high"] == want[0].sum() / 4
    assert metrics_by_name(out.metrics)["clip_fraction_low"] == want[1].sum() / 4
    assert torch.equal(leaf.grad == 0, want[0] | want[1])


@each_backend
def test_nan_reaches_the_loss_and_the_extremes_of_the_ratio(backend):
    logp = column(0.0, torch.nan, 0.0)
    with serve(backend):
        got = policy_loss(logp, torch.zeros_like(logp), torch.ones_like(logp), epsilon_low=0.1)
        empty = policy_loss(logp[:0], logp[:0], logp[:0], epsilon_low=0.1)
    assert torch.isnan(got.loss) and torch.isnan(got.metrics[4:7]).all() and torch.isnan(got.metrics[8:]).all()
    assert float(empty.loss) == 0.0 and torch.isnan(empty.metrics[8]) and float(empty.metrics[9]) == 0.0


@each_backend
def test_the_first_update_has_ratio_one_exactly(backend):
    logp = torch.randn(33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with serve(backend):
        metrics = policy_loss(logp, logp.clone(), torch.ones_like(logp), epsilon_low=1e-6).metrics
    assert metrics.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


NAMES = ("logp", "logp_old", "advantage", "weight", "kl")


@each_backend
def test_a_tensor_in_fp64_is_read_as_such(backend):
    """A kernel that reinterpreted its bits as fp32 would return garbage."""
    inputs = {k: column(0.1, 0.2, -0.3) for k in NAMES}

    def run(**changed):
        leaves = {k: t.clone().requires_grad_(k in ("logp", "kl")) for k, t in {**inputs, **changed}.items()}
        out = policy_loss(**leaves, epsilon_low=0.5, kl_coef=0.1)
        out.loss.backward()
        return *out, leaves["kl"].grad, leaves["logp"].grad

    with serve(backend):
        want = run()
        for name in NAMES:
            for mine, plain in zip(run(**{name: inputs[name].to(F64)}), want, strict=True):
                assert_close(mine, plain, 1e-6, 1e-7)
