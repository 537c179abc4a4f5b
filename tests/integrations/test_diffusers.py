"""SDEFlowMatchScheduler as used from diffusers.

Why these cases: without noise it must match diffusers' own Euler scheduler bit for bit, in every configuration; it must
save, load and swap like any other scheduler, alone and in a pipeline; with noise: fp64 formulas, the log-prob of the
stored value, its bitwise replay and gradient, and noise from a generator, a tensor or an address.
"""

import ops_cases
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline

from prefgrpo.integrations.diffusers import SDEFlowMatchScheduler
from prefgrpo.ops import PhiloxNoise, philox_normal
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines
from tests.integrations.cases import batch, seeded

T, SHAPE = 6, (2, 7, 5)
CONFIGS = [
    ({}, {}),
    ({"shift": 3.0}, {}),
    ({"use_dynamic_shifting": True}, {"mu": 0.9}),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.02}, {"mu": 0.9}),
    ({"shift": 3.0, "stochastic_sampling": True}, {}),
    ({"invert_sigmas": False, "num_train_timesteps": 500}, {}),
]


def made(*, steps=T, **config):
    scheduler = SDEFlowMatchScheduler(**{"shift": 3.0, **config})
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("config, call", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("still", [{"eta": 0.0}, {"rule": "ode"}, {"sde_steps": []}])
def test_without_noise_it_is_diffusers_scheduler(config, call, dtype, still):
    theirs, ours = FlowMatchEulerDiscreteScheduler(**config), SDEFlowMatchScheduler(**config, **still)
    x, v = batch(SHAPE, dtype=dtype)
    y = x
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(T, **call)
    assert torch.equal(theirs.timesteps, ours.timesteps) and torch.equal(theirs.sigmas, ours.sigmas)
    for t in theirs.timesteps:
        x = theirs.step(v * x, t, x, generator=seeded(), return_dict=False)[0]
        y, logp = ours.step(v * y, t, y, generator=seeded(), return_dict=False)
        assert torch.equal(x, y) and x.dtype == y.dtype and theirs.step_index == ours.step_index
        assert torch.equal(logp, torch.zeros(2))


@pytest.mark.parametrize("rule, eta", [("flow", 0.7), ("dance", 0.3), ("cps", 0.8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noisy_steps(rule, eta, dtype):
    """x' has the output's dtype, its log-prob is that of the rounded value, and replay is bitwise equal."""
    scheduler, (x, v) = made(rule=rule, eta=eta), batch(SHAPE, dtype=dtype)
    for k, t in enumerate(scheduler.timesteps[:-1]):
        rest = (scheduler.sigmas[1],) if rule == "flow" else ()
        step = (scheduler.sigmas[k], scheduler.sigmas[k + 1], eta, *rest)
        out = scheduler.step(v, t, x, generator=seeded())
        assert out.prev_sample.dtype == dtype and out.logp.dtype == torch.float32 and scheduler.step_index == k + 1
        exact = v.double().requires_grad_()
        mean, s, _ = getattr(ops_cases, rule)(x, exact, *step)
        x_next = (mean + s * torch.randn(x.shape, generator=seeded())).detach()
        rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.prev_sample.double(), x_next, rtol=rtol, atol=1e-5)
        square = rule == "cps"
        logp = ops_cases.square(out.prev_sample, mean) if square else ops_cases.gaussian(out.prev_sample, mean, s)
        torch.testing.assert_close(out.logp.double(), logp.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(scheduler.logp(v, t, x, out.prev_sample), out.logp)
        leaf = v.float().requires_grad_()
        ours = torch.autograd.grad(scheduler.logp(leaf, t, x, out.prev_sample).sum(), leaf)[0].double()
        truth = torch.autograd.grad(logp.sum(), exact)[0]
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-5 * truth.abs().max().item())
        x = out.prev_sample


def test_replay_of_steps_in_any_order():
    scheduler, (x, v) = made(), batch(SHAPE)
    outs = [scheduler.step(v, t, x, generator=seeded()) for t in scheduler.timesteps]
    stored = torch.stack([outs[4].prev_sample[0], outs[1].prev_sample[1]])
    logp = scheduler.logp(v, scheduler.timesteps[[4, 1]], x, stored)
    assert torch.equal(logp, torch.stack([outs[4].logp[0], outs[1].logp[1]]))


def test_noise_by_counters_and_by_tensor():
    """The noise of (seed, sample, step) is that of the rest of the package, whatever the batch."""
    (x, v), ids = batch(SHAPE), torch.tensor([11, 5])
    noise = philox_normal(3, ids, torch.tensor([1, 1]), 35).view_as(x)
    results = []
    for rows, given in (([0, 1], PhiloxNoise(3, ids)), ([1], PhiloxNoise(3, ids[1:])), ([0, 1], noise)):
        scheduler = made()
        scheduler.set_begin_index(1)
        out = scheduler.step(v[rows], scheduler.timesteps[1], x[rows], noise=given)
        results.append(out.prev_sample[-1])
    assert torch.equal(*results[:2])
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="generator or a noise, got both"):
        scheduler.step(v, scheduler.timesteps[2], x, noise=noise, generator=seeded())


def test_only_the_chosen_steps_are_stochastic():
    scheduler, (x, v) = made(sde_steps=[1, 3]), batch(SHAPE)
    generator, states = seeded(), []
    for t in scheduler.timesteps:
        before = generator.get_state()
        out = scheduler.step(v, t, x, generator=generator)
        states.append(not torch.equal(before, generator.get_state()))
        assert (out.logp != 0).all() == states[-1]
    assert states == [False, True, False, True, False, False]
    assert scheduler.schedule.sde_steps == (1, 3)
    assert torch.equal(scheduler.schedule.coef, make_schedule(scheduler.sigmas, "flow", 0.7, (1, 3)).coef)


def test_saved_loaded_and_swapped_as_any_scheduler(tmp_path):
    theirs = FlowMatchEulerDiscreteScheduler(shift=2.5, use_dynamic_shifting=True, max_image_seq_len=8192)
    ours = SDEFlowMatchScheduler.from_config(theirs.config, rule="dance", eta=0.3, sde_steps=[0, 2])
    assert {k: v for k, v in theirs.config.items() if not k.startswith("_")}.items() <= ours.config.items()
    ours.save_pretrained(tmp_path)
    loaded = SDEFlowMatchScheduler.from_pretrained(tmp_path)
    config = loaded.config
    assert (config.rule, config.eta, config.sde_steps, config.shift) == ("dance", 0.3, [0, 2], 2.5)
    loaded.set_timesteps(T, mu=0.9)
    assert loaded.schedule.sde_steps == (0, 2)
    back = FlowMatchEulerDiscreteScheduler.from_config(config)
    assert (back.config.shift, back.config.max_image_seq_len) == (2.5, 8192)
    assert SDEFlowMatchScheduler.from_config(back.config).config.eta == 0.3, "diffusers keeps unknown config entries"


def test_in_a_pipeline(tmp_path):
    """FLUX's image is unchanged with η = 0 and differs with noise; the pipeline saves and loads with the scheduler.

    FLUX does not pass its generator to the scheduler, so the noise comes from torch's global generator.
    """
    pipe = FluxPipeline.from_pretrained(str(pipelines.make("flux", tmp_path / "base")))
    pipe.set_progress_bar_config(disable=True)

    def image(p):
        torch.manual_seed(5)
        args = {"num_inference_steps": 3, "height": 32, "width": 32, "output_type": "latent"}
        return p("a red square", **args, generator=seeded()).images

    plain, config = image(pipe), pipe.scheduler.config
    pipe.scheduler = SDEFlowMatchScheduler.from_config(config, eta=0.0)
    assert torch.equal(image(pipe), plain)
    pipe.scheduler = SDEFlowMatchScheduler.from_config(config, eta=0.7, sde_steps=[0, 1])
    noisy = image(pipe)
    assert (noisy - plain).abs().max() > 0.1 and torch.equal(image(pipe), noisy)
    pipe.save_pretrained(tmp_path / "saved")
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "saved")
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.scheduler) is SDEFlowMatchScheduler and torch.equal(image(loaded), noisy)


x, v = batch(SHAPE)
WRONG = {
    "rule": (lambda: SDEFlowMatchScheduler(rule="sde"), ValueError, "unknown step rule 'sde'"),
    "eta": (lambda: made(rule="cps", eta=1.5), ValueError, "eta"),
    "steps": (lambda: made(sde_steps=[6]), ValueError, r"sde_steps must lie in 0 … 5"),
    "sigmas": (lambda: made(invert_sigmas=True), ValueError, "sigmas must fall"),
    "order": (lambda: SDEFlowMatchScheduler().step(v, 1000.0, x), RuntimeError, "call set_timesteps before"),
    "order of logp": (lambda: SDEFlowMatchScheduler().logp(v, 1000.0, x, x), RuntimeError, "call set_timesteps before"),
    "shape": (lambda: made().step(v[:1], made().timesteps[0], x), ValueError, r"v: expected .* as x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_refused(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_prepared_in_inference_mode_and_trained_after():
    with torch.inference_mode():
        scheduler = made()
    leaf = v.clone().requires_grad_()
    scheduler.logp(leaf, scheduler.timesteps[2:3].clone(), x, x + 0.1).sum().backward()
    assert leaf.grad.abs().max() > 0
