"""The drop-in step functions against fp64 formulas written from the papers, and against golden numbers.

Why these cases: every rule and mode, latents of 3 to 5 dimensions and odd sizes, first and last step, one timestep or
one per sample; gradients in v through the log-prob and through μ, and in x; the bits of sampling and scoring agree;
the random stream is diffusers'; nothing is NaN where there is no noise; a schedule that changes in place, or is first
seen in inference mode.
"""

import math

import pytest
import sde_formulas
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.integrations import dance_grpo, flow_factory, flow_grpo, pref_grpo, steps
from prefgrpo.sde.rules import RULES, StepInfo

T = 6
SHAPES = [(2, 4, 5, 3), (2, 7, 3), (2, 3, 2, 3, 5), (2, 1)]
FALLING, WAN = [1.0, 0.9, 0.8, 0.0], [0.99, 0.95, 0.9, 0.8, 0.0]
GOLDEN_X, GOLDEN_V, GOLDEN_Z = (torch.tensor([t]) for t in ([0.5, -1.2], [-0.3, 0.8], [0.25, -0.6]))


class Scheduler:
    """What the peers read of a scheduler."""

    def __init__(self, sigmas):
        self.sigmas = torch.tensor(sigmas)
        self.timesteps = self.sigmas[:-1] * 1000


def euler(shift=3.0):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(T)
    return scheduler


def unipc():
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(T)
    return scheduler


def batch(shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for _ in range(2)]


def seeded():
    return torch.Generator().manual_seed(7)


def column(t, index, ndim):
    return t[index].view(-1, *([1] * (ndim - 1)))


def near(ours, truth, rtol=1e-5, atol=2e-6):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), torch.as_tensor(truth).double().expand(ours.shape), rtol=rtol, atol=atol)


def check_gradients(ours, law, score, x_next, v):
    """ours(v) -> (logp, mean); through both, with weights per element."""
    g = torch.Generator().manual_seed(9)
    w_mean, w_logp = torch.randn(v.shape, generator=g) * 1e-3, torch.randn(v.shape[0], generator=g)
    a, b = v.clone().requires_grad_(), v.double().clone().requires_grad_()
    logp, mean = ours(a)
    ((logp * w_logp).sum() + (mean * w_mean).sum()).backward()
    mean, s, _ = law(b)
    ((score(x_next, mean, s) * w_logp).sum() + (mean * w_mean).sum()).backward()
    assert b.grad.abs().max() > 0
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-4, atol=1e-5 * b.grad.abs().max().item())


def square(x_next, mean, _):
    return sde_formulas.square(x_next, mean)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("indices", [[0], [2], [0, T - 1], [3, 1]])
@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_flow_grpo(shape, indices, sde_type):
    scheduler, (x, v) = euler(), batch(shape)
    sigma, after = (column(scheduler.sigmas, [i + k for i in indices], x.dim()) for k in (0, 1))
    eta = 0.7
    if sde_type == "sde":
        law, score = lambda u: sde_formulas.flow(x, u, sigma, after, eta, scheduler.sigmas[1]), sde_formulas.gaussian
    else:
        law, score = lambda u: sde_formulas.cps(x, u, sigma, after, eta), square
    mean, s, std = law(v)
    args = (scheduler, v, scheduler.timesteps[indices], x, eta)
    x_next, logp, mu, std_dev_t = flow_grpo.sde_step_with_logprob(*args, generator=seeded(), sde_type=sde_type)
    near(x_next, mean + s * randn_tensor(x.shape, seeded()))
    near(mu, mean)
    near(std_dev_t, std)
    assert std_dev_t.shape == sigma.shape
    near(logp, score(x_next, mean, s), rtol=2e-5)
    again = flow_grpo.sde_step_with_logprob(*args, x_next, None, sde_type, True)
    assert len(again) == 5 and torch.equal(again[0], x_next)
    assert torch.equal(again[1], logp) and torch.equal(again[2], mu), "sampling and scoring differ in their bits"
    near(again[4], torch.sqrt((sigma - after).double()))
    check_gradients(
        lambda u: flow_grpo.sde_step_with_logprob(scheduler, u, args[2], x, eta, x_next + 0.1, None, sde_type)[1:3],
        law, score, x_next + 0.1, v,
    )  # fmt: skip


@pytest.mark.parametrize("indices", [[0], [2, 5]])
@pytest.mark.parametrize("shape", SHAPES)
def test_flow_grpo_wan(shape, indices):
    scheduler, (x, v) = unipc(), batch(shape)
    sigma, after = (column(scheduler.sigmas, [i + k for i in indices], x.dim()) for k in (0, 1))
    law = lambda u: sde_formulas.wan(x, u, sigma, after, scheduler.sigmas[1], scheduler.sigmas[-1])  # noqa: E731
    mean, s, std = law(v)
    args = (scheduler, v, scheduler.timesteps[indices], x)
    x_next, logp, mu, scale = flow_grpo.wan_sde_step_with_logprob(*args, None, seeded())
    near(x_next, mean + s * randn_tensor(x.shape, seeded()))
    near(mu, mean)
    near(scale, s)
    near(logp, sde_formulas.gaussian(x_next, mean, s), rtol=2e-5)
    near(flow_grpo.wan_sde_step_with_logprob(*args, x_next, return_dt_and_std_dev_t=True)[3], std)
    used, drawn = seeded(), seeded()
    still = flow_grpo.wan_sde_step_with_logprob(*args, None, used, True)
    torch.randn(x.shape, generator=drawn)
    assert torch.equal(used.get_state(), drawn.get_state()), "noise is drawn and not used, as the peer does"
    ode = x.double() + (after - sigma).double() * v
    near(still[0], ode)
    near(still[1], sde_formulas.gaussian(still[0], mean, s), rtol=1e-4)
    check_gradients(
        lambda u: flow_grpo.wan_sde_step_with_logprob(scheduler, u, args[2], x, x_next)[1:3],
        law, sde_formulas.gaussian, x_next, v,
    )  # fmt: skip
    with pytest.raises(ValueError, match="both"):
        flow_grpo.wan_sde_step_with_logprob(*args, x_next, seeded())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("index", [0, 3, T - 1, torch.tensor(2)])
@pytest.mark.parametrize("score", [True, False])
def test_dance_steps(shape, index, score):
    sigmas, (x, v), eta = euler().sigmas, batch(shape), 0.3
    law = lambda u: sde_formulas.dance(x, u, sigmas[index], sigmas[index + 1], eta, score)  # noqa: E731
    mean, s, _ = law(v)
    torch.manual_seed(7)
    x_next, x0, logp = dance_grpo.flux_step(v, x, eta, sigmas, index, None, True, score)
    torch.manual_seed(7)
    near(x_next, mean + s * torch.randn_like(x))
    near(x0, x.double() - sigmas[index].double() * v)
    near(logp, sde_formulas.gaussian(x_next, mean, s), rtol=2e-5, atol=2e-5)
    stats = pref_grpo.dance_grpo_step(v, x, eta, sigmas, index, x_next, True, score, True)
    assert all(torch.equal(a, b) for a, b in zip((x_next, x0, logp), stats[:3], strict=True))
    near(stats[3], mean)
    assert stats[4].shape == stats[5].shape == () and stats[5] > 0
    near(stats[4], s)
    drift = dance_grpo.flux_step(v, x, eta, sigmas, index, x_next, False, score)
    assert len(drift) == 2 and torch.equal(drift[0], stats[3]) and torch.equal(drift[1], x0)
    assert torch.equal(pref_grpo.dance_grpo_step(v, x, eta, sigmas, index, x_next, False, score)[0], drift[0])
    check_gradients(
        lambda u: pref_grpo.dance_grpo_step(u, x, eta, sigmas, index, x_next, True, score, True)[2:4],
        law, sde_formulas.gaussian, x_next, v,
    )  # fmt: skip


@pytest.mark.parametrize("index", [0, 3, T - 1, torch.tensor(2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_pref_grpo_flow_step(shape, index):
    sigmas, (x, v) = euler().sigmas, batch(shape)
    law = lambda u: sde_formulas.flow(x, u, sigmas[index], sigmas[index + 1], 0.7, sigmas[1])  # noqa: E731
    mean, s, _ = law(v)
    x_next, x0, logp, mu, scale, dt = pref_grpo.flow_grpo_step(v, x, 0.7, sigmas, index, None, seeded(), True)
    near(x_next, mean + s * randn_tensor(x.shape, seeded()))
    near(x0, x.double() - sigmas[index].double() * v)
    near(logp, sde_formulas.gaussian(x_next, mean, s), rtol=2e-5)
    near(mu, mean)
    near(scale, s)
    near(dt, sigmas[index + 1].double() - sigmas[index].double())
    assert scale.shape == dt.shape == () and dt < 0
    again = pref_grpo.flow_grpo_step(v, x, 0.7, sigmas, index, x_next)
    assert len(again) == 3 and torch.equal(again[2], logp)
    check_gradients(
        lambda u: pref_grpo.flow_grpo_step(u, x, 0.7, sigmas, index, x_next, None, True)[2:4],
        law, sde_formulas.gaussian, x_next, v,
    )  # fmt: skip


def test_pref_grpo_draws_in_the_outputs_dtype():
    """The peer's stream: bf16 numbers for a bf16 output, added in fp32 here."""
    sigmas, (x, v) = euler().sigmas, batch((2, 7, 3))
    v = v.bfloat16()
    mean, s, _ = sde_formulas.flow(x, v, sigmas[2], sigmas[3], 0.7, sigmas[1])
    x_next = pref_grpo.flow_grpo_step(v, x, 0.7, sigmas, 2, None, seeded())[0]
    near(x_next, mean + s * randn_tensor(v.shape, seeded(), dtype=torch.bfloat16).double())


@pytest.mark.parametrize(
    "case, sigmas, eta, mean, s, x_next, logp",
    [
        ("flow", FALLING, 0.7, [0.41485, -1.0056], 0.6640783086, [0.58086958, -1.40404699], -0.6152083314),
        ("flow", [1.0, 0.9, 0.0], 0.7, [0.4075, -0.986], 0.7, [0.5825, -1.406], -0.6678885893),
        ("cps", FALLING, 0.8, [0.27019039, -0.66087923], 0.760845213, [0.46040169, -1.11738635], -0.1222895488),
        ("cps", [1.0, 0.1, 0.0], 0.8, [0.53, -1.28], 0.0, [0.53, -1.28], 0.0),
        ("dance", FALLING, 0.3, [0.52765, -1.2744], 0.0948683298, [0.55136708, -1.331321], 1.3307018176),
        ("wan", WAN, 0.0, [0.51091213, -1.234514], 0.2703747399, [0.57850581, -1.39673884], 0.2833828233),
    ],
)  # fmt: skip
def test_golden_numbers(monkeypatch, case, sigmas, eta, mean, s, x_next, logp):
    """Numbers computed once in fp64 from the published formulas, at σ 0.9 → 0.8, 1 → 0.9 or 0.1 → 0."""
    scheduler, k = Scheduler(sigmas), {3: 0 if case == "flow" else 1, 4: 1, 5: 2}[len(sigmas)]
    t = scheduler.timesteps[[k]]
    monkeypatch.setattr(flow_grpo, "randn", lambda *_: GOLDEN_Z)
    monkeypatch.setattr(torch, "randn_like", lambda *_, **__: GOLDEN_Z)
    if case == "wan":
        out = flow_grpo.wan_sde_step_with_logprob(scheduler, GOLDEN_V, t, GOLDEN_X)
    elif case == "dance":
        out = pref_grpo.dance_grpo_step(GOLDEN_V, GOLDEN_X, eta, scheduler.sigmas, k, None, True, True, True)
        out = out[0], out[2], out[3], out[4]
    else:
        sde_type = "sde" if case == "flow" else "cps"
        out = flow_grpo.sde_step_with_logprob(
            scheduler, GOLDEN_V, t, GOLDEN_X, eta, sde_type=sde_type, return_sqrt_dt=True
        )
        out = *out[:3], out[3] * (out[4] if case == "flow" else 1)
    for ours, golden in zip(out, (x_next, logp, mean, s), strict=True):
        near(ours.flatten(), torch.tensor(golden, dtype=torch.float64).flatten(), rtol=2e-6, atol=2e-7)


def test_no_noise_means_no_nan_and_the_same_stream():
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    delta = (scheduler.sigmas[3] - scheduler.sigmas[2]).double()
    for sde_type in ("sde", "cps"):
        generator = seeded()
        out = flow_grpo.sde_step_with_logprob(
            scheduler, v, scheduler.timesteps[2:3], x, 0.0, generator=generator, sde_type=sde_type
        )
        near(out[0], x.double() + delta * v)
        assert (out[1] == 0).all() and (out[3] == 0).all()
        used = seeded()
        torch.randn(x.shape, generator=used)
        assert torch.equal(generator.get_state(), used.get_state()), "noise is drawn, as the peer draws it"
    logp = dance_grpo.flux_step(v.requires_grad_(), x, 0.0, scheduler.sigmas, 2, x, True, True)[2]
    logp.sum().backward()
    assert (logp == 0).all() and (v.grad == 0).all()


def test_last_cps_step_keeps_the_peers_score():
    """σ' = 0: sampling is exact there, but a stored x' is still scored, by −mean (x' − μ)²."""
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    t = scheduler.timesteps[[T - 1]]
    mean = x.double() - scheduler.sigmas[T - 1].double() * v
    logp = flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.8, x, sde_type="cps")[1]
    near(logp, sde_formulas.square(x, mean))


def test_gradients_in_the_latents():
    """Training through the rollout: x carries a gradient too, and the sampled x' passes it on."""
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    law = lambda a: sde_formulas.flow(a, v, *scheduler.sigmas[[2, 3]], 0.7, scheduler.sigmas[1])  # noqa: E731
    noise, weight = torch.randn(x.shape, generator=seeded()).double(), torch.randn(2, 1, 1).double()
    a, b = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    x_next, logp, mean, _ = flow_grpo.sde_step_with_logprob(
        scheduler, v, scheduler.timesteps[[2]], a, generator=seeded()
    )
    (logp.sum() + (x_next * weight).sum() + mean.square().sum()).backward()
    mean, s, _ = law(b)
    made = mean + s * noise
    score = sde_formulas.gaussian(made.detach(), mean, s)
    (score.sum() + (made * weight).sum() + mean.square().sum()).backward()
    near(x_next.detach(), made.detach())
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_bf16_latents_stay_bf16_and_are_scored_as_stored():
    sigmas, (x, v) = euler().sigmas, (t.bfloat16() for t in batch((2, 64, 3)))
    x_next, x0, logp = dance_grpo.flux_step(v, x, 0.3, sigmas, 2, None, True, True)
    assert x_next.dtype == x0.dtype == torch.bfloat16 and logp.dtype == torch.float32
    mean, s, _ = sde_formulas.dance(x, v, sigmas[2], sigmas[3], 0.3)
    near(logp, sde_formulas.gaussian(x_next, mean, s), rtol=1e-5)


@pytest.mark.parametrize("generator", [None, "one", "list", "list of one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_diffusers_stream(generator, dtype):
    def make():
        torch.manual_seed(3)
        seeds = [torch.Generator().manual_seed(k) for k in range(3)]
        return {None: None, "one": seeds[0], "list": seeds, "list of one": seeds[:1]}[generator]

    shape, device = torch.Size((3, 5, 2)), torch.device("cpu")
    assert torch.equal(
        steps.randn(shape, make(), device, dtype), randn_tensor(shape, make(), device=device, dtype=dtype)
    )


def test_a_cpu_generator_draws_on_the_cpu_for_another_device():
    """The same numbers for any device; the meta device stands for it here."""
    used, drawn = seeded(), seeded()
    assert steps.randn(torch.Size((2, 3)), used, torch.device("meta"), torch.float32).device.type == "meta"
    torch.randn(2, 3, generator=drawn)
    assert torch.equal(used.get_state(), drawn.get_state())


def test_timesteps_are_looked_up_as_diffusers_does():
    """Also with equal timesteps, where the second counts, and int64 ones (UniPC)."""
    for scheduler in (euler(), unipc()):
        wanted = [4, 0, 5, 2]
        t = scheduler.timesteps[wanted]
        assert steps.index_of(scheduler.timesteps, t, torch.device("cpu")).tolist() == wanted
        assert steps.index_of(scheduler.timesteps, list(t), torch.device("cpu")).tolist() == wanted
        assert steps.index_of(scheduler.timesteps, t[1], torch.device("cpu")).tolist() == [0]
        with pytest.raises(ValueError, match="values of the scheduler's timesteps"):
            steps.index_of(scheduler.timesteps, t[:1] + 1, torch.device("cpu"))
    scheduler = euler()
    scheduler.timesteps = torch.tensor([900.0, 500.0, 500.0, 500.0, 100.0, 10.0])
    for t in scheduler.timesteps:
        assert steps.index_of(scheduler.timesteps, t, torch.device("cpu")).item() == scheduler.index_for_timestep(t)


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
    """A schedule that says it lives on a GPU; reading it back is counted."""

    reads = 0

    @property
    def device(self):
        return torch.device("cuda")

    def tolist(self):
        Far.reads += 1
        return super().tolist()


def test_a_schedule_on_the_device_is_read_once():
    far = torch.tensor([1.0, 0.5, 0.0]).as_subclass(Far)
    assert [steps.host(far) for _ in range(3)] == [(1.0, 0.5, 0.0)] * 3 and Far.reads == 1
    far.mul_(0.5)
    assert [steps.host(far) for _ in range(3)] == [(0.5, 0.25, 0.0)] * 3 and Far.reads == 2
    assert steps.host(torch.zeros(1).as_subclass(Far)) == (0.0,) and steps.host(far) == (0.5, 0.25, 0.0)
    assert Far.reads == 3


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
    with pytest.raises(ValueError, match=r"sde_type: expected one of sde, cps, got 'ddim'"):
        flow_grpo.sde_step_with_logprob(scheduler, v, scheduler.timesteps[:1], x, sde_type="ddim")
    with pytest.raises(ValueError, match="eta"):
        flow_grpo.sde_step_with_logprob(scheduler, v, scheduler.timesteps[:1], x, -1.0)
    with pytest.raises(ValueError, match="sigmas must fall"):
        dance_grpo.flux_step(v, x, 0.3, scheduler.sigmas.flip(0), 0, None, True, True)
    for index in (T, -1):
        with pytest.raises(IndexError, match=rf"index: expected a step in 0 … {T - 1} of this schedule, got {index}"):
            dance_grpo.flux_step(v, x, 0.3, scheduler.sigmas, index, None, True, True)
    with pytest.raises(ValueError, match="expected the shape of x"):
        pref_grpo.flow_grpo_step(v, x, 0.7, scheduler.sigmas, 0, x[:1])


# ---------------------------------------------------------------- Flow-Factory
class FactoryScheduler(FlowMatchEulerDiscreteScheduler):
    """What Flow-Factory's step reads of its scheduler, on top of diffusers' own."""

    is_eval = False
    noise_level = 0.6
    sde_steps = (0, 2, 5)

    def __init__(self, dynamics_type):
        super().__init__(shift=3.0)
        self.dynamics_type = dynamics_type
        self.set_timesteps(T)

    def get_noise_levels(self):
        levels = torch.zeros(T)
        levels[list(self.sde_steps)] = self.noise_level
        return levels

    def get_noise_level_for_sigma(self, sigma):
        return torch.tensor([self.get_noise_levels()[(self.sigmas == s).nonzero()[0, 0]] for s in sigma.reshape(-1)])


NAMES = {"Flow-SDE": "flow", "Dance-SDE": "dance", "CPS": "cps", "ODE": "ode"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(NAMES)),
    st.floats(0.015625, 1.0, width=32),
    st.floats(0.0, 0.96875, width=32),
    st.floats(0.0, 1.0, width=32),
)
def test_flow_factory_rows_are_the_rules(dynamics, sigma, fraction, eta):
    after, top = torch.tensor(sigma * fraction).item(), 0.9375
    coef, _ = flow_factory.rows(dynamics, *(torch.tensor([u]) for u in (sigma, after, eta, top)))
    row = RULES[NAMES[dynamics]](StepInfo(sigma, after, eta, top, 0.0))
    if dynamics == "CPS" and row[2] == 0.0:
        row = (*row[:3], -1.0, 0.0)
    if 0 < row[2] < 1e-15:  # η so small that 1/s² leaves fp32
        return
    torch.testing.assert_close(coef[0].double(), torch.tensor(row).double(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dynamics", sorted(NAMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flow_factory_step(dynamics, dtype):
    """Steps 0 and 5 are stochastic and step 3 is not, in one batch; x' is rounded to the latents' dtype and scored."""
    scheduler, indices = FactoryScheduler(dynamics), [0, 3, 5]
    x, v = (t.to(dtype) for t in batch((3, 7, 3)))
    sigma, after = (column(scheduler.sigmas, [i + k for i in indices], 3) for k in (0, 1))
    eta = torch.tensor([0.6, 0.0, 0.6]).view(3, 1, 1)
    ode = x.double() + (after - sigma).double() * v
    law = {
        "Flow-SDE": lambda: sde_formulas.flow(x, v, sigma, after, eta, scheduler.sigmas[1]),
        "Dance-SDE": lambda: sde_formulas.dance(x, v, sigma, after, eta),
        "CPS": lambda: sde_formulas.cps(x, v, sigma, after, eta),
        "ODE": lambda: (ode, 0 * sigma.double(), 0 * sigma.double()),
    }
    mean, s, std = law[dynamics]()
    out = flow_factory.step(scheduler, v, scheduler.timesteps[indices], x, generator=seeded())
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8 if dynamics != "ODE" else 1e-5}[dtype]
    near(out.next_latents, mean + s * randn_tensor(x.shape, seeded()), rtol=rounding)
    if dynamics != "ODE":
        assert torch.equal(out.next_latents, out.next_latents.to(dtype).float())
    near(out.next_latents_mean, mean)
    near(out.std_dev_t, eta if dynamics == "Dance-SDE" else std)
    near(out.dt, (after - sigma).double())
    assert torch.equal(out.noise_pred, v.float()) and out.std_dev_t.shape == out.dt.shape == (3, 1, 1)
    if dynamics in ("Flow-SDE", "Dance-SDE"):
        truth = sde_formulas.gaussian(out.next_latents[::2], mean[::2], s[::2])
        near(out.log_prob[::2], truth, rtol=2e-5)
        assert out.log_prob[1] == 0
    else:
        near(out.log_prob, sde_formulas.square(out.next_latents, mean) if dynamics == "CPS" else torch.zeros(3))
    t = scheduler.timesteps[indices]
    again = flow_factory.step(scheduler, v, t, x, out.next_latents.to(dtype), return_dict=False)
    if dynamics != "ODE" or dtype == torch.float32:
        assert torch.equal(again[3], out.log_prob) and torch.equal(again[0], out.next_latents)
    assert torch.equal(again[1], out.next_latents_mean) and len(again) == 6


def test_flow_factory_gradients():
    scheduler, (x, v) = FactoryScheduler("Flow-SDE"), batch((2, 7, 3))
    t, stored = scheduler.timesteps[[0, 2]], batch((2, 7, 3), seed=4)[0]
    sigma, after = (column(scheduler.sigmas, index, 3) for index in ([0, 2], [1, 3]))
    check_gradients(
        lambda u: flow_factory.step(scheduler, u, t, x, stored, return_dict=False)[3:0:-2],
        lambda u: sde_formulas.flow(x, u, sigma, after, 0.6, scheduler.sigmas[1]),
        sde_formulas.gaussian, stored, v,
    )  # fmt: skip


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
    assert torch.equal(run(t[1], x).next_latents, run(t[1], x).next_latents_mean), "step 1 is not stochastic"
    some = run(t[2], x, compute_log_prob=False, return_kwargs=["next_latents", "log_prob", "nonsense"])
    assert some.log_prob is None and some.dt is None and "nonsense" in caplog.text
    capped = run(t[0], x, sigma_max=0.5)
    assert math.isclose(capped.std_dev_t.max().item(), 0.6 * math.sqrt(1 / 0.5), rel_tol=1e-6)
    scheduler.is_eval = True
    assert torch.equal(run(t[2], x).next_latents, run(t[2], x).next_latents_mean)
    for bad, error in (("x", TypeError), (t.view(2, -1), ValueError), (t[:1] + 1, ValueError)):
        with pytest.raises(error, match="timestep"):
            run(bad, x)
    with pytest.raises(ValueError, match="dynamics_type: expected one of"):
        run(t[2], x, dynamics_type="SDE")


@pytest.mark.gpu
def test_no_call_waits_for_the_device():
    """After the first call on a schedule: torch raises on any synchronisation."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    factory = FactoryScheduler("Flow-SDE")
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
    scheduler.sigmas.mul_(0.5)
    half = flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.7, x, None, "sde", True)[4]
    near(half.cpu(), torch.sqrt((scheduler.sigmas[:-1] - scheduler.sigmas[1:])[[1, 4]].cpu().double()).view(2, 1, 1))
