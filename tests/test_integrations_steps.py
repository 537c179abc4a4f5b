"""The drop-in step functions against fp64 formulas written from the papers.

Why these cases: every rule and mode, latents of 2 to 5 dimensions and odd sizes, first and last step, one step index or
one per sample; gradients with respect to v through the log-prob and μ, and with respect to x; sampling and scoring are
bitwise equal; random numbers are drawn as in diffusers; no NaN without noise; a schedule that changes in place, or is
first used in inference mode.
"""

import pytest
import sde_formulas
import torch
from integration_cases import BF16, CASES, F32, FactoryScheduler, T, batch, euler, seeded, unipc

from prefgrpo.integrations import dance_grpo, flow_factory, flow_grpo, pref_grpo, steps
from prefgrpo.sde.rules import RULES, StepInfo

SHAPES = [(2, 4, 5, 3), (2, 7, 3), (2, 3, 2, 3, 5), (2, 1)]
CPU = torch.device("cpu")


def near(ours, truth, rtol=1e-5, atol=2e-6):
    torch.testing.assert_close(ours.double(), torch.as_tensor(truth).double().expand(ours.shape), rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_fp64(case, shape):
    x, v = (t.to(dtype) for t, dtype in zip(batch(shape), case.dtypes, strict=True))
    for at in (0, T - 1, torch.tensor(3)) if case.one_step else ([0], [2, T - 1], [8, 5]):
        truth, out = case.truth(x, v, at), case.call(case.ours, x, v, at)
        rough = case.rounded == BF16
        near(out["x'"], truth["x'"], rtol=2**-8 if rough else 1e-5, atol=1e-5)
        assert not rough or torch.equal(out["x'"], out["x'"].bfloat16().float()), "x' is rounded before scoring"
        coarse = case.one_step and v.dtype == BF16  # μ and x0 are fp32, but std has bf16 accuracy
        for name in out.keys() - {"x'", "logp"}:
            near(out[name], truth[name], atol=1e-5 if coarse else 2e-6)
            assert out[name].dtype == F32
        if "ODE" in case.name:
            assert not out["logp"].any()
            continue
        near(out["logp"], case.score(out["x'"], truth), rtol=1e-4, atol=2e-5)
        again = case.call(case.ours, x, v, at, out["x'"])
        assert torch.equal(again["logp"], out["logp"]), "sampling and scoring are not bitwise equal"
        if x.dtype == v.dtype == F32:
            check_gradients(case, x, v, at, out["x'"] + 0.1)


def check_gradients(case, x, v, at, stored):
    """Gradient of a weighted sum of logp and μ with respect to v."""
    g = torch.Generator().manual_seed(9)
    w_mean, w_logp = 1e-3 * torch.randn(v.shape, generator=g), torch.randn(v.shape[0], generator=g)
    a, b = v.clone().requires_grad_(), v.double().requires_grad_()
    out, truth = case.call(case.ours, x, a, at, stored), case.truth(x, b, at)
    ((out["logp"] * w_logp).sum() + (out["mean"] * w_mean).sum()).backward()
    scored = out["x'"].detach()  # deterministic steps ignore `stored`
    ((case.score(scored, truth) * w_logp).sum() + (truth["mean"] * w_mean).sum()).backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-4, atol=1e-5 * b.grad.abs().max().item())


def test_no_noise_means_no_nan_and_the_same_stream():
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    delta = (scheduler.sigmas[3] - scheduler.sigmas[2]).double()
    used = seeded()
    torch.randn(x.shape, generator=used)
    for sde_type in ("sde", "cps"):
        given = seeded()
        t = scheduler.timesteps[2:3]
        out = flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.0, generator=given, sde_type=sde_type)
        near(out[0], x.double() + delta * v)
        assert (out[1] == 0).all() and (out[3] == 0).all() and out[3].shape == (1, 1, 1)
        assert torch.equal(given.get_state(), used.get_state()), "noise is drawn even if unused, as in the peer"
    given = seeded()
    s, wan = (
        flow_grpo.wan_sde_step_with_logprob(unipc(), v, unipc().timesteps[:1], x, None, given, True)[3],
        unipc().sigmas,
    )
    near(s, sde_formulas.wan(x, v, *wan[:2], wan[1], wan[-1])[1])
    assert torch.equal(given.get_state(), used.get_state()), "the Wan form also draws unused noise"
    logp = dance_grpo.flux_step(v.requires_grad_(), x, 0.0, scheduler.sigmas, 2, x, True, True)[2]
    logp.sum().backward()
    assert (logp == 0).all() and (v.grad == 0).all()


def test_last_cps_step_keeps_the_peers_score():
    """σ' = 0: sampling is exact there, but a stored x' is still scored, by −mean (x' − μ)²."""
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    mean = x.double() - scheduler.sigmas[T - 1].double() * v
    t = scheduler.timesteps[[T - 1]]
    near(flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.8, x, sde_type="cps")[1], sde_formulas.square(x, mean))


def test_gradients_in_the_latents():
    """For training through the rollout: x has a gradient too, and the sampled x' propagates it."""
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    noise, weight = torch.randn(x.shape, generator=seeded()).double(), torch.randn(2, 1, 1).double()
    a, b = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    t = scheduler.timesteps[[2]]
    x_next, logp, mean, _ = flow_grpo.sde_step_with_logprob(scheduler, v, t, a, generator=seeded())
    (logp.sum() + (x_next * weight).sum() + mean.square().sum()).backward()
    mean, s, _ = sde_formulas.flow(b, v, *scheduler.sigmas[[2, 3]], 0.7, scheduler.sigmas[1])
    made = mean + s * noise
    score = sde_formulas.gaussian(made.detach(), mean, s)
    (score.sum() + (made * weight).sum() + mean.square().sum()).backward()
    near(x_next.detach(), made.detach())
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_timesteps_are_looked_up_as_diffusers_does():
    """Also with repeated timesteps, where the second one counts, and int64 timesteps (UniPC)."""
    for scheduler in (euler(), unipc()):
        wanted = [4, 0, 5, 2]
        t = scheduler.timesteps[wanted]
        for given in (t, list(t)):
            assert steps.index_of(scheduler.timesteps, given, CPU).tolist() == wanted
        assert steps.index_of(scheduler.timesteps, t[1], CPU).tolist() == [0]
        with pytest.raises(ValueError, match="values of the scheduler's timesteps"):
            steps.index_of(scheduler.timesteps, t[:1] + 1, CPU)
    scheduler = euler(steps=6)
    scheduler.timesteps = torch.tensor([900.0, 500.0, 500.0, 500.0, 100.0, 10.0])
    for t in scheduler.timesteps:
        assert steps.index_of(scheduler.timesteps, t, CPU).item() == scheduler.index_for_timestep(t)


def test_a_schedule_that_changes_in_place_is_noticed():
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    for shift in (1.0, 5.0):
        other = euler(shift)
        scheduler.sigmas.copy_(other.sigmas)
        scheduler.timesteps.copy_(other.timesteps)
        args = (v, other.timesteps[[3]], x)
        ours, fresh = (flow_grpo.sde_step_with_logprob(s, *args, generator=seeded()) for s in (scheduler, other))
        assert all(torch.equal(a, b) for a, b in zip(ours, fresh, strict=True))


class Far(torch.Tensor):
    """A schedule that reports a CUDA device and counts how often it is read back to the host."""

    reads = 0

    @property
    def device(self):
        return torch.device("cuda")

    def tolist(self):
        Far.reads += 1
        return super().tolist()


def test_a_schedule_on_the_device_is_read_once():
    far = torch.tensor([1.0, 0.5, 0.0]).as_subclass(Far)
    assert [steps.to_host(far) for _ in range(3)] == [(1.0, 0.5, 0.0)] * 3 and Far.reads == 1
    far.mul_(0.5)
    assert [steps.to_host(far) for _ in range(3)] == [(0.5, 0.25, 0.0)] * 3 and Far.reads == 2


def test_rollout_in_inference_mode_then_training():
    scheduler, (x, v) = euler(shift=1.7), batch((2, 7, 3))
    t = scheduler.timesteps[[2]]
    with torch.inference_mode():
        x_next, logp, _, _ = flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.61)
    v = v.clone().requires_grad_()
    again = flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.61, x_next.clone())[1]
    again.sum().backward()
    assert torch.equal(again.detach(), logp) and v.grad.abs().max() > 0


def test_errors_say_what_was_expected():
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    sigmas, t = scheduler.sigmas, scheduler.timesteps[:1]
    with pytest.raises(ValueError, match=r"sde_type: expected one of sde, cps, got 'ddim'"):
        flow_grpo.sde_step_with_logprob(scheduler, v, t, x, sde_type="ddim")
    with pytest.raises(ValueError, match="eta"):
        flow_grpo.sde_step_with_logprob(scheduler, v, t, x, -1.0)
    with pytest.raises(ValueError, match="got both"):
        flow_grpo.wan_sde_step_with_logprob(scheduler, v, t, x, x, seeded())
    with pytest.raises(ValueError, match="sigmas must fall"):
        dance_grpo.flux_step(v, x, 0.3, sigmas.flip(0), 0, None, True, True)
    for index in (T, -1):
        with pytest.raises(IndexError, match=rf"index: expected a step in 0 … {T - 1} of this schedule, got {index}"):
            dance_grpo.flux_step(v, x, 0.3, sigmas, index, None, True, True)
    with pytest.raises(ValueError, match="expected the shape of x"):
        pref_grpo.flow_grpo_step(v, x, 0.7, sigmas, 0, x[:1])


@pytest.mark.parametrize("dynamics", flow_factory.DYNAMICS)
@pytest.mark.parametrize("sigma, share", [(1.0, 0.9), (1.0 - 1e-6, 0.5), (0.5, 0.97), (0.02, 0.0)])
def test_rules_of_tensors_are_those_of_numbers(dynamics, sigma, share):
    """One batch with and without noise; the scalar rules, used as reference, are tested against the papers."""
    after, etas = torch.tensor(sigma * share).item(), torch.tensor([0.0, 0.3, 1.0])
    each = [torch.full((3,), float(t), dtype=torch.float64) for t in (sigma, after, 0.9375)]
    coef, _ = flow_factory.rows(dynamics, *each[:2], etas.double(), each[2])
    for row, eta in zip(coef, etas.tolist(), strict=True):
        want = list(RULES[flow_factory.DYNAMICS[dynamics]](StepInfo(sigma, after, eta, 0.9375, 0.0)))
        if dynamics == "CPS":
            want[3] = -1.0
        torch.testing.assert_close(row.double(), torch.tensor(want).double(), rtol=1e-6, atol=1e-9)


def test_flow_factory_arguments(caplog):
    scheduler, (x, v) = FactoryScheduler("Flow-SDE"), batch((2, 7, 3))
    t = scheduler.timesteps

    def run(*args, **kwargs):
        return flow_factory.step(scheduler, v, *args, generator=seeded(), **kwargs)

    base = run(t[2], x)
    for other in (run(2, x), run(float(t[2]), x), run(t[[2]], x), run(t[[2, 2]], x)):
        assert torch.equal(other.next_latents, base.next_latents)
    explicit = run(t[2], x, timestep_next=t[3], noise_level=torch.tensor([0.6, 0.6]))
    torch.testing.assert_close(explicit.next_latents, base.next_latents, rtol=1e-5, atol=1e-5)
    mixed = run(t[[2, 3]], x)
    assert torch.equal(mixed.next_latents[1], mixed.next_latents_mean[1]) and mixed.log_prob[1] == 0, "no noise at 3"
    some = run(t[2], x, compute_log_prob=False, return_kwargs=["next_latents", "log_prob", "nonsense"])
    assert some.log_prob is None and some.dt is None and "nonsense" in caplog.text
    scored = run(t[2], x, next_latents=base.next_latents, return_kwargs=["log_prob", "std_dev_t"])
    assert torch.equal(scored.log_prob, base.log_prob) and scored.next_latents_mean is None
    scored.std_dev_t.zero_()  # in-place changes by the caller must not affect the cached coefficients
    assert torch.equal(run(t[2], x).std_dev_t, base.std_dev_t)
    capped = run(t[0], x, sigma_max=0.5)
    near(capped.std_dev_t.max(), 0.6 * (1 / 0.5) ** 0.5)
    scheduler.is_eval = True
    assert torch.equal(run(t[2], x).next_latents, run(t[2], x).next_latents_mean)
    for bad, error in (("x", TypeError), (t.view(2, -1), ValueError), (t[:1] + 1, ValueError)):
        with pytest.raises(error, match="timestep"):
            run(bad, x)
    with pytest.raises(ValueError, match="dynamics_type: expected one of"):
        run(t[2], x, dynamics_type="SDE")


@pytest.mark.gpu
def test_no_call_waits_for_the_device():
    """No host synchronisation after the first call on a schedule (torch's sync debug mode raises)."""
    scheduler, factory = euler(), FactoryScheduler("Flow-SDE")
    for each in (scheduler, factory):
        each.set_timesteps(T, device="cuda")
    x, v = (t.cuda() for t in batch((2, 7, 3)))
    t, index = scheduler.timesteps[[1, 4]], torch.tensor(3, device="cuda")

    def calls():
        x_next = flow_grpo.sde_step_with_logprob(scheduler, v, t, x)[0]
        flow_grpo.sde_step_with_logprob(scheduler, v.clone().requires_grad_(), t, x, 0.7, x_next)[1].sum().backward()
        pref_grpo.flow_grpo_step(v, x, 0.7, scheduler.sigmas, index, None, None, True)
        dance_grpo.flux_step(v, x, 0.3, scheduler.sigmas, index, None, True, True)
        flow_factory.step(factory, v, t, x, noise_level=0.6)

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
