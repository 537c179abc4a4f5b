"""The peers' real code beside ours, where PREFGRPO_PEERS points to their checkouts; skipped elsewhere.

Why these cases: every function and mode that is replaced, in the latents' real shapes (SD3 [B, C, H, W], packed FLUX
[B, L, C], Wan [B, C, T, H, W]), sampling from the same generator and scoring a stored x', values and gradients. The
truth is fp64 (sde_formulas); ours may be off by as much as the peer is, doubled, plus 2 ulp. Then the peer's own
pipeline runs with and without the patch. `-s` prints the measured differences.
"""

# ruff: noqa: B023 (every lambda is used up within its turn of the loop)

import contextlib
import math
import sys

import peers
import pytest
import sde_formulas
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from prefgrpo import integrations
from prefgrpo.integrations import dance_grpo, flow_factory, flow_grpo, pref_grpo
from prefgrpo.sde.schedule import shifted_sigmas, truncated_times

T = 10
SHAPES = {"sd3": (3, 16, 32, 32), "flux": (3, 256, 64), "wan": (2, 16, 3, 20, 24)}
ULP = 2.0**-23
ROWS = []


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    worst = {}
    for what, name, *errors in ROWS:
        worst[what, name] = [max(pair) for pair in zip(errors, worst.get((what, name), errors), strict=True)]
    for key, errors in worst.items():
        print(f"| {' | '.join(key)} | {' | '.join(f'{e:.1e}' for e in errors)} |")


def euler(steps=T, shift=3.0):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler


def batch(shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(2)]


def error(t, truth):
    return (t.double() - truth).abs().max().item()


def compare(what, name, theirs, ours, truth):
    """Ours is as near to the truth as theirs, within rounding; keeps the measured numbers."""
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype, (what, name, theirs, ours)
    truth = torch.as_tensor(truth).expand(ours.shape)
    scale = max(truth.abs().max().item(), 1e-30)
    off_theirs, off_ours, apart = error(theirs, truth), error(ours, truth), error(ours, theirs.double())
    ROWS.append((what, name, off_theirs / scale, off_ours / scale, apart / scale))
    assert off_ours <= 2 * off_theirs + 2 * ULP * scale, (what, name, off_theirs, off_ours, scale)


def gradients(function, v, w_mean, w_logp):
    """d/dv of a sum over logp and μ, as a policy loss with a KL term has them."""
    v = v.clone().requires_grad_()
    logp, mean = function(v)
    ((logp * w_logp).sum() + (mean * w_mean).sum()).backward()
    return v.grad


def true_gradient(law, score, x_next, v, w_mean, w_logp):
    v = v.double().clone().requires_grad_()
    mean, s, _ = law(v)
    ((score(x_next, mean, s) * w_logp).sum() + (mean * w_mean).sum()).backward()
    return v.grad


def columns(scheduler, steps, ndim):
    view = (-1, *([1] * (ndim - 1)))
    return scheduler.sigmas[steps].view(view), scheduler.sigmas[[k + 1 for k in steps]].view(view)


FLOW = [("sde", 0.7, False), ("sde", 0.7, True), ("cps", 0.8, False), ("sde", 1.2, True)]


@pytest.mark.parametrize("shape", ["sd3", "flux"])
@pytest.mark.parametrize("sde_type, eta, sqrt_dt", FLOW)
def test_flow_grpo(monkeypatch, shape, sde_type, eta, sqrt_dt):
    theirs = peers.module("flow_grpo", "flow_grpo.diffusers_patch.sd3_sde_with_logprob", monkeypatch)
    ours, theirs = flow_grpo.sde_step_with_logprob, theirs.sde_step_with_logprob
    peers.same_parameters("flow_grpo", theirs, ours)
    scheduler, (x, v) = euler(), batch(SHAPES[shape])
    names = ["x'", "logp", "mean", "std_dev_t", "sqrt_dt"][: 5 if sqrt_dt else 4]
    score = sde_formulas.gaussian if sde_type == "sde" else lambda y, m, s: sde_formulas.square(y, m)
    for steps in ([0, 0, 0], [0, 4, 9], [5, 2, 8]):
        sigma, after = columns(scheduler, steps, x.dim())
        rest = (scheduler.sigmas[1],) if sde_type == "sde" else ()
        law = lambda u: getattr(sde_formulas, "flow" if sde_type == "sde" else "cps")(x, u, sigma, after, eta, *rest)  # noqa: E731
        mean, s, std = law(v)
        kwargs = {"noise_level": eta, "sde_type": sde_type, "return_sqrt_dt": sqrt_dt}
        t = scheduler.timesteps[steps]
        both = [f(scheduler, v, t, x, generator=torch.Generator().manual_seed(1), **kwargs) for f in (theirs, ours)]
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        truths = [mean + s * noise, None, mean, std, torch.sqrt(sigma - after)]
        what = f"flow_grpo {sde_type} η={eta} {shape}"
        for k, name in enumerate(names):
            if name != "logp":
                compare(what, name, both[0][k], both[1][k], truths[k])
        stored = both[0][0]
        again = [f(scheduler, v, t, x, prev_sample=stored, **kwargs) for f in (theirs, ours)]
        compare(what, "logp", again[0][1], again[1][1], score(stored, mean, s))
        w_mean, w_logp = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), torch.tensor([1.0, -2, 0.5])
        g = [
            gradients(lambda u, f=f: f(scheduler, u, t, x, prev_sample=stored, **kwargs)[1:3], v, 1e-6 * w_mean, w_logp)
            for f in (theirs, ours)
        ]
        compare(what, "d/dv", *g, true_gradient(law, score, stored, v, 1e-6 * w_mean.double(), w_logp.double()))


def test_flow_grpo_one_timestep_for_a_batch_and_no_noise(monkeypatch):
    """The rollout passes one timestep for B latents; at noise level 0 both draw, and take, the ODE's step."""
    theirs = peers.module("flow_grpo", "flow_grpo.diffusers_patch.sd3_sde_with_logprob", monkeypatch)
    scheduler, (x, v) = euler(), batch(SHAPES["sd3"])
    results, states = [], []
    for f in (theirs.sde_step_with_logprob, flow_grpo.sde_step_with_logprob):
        torch.manual_seed(3)
        results.append(f(scheduler, v, scheduler.timesteps[4:5], x, noise_level=0.0))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    sigma, after = scheduler.sigmas[4], scheduler.sigmas[5]
    compare("flow_grpo η=0", "x'", results[0][0], results[1][0], x.double() + v.double() * (after - sigma).double())
    assert results[0][3].shape == results[1][3].shape == (1, 1, 1, 1)
    assert torch.isnan(results[0][1]).all() and (results[1][1] == 0).all()


@pytest.mark.parametrize("determistic", [False, True])
def test_flow_grpo_wan(monkeypatch, determistic):
    theirs = peers.module("flow_grpo", "flow_grpo.diffusers_patch.wan_pipeline_with_logprob", monkeypatch)
    both = theirs.sde_step_with_logprob, flow_grpo.wan_sde_step_with_logprob
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(T)
    x, v = batch(SHAPES["wan"])
    for steps in ([0, 0], [3, 9]):
        sigma, after = columns(scheduler, steps, x.dim())
        law = lambda u: sde_formulas.wan(x, u, sigma, after, scheduler.sigmas[1], scheduler.sigmas[-1])  # noqa: E731
        mean, s, std = law(v)
        t, seed = scheduler.timesteps[steps], torch.Generator
        args = {"determistic": determistic, "return_dt_and_std_dev_t": True}
        a, b = (f(scheduler, v, t, x, generator=seed().manual_seed(1), **args) for f in both)
        noise = torch.randn(x.shape, generator=seed().manual_seed(1))
        x_next = x.double() + (after - sigma).double() * v.double() if determistic else mean + s * noise
        what = f"flow_grpo Wan{' determistic' if determistic else ''}"
        for name, k, truth in (
            ("x'", 0, x_next),
            ("mean", 2, mean),
            ("std_dev_t", 3, std),
            ("sqrt_dt", 4, (sigma - after).double().sqrt()),
        ):
            compare(what, name, a[k], b[k], truth)
        if determistic:
            compare(what, "logp", a[1], b[1], sde_formulas.gaussian(x_next, mean, s))
            continue
        a, b = (f(scheduler, v, t, x, prev_sample=a[0]) for f in both)
        compare(what, "logp", a[1], b[1], sde_formulas.gaussian(a[0], mean, s))
        compare(what, "s", a[3], b[3], s)
        w_mean, w_logp, stored = torch.zeros_like(x), torch.tensor([1.0, -2.0]), a[0]
        g = [gradients(lambda u, f=f: f(scheduler, u, t, x, stored)[1:3], v, w_mean, w_logp) for f in both]
        compare(
            what, "d/dv", *g, true_gradient(law, sde_formulas.gaussian, stored, v, w_mean.double(), w_logp.double())
        )


def shifted(steps=T, shift=3.0):
    t = torch.linspace(1, 0, steps + 1)
    return shift * t / (1 + (shift - 1) * t)


def test_published_sigmas_are_theirs_to_the_last_bit(monkeypatch):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    for steps in range(2, 101):
        for shift in (1, 3, 5, 7):
            want = theirs.sd3_time_shift(shift, torch.linspace(1, 0, steps + 1))
            ours = shifted_sigmas(steps, float(shift))
            assert torch.equal(ours, want)
            times = (truncated_times(ours) * 1000).round().long().tolist()
            assert times == [int(sigma * 1000) for sigma in want][:steps]


@pytest.mark.parametrize("sde_solver", [True, False])
@pytest.mark.parametrize("shape", ["flux", "wan"])
def test_dance_grpo(monkeypatch, shape, sde_solver):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    both, sigmas, (x, v) = (theirs.flux_step, dance_grpo.flux_step), shifted(), batch(SHAPES[shape])
    eta, what = 0.3, f"dance_grpo flux_step{'' if sde_solver else ' without sde_solver'} {shape}"
    for k in (0, 5, T - 1, torch.tensor(3)):
        law = lambda u: sde_formulas.dance(x, u, sigmas[k], sigmas[k + 1], eta, sde_solver)  # noqa: E731
        mean, s, _ = law(v)
        results = []
        for f in both:
            torch.manual_seed(5)
            results.append(f(v, x, eta, sigmas, k, None, True, sde_solver))
        torch.manual_seed(5)
        truth = (mean + s * torch.randn_like(x), x.double() - sigmas[k].double() * v.double())
        for j, name in enumerate(("x'", "x0")):
            compare(what, name, results[0][j], results[1][j], truth[j])
        stored = results[0][0]
        a, b = (f(v, x, eta, sigmas, k, prev_sample=stored, grpo=True, sde_solver=sde_solver) for f in both)
        compare(what, "logp", a[2], b[2], sde_formulas.gaussian(stored, mean, s))
        a, b = (f(v, x, eta, sigmas, k, None, False, sde_solver) for f in both)
        compare(what, "mean", a[0], b[0], mean)
        zero, w = torch.zeros_like(x), torch.ones(x.shape[0])
        g = [
            gradients(lambda u, f=f: (f(u, x, eta, sigmas, k, stored, True, sde_solver)[2], zero), v, zero, w)
            for f in both
        ]
        compare(what, "d/dv", *g, true_gradient(law, sde_formulas.gaussian, stored, v, zero.double(), w.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["flow", "dance"])
def test_pref_grpo(monkeypatch, mode, dtype):
    """bf16 model outputs, as autocast gives them: the peer rounds each term to bf16, so it is the one further off."""
    steps = peers.file_module("pref_grpo", "fastvideo/grpo/steps.py", "fastvideo.grpo.steps", monkeypatch)
    name = f"{mode}_grpo_step"
    both, sigmas = (getattr(steps, name), getattr(pref_grpo, name)), shifted()
    x, v = batch(SHAPES["flux"])
    v = v.to(dtype)
    eta, extra = (0.7, ()) if mode == "flow" else (0.3, (True, True))
    what = f"pref_grpo {name} {str(dtype)[6:]} output"
    for k in (0, 5, T - 1, torch.tensor(3)):
        rest = (sigmas[1],) if mode == "flow" else ()
        law = lambda u: getattr(sde_formulas, mode)(x, u, sigmas[k], sigmas[k + 1], eta, *rest)  # noqa: E731
        mean, s, _ = law(v)
        results = []
        for f in both:
            torch.manual_seed(5)
            results.append(f(v, x, eta, sigmas, k, None, *extra, return_stats=True))
        torch.manual_seed(5)
        noise = torch.randn_like(v if mode == "flow" else x)
        sign = 1 if mode == "flow" else -1
        truth = {
            "x'": (0, mean + s * noise.double()),
            "x0": (1, x.double() - sigmas[k].double() * v.double()),
            "mean": (3, mean),
            "s": (4, s),
            "dt": (5, sign * (sigmas[k + 1].double() - sigmas[k].double())),
        }
        for label, (j, value) in truth.items():
            compare(what, label, results[0][j], results[1][j], value)
        stored = results[0][0]
        a, b = (f(v, x, eta, sigmas, k, stored, *extra) for f in both)
        compare(what, "logp", a[2], b[2], sde_formulas.gaussian(stored, mean, s))
        zero, w = torch.zeros_like(x), torch.ones(x.shape[0])
        pick = lambda out: (out[2], out[3])  # noqa: E731
        g = [
            gradients(
                lambda u, f=f: pick(f(u, x, eta, sigmas, k, stored, *extra, return_stats=True)), v, zero + 1e-6, w
            )
            for f in both
        ]
        true = true_gradient(law, sde_formulas.gaussian, stored, v, zero.double() + 1e-6, w.double())
        if dtype == torch.float32:
            compare(what, "d/dv", *g, true)
        else:  # two gradients of half precision add up: one rounding more each
            assert error(g[1], true) <= 2.0**-7 * true.abs().max()


def their_scheduler(module, **kwargs):
    scheduler = module.FlowMatchEulerDiscreteSDEScheduler(shift=3.0, **kwargs)
    scheduler.set_timesteps(T)
    return scheduler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamics", flow_factory.DYNAMICS)
def test_flow_factory(monkeypatch, dynamics, dtype):
    module = peers.module("flow_factory", "flow_factory.scheduler.flow_match_euler_discrete", monkeypatch)
    scheduler = their_scheduler(module, dynamics_type=dynamics, sde_steps=[0, 2, 5, 8, 9], noise_level=0.6)
    both = type(scheduler).step, flow_factory.step
    x, v = batch(SHAPES["flux"], dtype=dtype)
    steps = [0, 5, 9]
    sigma, after = columns(scheduler, steps, 3)
    law = {
        "Flow-SDE": lambda u: sde_formulas.flow(x, u, sigma, after, 0.6, scheduler.sigmas[1]),
        "Dance-SDE": lambda u: sde_formulas.dance(x, u, sigma, after, 0.6),
        "CPS": lambda u: sde_formulas.cps(x, u, sigma, after, 0.6),
        "ODE": lambda u: (x.double() + (after - sigma).double() * u.double(), 0 * sigma.double(), 0 * sigma.double()),
    }[dynamics]
    score = {"CPS": lambda y, m, s: sde_formulas.square(y, m), "ODE": lambda y, m, s: 0 * m.flatten(1).mean(1)}
    score = score.get(dynamics, sde_formulas.gaussian)
    mean, s, _ = law(v)
    t = scheduler.timesteps[steps]
    what = f"flow_factory {dynamics} {str(dtype)[6:]}"
    a, b = (f(scheduler, v, t, x, generator=torch.Generator().manual_seed(1)) for f in both)
    assert type(a) is type(b)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    if dtype == torch.float32:
        compare(what, "x'", a.next_latents, b.next_latents, mean + s * noise)
    else:  # rounded to bf16 by both: the same but for ties
        assert a.next_latents.dtype == b.next_latents.dtype == torch.float32
        assert (a.next_latents != b.next_latents).double().mean() < 1e-3
    std = 0 * sigma + 0.6 if dynamics == "Dance-SDE" else law(v)[2]
    for name, truth in (("next_latents_mean", mean), ("std_dev_t", std), ("dt", after.double() - sigma.double())):
        compare(what, name, getattr(a, name), getattr(b, name), truth)
    assert torch.equal(a.noise_pred, b.noise_pred)
    stored = a.next_latents.to(dtype)
    a, b = (f(scheduler, v, t, x, stored, noise_level=0.6, return_dict=False) for f in both)
    assert len(a) == len(b) == 6
    compare(what, "logp", a[3], b[3], score(stored, mean, s))
    zero, w = torch.zeros(x.shape), torch.ones(3)
    both_grads = [
        gradients(lambda u, f=f: f(scheduler, u, t, x, stored, return_dict=False)[3:0:-2], v, zero, w)
        for f in both
        if dynamics != "ODE" and dtype == torch.float32
    ]
    if both_grads:
        compare(what, "d/dv", *both_grads, true_gradient(law, score, stored, v, zero.double(), w.double()))


def test_flow_factory_arguments(monkeypatch):
    """Explicit next timesteps, integer steps, eval mode, steps outside the SDE set, fields asked for."""
    module = peers.module("flow_factory", "flow_factory.scheduler.flow_match_euler_discrete", monkeypatch)
    scheduler = their_scheduler(module, sde_steps=[0, 2], noise_level=0.6)
    both = type(scheduler).step, flow_factory.step
    x, v = batch(SHAPES["flux"])

    def same(*args, **kwargs):
        a, b = (f(scheduler, v, *args, generator=torch.Generator().manual_seed(1), **kwargs) for f in both)
        assert set(a.keys()) == set(b.keys())
        for name in a.keys():  # noqa: SIM118
            left, right = (torch.nan_to_num(o[name]) if o[name] is not None else torch.zeros(1) for o in (a, b))
            assert left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6), (name, left, right)

    t = scheduler.timesteps
    same(t[2], x)
    same(t[[2, 3, 9]], x)  # two of them outside: no noise, and a NaN log-prob in the peer
    same(float(t[2]), x)
    same(2, x)
    same(t[2], x, timestep_next=t[3], noise_level=0.4)
    same(t[:3], x, timestep_next=t[1:4], noise_level=torch.tensor([0.4, 0.0, 0.9]))
    same(t[0], x, dynamics_type="CPS", compute_log_prob=False, return_kwargs=["next_latents", "log_prob"])
    same(t[0], x, sigma_max=0.97)
    scheduler.eval()
    same(t[0], x)
    for bad in ("x", [1.0]):
        for f in both:
            with pytest.raises((TypeError, ValueError)):
                f(scheduler, v, bad, x)


@contextlib.contextmanager
def patched(codebase):
    places = integrations.patch(codebase)
    try:
        yield places
    finally:
        integrations.unpatch(codebase)


def test_patch_flow_grpo_and_run_its_pipeline(monkeypatch, tmp_path):
    """Its SD3 pipeline on a tiny model: the same latents and log-probs with our step inside."""
    from prefgrpo.tiny import pipelines

    name = "flow_grpo.diffusers_patch.sd3_pipeline_with_logprob"
    pipeline_module = peers.module("flow_grpo", name, monkeypatch)
    original = pipeline_module.sde_step_with_logprob
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(str(pipelines.make("sd3", tmp_path)))
    pipe.set_progress_bar_config(disable=True)
    args = {"prompt": "a red square", "num_inference_steps": 4, "height": 32, "width": 32, "output_type": "latent"}

    def run():
        with torch.no_grad():
            return pipeline_module.pipeline_with_logprob(
                pipe, **args, noise_level=0.7, generator=torch.Generator().manual_seed(0)
            )

    torch.manual_seed(0)
    theirs = run()
    with patched("flow_grpo") as places:
        assert f"{name}.sde_step_with_logprob" in places
        assert pipeline_module.sde_step_with_logprob is not original
        torch.manual_seed(0)
        ours = run()
    assert pipeline_module.sde_step_with_logprob is original
    gaps = [max((a - b).abs().max().item() for a, b in zip(theirs[k], ours[k], strict=True)) for k in (1, 2)]
    scale = max(a.abs().max().item() for a in theirs[1])
    ROWS.extend(
        (("flow_grpo's SD3 pipeline", "latents", gaps[0] / scale), ("flow_grpo's SD3 pipeline", "logp", gaps[1]))
    )
    assert 0 < len(theirs[1]) == len(ours[1]) and gaps[0] <= 1e-4 * scale and gaps[1] <= 1e-4


def test_patch_dance_grpo_and_run_its_rollout(monkeypatch):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    x, embeds = torch.randn(1, 16, 64), torch.randn(1, 4, 8)

    class Model(torch.nn.Module):
        def forward(self, hidden_states, timestep, **_):
            return (torch.tanh(hidden_states.float()) * timestep.view(-1, 1, 1),)

    def run():
        torch.manual_seed(1)
        args = type("Args", (), {"eta": 0.3})
        ids = torch.zeros(1, 3)
        return theirs.run_sample_step(args, x, range(T), shifted(), Model(), embeds, embeds, ids, ids, True)

    original, before = theirs.flux_step, run()
    with patched("dance_grpo") as places:
        assert places == ["fastvideo.train_grpo_flux.flux_step"]
        after = run()
    assert theirs.flux_step is original
    for a, b in zip(before, after, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_patch_flow_factory(monkeypatch):
    module = peers.module("flow_factory", "flow_factory.scheduler.flow_match_euler_discrete", monkeypatch)
    cls = module.FlowMatchEulerDiscreteSDEScheduler
    original, scheduler, (x, v) = cls.__dict__["step"], their_scheduler(module), batch(SHAPES["flux"])
    args = (v, scheduler.timesteps[3], x)
    before = scheduler.step(*args, generator=torch.Generator().manual_seed(1))
    with patched("flow_factory"):
        assert cls.__dict__["step"] is not original
        after = scheduler.step(*args, generator=torch.Generator().manual_seed(1))
    assert cls.__dict__["step"] is original and type(before) is type(after)
    assert torch.allclose(before.next_latents, after.next_latents, atol=1e-6)
    assert torch.allclose(before.log_prob, after.log_prob, rtol=1e-5)


def test_versions_of_flow_grpo_before_cps(monkeypatch):
    """The July 2025 function has no sde_type; ours takes its place as long as the order of arguments agrees."""
    peers.module("flow_grpo", "flow_grpo.diffusers_patch.sd3_sde_with_logprob", monkeypatch)
    name = "flow_grpo.diffusers_patch.sd3_sde_with_logprob"

    def sde_step_with_logprob(self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, generator=None):
        return math.nan

    monkeypatch.setattr(sys.modules[name], "sde_step_with_logprob", sde_step_with_logprob)
    with patched("flow_grpo") as places:
        assert f"{name}.sde_step_with_logprob" in places
