"""sde_rows: the rules on tensors, in one launch.

Why these cases: a host that keeps no schedule gets its rows from here, and rollout and replay must agree with one that
has a table, so rows are compared with a schedule's bit for bit, and with the published formulas in fp64; every mixture
of tensors and numbers is a specialisation of its own.
"""

import itertools
import math

import ops_cases
import pytest
import torch
from ops_cases import DEVICE, F32, F64, Counted, each_backend, serve

from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.rows import sde_rows
from prefgrpo.sde.rules import RULES, Row
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas


@each_backend
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7, 1.0])
def test_rows_are_those_of_a_schedule(backend, rule, eta):
    """All steps of a long schedule, σ = 1 and σ' = 0 among them; two blocks of a program."""
    sigmas = shifted_sigmas(90, 3.0)
    want = make_schedule(sigmas, rule, eta).coef
    sigmas = sigmas.to(DEVICE)
    with serve(backend):
        got = sde_rows(rule, sigmas[:-1], sigmas[1:], eta, sigmas[1], sigmas[-1])
    assert got.dtype == F32 and got.device.type == DEVICE and torch.equal(got.cpu(), want)


@each_backend
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "ode"])
def test_rows_are_the_published_formulas(backend, rule):
    sigma = torch.tensor([0.95, 0.7, 0.31, 0.02], dtype=F64)
    after = torch.tensor([0.9, 0.69, 0.1, 0.005], dtype=F64)
    eta = torch.tensor([0.9, 0.5, 0.2, 0.7], dtype=F64)
    x = torch.tensor([[0.5, -1.2]]).repeat(4, 1)
    v = torch.tensor([[-0.3, 0.8]]).repeat(4, 1)
    levels = {"flow": (eta[:, None], 0.93), "wan": (0.93, 0.01)}.get(rule, (eta[:, None],))
    formula = getattr(ops_cases, rule.removesuffix("_normalised"))
    mean, std, _ = formula(x, v, sigma[:, None], after[:, None], *levels)
    with serve(backend):
        got = sde_rows(rule, *(t.to(DEVICE) for t in (sigma, after, eta)), 0.93, 0.01).cpu().double()
    a, b, s, w, c = got[:, :, None].unbind(1)
    std = std.expand(4, 1)
    assert torch.allclose(a * x + b * v, mean, rtol=1e-6, atol=1e-7) and torch.allclose(s, std, rtol=1e-7)
    if rule == "cps":
        assert (w == -1).all() and (c == 0).all()
    else:
        assert torch.allclose(w, -1 / (2 * std**2), rtol=1e-7)
        assert torch.allclose(c, -torch.log(std) - 0.5 * math.log(2 * math.pi), rtol=1e-7)


@each_backend
def test_tensors_and_numbers_mix(backend):
    sigma = torch.tensor([0.9, 0.75, 0.5], device=DEVICE)
    after = torch.tensor([0.8, 0.7, 0.25], device=DEVICE)
    number = {"eta": 0.625, "sigma_max": 0.9375, "sigma_min": 0.125}
    with serve(backend):
        want = sde_rows("wan", sigma, after, **number), sde_rows("flow", sigma, after, **number)
        kinds = (float, lambda n: torch.tensor(n, device=DEVICE), lambda n: torch.full((3,), n, device=DEVICE))
        for made in itertools.product(kinds, repeat=3):
            given = {name: kind(n) for kind, (name, n) in zip(made, number.items(), strict=True)}
            for rule, rows in zip(("wan", "flow"), want, strict=True):
                assert torch.equal(sde_rows(rule, sigma, after, **given), rows)
        turned = torch.stack((sigma, after), 1)  # strided columns
        assert torch.equal(sde_rows("flow", *turned.unbind(1), **number), want[1])
        first = sde_rows("flow", sigma[0], after[0], **number)
        assert torch.equal(first, want[1][:1])
        assert torch.equal(sde_rows("flow", sigma[:1], after, **number)[0], first[0])
        rounded = sde_rows("flow", sigma.bfloat16(), after.half(), **number)
        assert torch.equal(rounded, sde_rows("flow", sigma.bfloat16().float(), after.half().float(), **number))
        assert sde_rows("flow", sigma[:0], after[:0], 0.7).shape == (0, 5)


@each_backend
def test_a_replay_with_rows_of_its_own_has_ratio_one(backend):
    """A host that gets σ and σ' of each call, without any schedule."""
    x, v = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sigma = torch.tensor([0.9, 0.75, 0.5], device=DEVICE)
    with serve(backend):
        coef = sde_rows("flow", sigma, sigma - 0.125, 0.7)
        noise = PhiloxNoise(0, torch.arange(3, device=DEVICE), step=0)
        step = sde_step(x, v, coef, noise=noise)
        again = sde_rows("flow", sigma[1:], sigma[1:] - 0.125, 0.7)
        assert torch.equal(sde_logp(x[1:], v[1:], step.x_next[1:], again).logp, step.logp[1:])


def test_a_rule_of_ones_own_runs_in_torch(monkeypatch):
    monkeypatch.setitem(RULES, "half", lambda i: Row(1.0, i.sigma_next - i.sigma, i.eta / 2, 0.0, 0.0))
    sigma = torch.tensor([0.5, 0.25], device=DEVICE)
    with serve("triton"):
        rows = sde_rows("half", sigma, sigma / 2, 0.5)
    assert rows.tolist() == [[1.0, -0.25, 0.25, 0.0, 0.0], [1.0, -0.125, 0.25, 0.0, 0.0]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
@each_backend
def test_steps_that_go_up_are_nan_not_numbers(backend):
    sigma = torch.tensor([0.5, 0.5], device=DEVICE)
    after = torch.tensor([0.6, 0.4], device=DEVICE)
    with serve(backend):
        for rule in ("flow", "dance", "wan"):
            rows = sde_rows(rule, sigma, after, 0.7, 0.9)
            assert rows[0, 2:].isnan().all() and rows[1].isfinite().all()


def test_what_does_not_fit_is_refused():
    sigma = torch.tensor([0.9, 0.8], device=DEVICE)
    for given, match in (
        (("fast", sigma, sigma / 2), "unknown step rule 'fast': expected one of flow"),
        (("wan", sigma, sigma / 2), "'wan' needs sigma_max"),
        (("flow", sigma, sigma[[0, 0, 0]]), r"one size \[B\], or 0-d, got sigma \[2\], sigma_next \[3\]"),
        (("flow", sigma[None], sigma), r"sigma: expected fp32 or fp64 \[B\] or one number on .*, got .* \[1, 2\]"),
        (("flow", sigma, sigma.long()), "sigma_next: expected fp32 or fp64"),
        (("flow", sigma, sigma / 2, sigma.clone().requires_grad_()), "no gradient flows to eta; detach it"),
    ):
        with pytest.raises(ValueError, match=match):
            sde_rows(*given)
    with pytest.raises(TypeError, match=r"sigma: expected a tensor, got 0.9; sde.rules.sde_row takes numbers"):
        sde_rows("flow", 0.9, sigma)


def test_no_value_is_read_on_the_host():
    """Under a mode that counts: no _local_scalar_dense, which would wait for a GPU."""
    sigma = torch.tensor([0.9, 0.8], device=DEVICE)
    for rule in RULES:
        with Counted() as mode:
            sde_rows(rule, sigma, sigma / 2, sigma / 3, sigma[0], sigma[1])
        assert mode.names and not [n for n in mode.names if "local_scalar" in n or "is_nonzero" in n]
