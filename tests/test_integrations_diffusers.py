"""SDEFlowMatchScheduler as used from diffusers.

Why these cases: without noise it must match diffusers' own Euler scheduler bit for bit, in every configuration; it must
save, load and swap like any other scheduler, alone and in a pipeline; with noise: fp64 formulas, the log-prob of the
stored value, its bitwise replay and gradient, and noise from a generator, a tensor or an address.
"""

import pytest
import sde_formulas
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline
from integration_cases import batch, seeded

from prefgrpo.integrations.diffusers import SDEFlowMatchScheduler
from prefgrpo.ops import PhiloxNoise, philox_normal
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines

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
        sigma, after = scheduler.sigmas[k], scheduler.sigmas[k + 1]
        rest = (scheduler.sigmas[1],) if rule == "flow" else ()
        law = lambda u: getattr(sde_formulas, rule)(x, u, sigma, after, eta, *rest)  # noqa: B023, E731
        mean, s, _ = law(v)
        out = scheduler.step(v, t, x, generator=seeded())
        assert out.prev_sample.dtype == dtype and out.logp.dtype == torch.float32
        assert scheduler.step_index == k + 1
        noise = torch.randn(x.shape, generator=seeded())
        torch.testing.assert_close(
            out.prev_sample.double(), mean + s * noise, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
        score = sde_formulas.gaussian if rule != "cps" else lambda y, m, _: sde_formulas.square(y, m)
        torch.testing.assert_close(out.logp.double(), score(out.prev_sample, mean, s), rtol=1e-5, atol=1e-5)
        assert torch.equal(scheduler.logp(v, t, x, out.prev_sample), out.logp)
        a, b = v.float().clone().requires_grad_(), v.double().requires_grad_()
        scheduler.logp(a, t, x, out.prev_sample).sum().backward()
        mean, s, _ = law(b)
        score(out.prev_sample, mean, s).sum().backward()
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-5 * b.grad.abs().max().item())
        x = out.prev_sample


def test_replay_of_steps_in_any_order():
    scheduler, (x, v) = made(), batch(SHAPE)
    outs = [scheduler.step(v, t, x, generator=seeded()) for t in scheduler.timesteps]
    pick = [4, 1]
    stored = torch.stack([outs[k].prev_sample[i] for i, k in enumerate(pick)])
    logp = scheduler.logp(v, scheduler.timesteps[pick], x, stored)
    assert torch.equal(logp, torch.stack([outs[k].logp[i] for i, k in enumerate(pick)]))
    with pytest.raises(ValueError, match="timestep: expected values"):
        scheduler.logp(v, scheduler.timesteps[:2] + 0.5, x, stored)


def test_noise_by_address_and_by_tensor():
    """An address is (seed, sample, step): the noise is that of the rest of the package, whatever the batch."""
    (x, v), ids = batch(SHAPE), torch.tensor([11, 5])
    results = []
    for rows in ([0, 1], [1]):
        scheduler = made()
        scheduler.step(v[rows], scheduler.timesteps[0], x[rows])
        out = scheduler.step(v[rows], scheduler.timesteps[1], x[rows], noise=PhiloxNoise(3, ids[rows]))
        results.append(out.prev_sample[-1])
    assert torch.equal(*results)
    scheduler = made()
    scheduler.set_begin_index(1)
    noise = philox_normal(3, ids, torch.tensor([1, 1]), 35).view_as(x)
    given = scheduler.step(v, scheduler.timesteps[1], x, noise=noise)
    torch.testing.assert_close(given.prev_sample[1], results[0], rtol=1e-5, atol=1e-6)
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


def test_errors_say_what_was_expected():
    x, v = batch(SHAPE)
    with pytest.raises(ValueError, match="unknown step rule 'sde'"):
        SDEFlowMatchScheduler(rule="sde")
    with pytest.raises(ValueError, match="eta"):
        made(rule="cps", eta=1.5)
    with pytest.raises(ValueError, match=r"sde_steps must lie in 0 … 5"):
        made(sde_steps=[6])
    with pytest.raises(ValueError, match="sigmas must fall"):
        made(invert_sigmas=True)
    fresh = SDEFlowMatchScheduler()
    for call in (lambda: fresh.step(v, 1000.0, x), lambda: fresh.logp(v, 1000.0, x, x)):
        with pytest.raises(RuntimeError, match="call set_timesteps before"):
            call()
    scheduler = made()
    with pytest.raises(ValueError, match="expected the shape of x"):
        scheduler.step(v[:1], scheduler.timesteps[0], x)


def test_prepared_in_inference_mode_and_trained_after():
    with torch.inference_mode():
        scheduler = made()
    (x, v), t = batch(SHAPE), scheduler.timesteps[2:3].clone()
    v.requires_grad_()
    scheduler.logp(v, t, x, x + 0.1).sum().backward()
    assert v.grad.abs().max() > 0
