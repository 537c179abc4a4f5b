"""policy_loss on every backend: golden numbers, the plain formula in fp64 with autograd, Guard, edge values."""

import pytest
import torch
from hypothesis import strategies as st
from ops_cases import DEVICE, assert_close, each_backend, fuzz, serve

from prefgrpo.ops import METRICS, args, metrics_by_name, policy_loss, reference


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@each_backend
def test_golden_numbers(backend):
    delta = column(2e-4, -3e-4, 5e-5)
    with serve(backend):
        out = policy_loss(delta, torch.zeros_like(delta), column(2.0, -1.0, 7.0), clip_low=1e-4)
    assert float(out.loss.detach()) == pytest.approx(-2.0001833354, abs=1e-6)
    values = metrics_by_name(out.metrics)
    assert list(values) == list(METRICS)
    values = {name: float(value) for name, value in values.items()}
    assert values["approx_kl"] == pytest.approx(2.2083e-8, rel=1e-4)
    assert values["clip_fraction"] == pytest.approx(2 / 3)
    assert values["clip_fraction_high"] == values["clip_fraction_low"] == pytest.approx(1 / 3)
    assert values["ratio_max"] == pytest.approx(1.0002, abs=1e-6)


@each_backend
def test_guards_ratio_replaces_the_difference(backend):
    """Golden ratios of GRPO-Guard, from its published form: b and scale per sample."""
    b, std = torch.tensor([0.00771605, 0.0308642]), 0.1**0.5 * 0.9
    log_ratio = ((torch.tensor([-0.5, -0.6]) - torch.tensor([-0.5002, -0.5997]) + b) * std).to(DEVICE)
    zero, one = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    with serve(backend):
        metrics = policy_loss(zero, one, one, clip_low=1.0, log_ratio=log_ratio).metrics
    assert metrics[4:7].tolist() == pytest.approx([1.00225549, (1.00225549 + 1.00873667) / 2, 1.00873667], abs=1e-6)


B = st.booleans()


@fuzz(
    batch=st.sampled_from([1, 2, 5, 64, 257, 1152]),
    seed=st.integers(0, 99),
    weighted=B,
    with_kl=B,
    guard=B,
    denominator=st.sampled_from([None, 7.0]),
)
def test_against_fp64(backend, batch, seed, weighted, with_kl, guard, denominator):
    g = torch.Generator().manual_seed(seed)
    logp, old, adv, weight, kl, ratio = torch.randn(6, batch, generator=g).to(DEVICE)
    old, ratio = logp + 3e-4 * old, 3e-4 * ratio
    given = [logp, kl if with_kl else None, ratio if guard else None]
    leaves = [t if t is None else t.clone().requires_grad_() for t in given]
    options = {"weight": weight.abs() if weighted else None, "denominator": denominator, "kl_coef": 0.3}
    options |= {"clip_low": 1e-4, "clip_high": 2e-4}
    with serve(backend):
        got = policy_loss(leaves[0], old, 4 * adv, kl=leaves[1], log_ratio=leaves[2], **options)
        (3 * got.loss).backward()
        plain = policy_loss(given[0], old, 4 * adv, kl=given[1], log_ratio=given[2], **options)
    exact = [t if t is None else t.detach().double().requires_grad_() for t in leaves]
    weight64 = None if options["weight"] is None else weight.abs().double()
    fp32_delta = (logp - old).double()  # the difference is rounded once, in fp32, on every backend
    delta = exact[2] if guard else fp32_delta + exact[0] - exact[0].detach()
    clips = (1e-4, 2e-4, 5.0)
    rest = (weight64, exact[1], 0.3, delta, denominator)
    loss, metrics = reference.policy_loss(args.Policy(exact[0], exact[0], 4 * adv.double(), *clips, *rest))
    loss.backward()
    assert_close(got.loss, loss, 1e-5, 1e-6)
    assert torch.equal(got.loss, plain.loss) and torch.equal(got.metrics, plain.metrics)
    near = bool((((delta.exp() - 1 - 2e-4).abs() < 2e-7) | ((delta.exp() - 1 + 1e-4).abs() < 2e-7)).any())
    if near:  # a ratio on the edge of the clip range may fall on either side
        return
    assert_close(got.metrics, metrics, 1e-5, 1e-7)
    for mine, want in zip(leaves, exact, strict=True):
        if mine is not None and want.grad is not None and not (guard and mine is leaves[0]):
            assert_close(mine.grad, 3 * want.grad, 1e-5, 1e-6)


@each_backend
def test_nan_reaches_the_loss_and_the_extremes_of_the_ratio(backend):
    logp = column(0.0, torch.nan, 0.0)
    with serve(backend):
        got = policy_loss(logp, torch.zeros_like(logp), torch.ones_like(logp), clip_low=0.1)
        empty = policy_loss(logp[:0], logp[:0], logp[:0], clip_low=0.1)
    assert torch.isnan(got.loss) and torch.isnan(got.metrics[4:7]).all()
    assert float(empty.loss) == 0.0


@each_backend
def test_the_first_update_has_ratio_one_exactly(backend):
    logp = torch.randn(33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with serve(backend):
        metrics = policy_loss(logp, logp.clone(), torch.ones_like(logp), clip_low=1e-6).metrics
    assert metrics.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


@each_backend
@pytest.mark.parametrize("name", ["logp", "logp_old", "advantage", "weight", "kl", "log_ratio"])
def test_one_tensor_in_fp64_is_read_as_such(backend, name):
    """A kernel that reinterpreted its bits as fp32 would return garbage."""
    given = {k: column(0.1, 0.2, -0.3) for k in ("logp", "logp_old", "advantage", "weight", "kl", "log_ratio")}

    def run(**changed):
        leaves = {k: t.clone().requires_grad_(k in ("kl", "log_ratio")) for k, t in {**given, **changed}.items()}
        out = policy_loss(**leaves, clip_low=0.5, kl_coef=0.1)
        out.loss.backward()
        return *out, leaves["kl"].grad, leaves["log_ratio"].grad

    with serve(backend):
        want, got = run(), run(**{name: given[name].double()})
    for mine, plain in zip(got, want, strict=True):
        assert_close(mine, plain, 1e-6, 1e-7)
