"""The peers' real code against ours; needs their checkouts in PREFGRPO_PEERS and is skipped otherwise.

Every function and mode of `integration_cases`, in the latents' real shapes (SD3 [B, C, H, W], packed FLUX [B, L, C],
Wan [B, C, T, H, W]): sampling from the same generator and scoring a stored x', values and gradients. The reference is
fp64 (sde_formulas); our error may be at most twice the peer's plus 2 ulp. Then the peer's own pipeline runs with and
without the patch. `-s` prints the measured differences.
"""

import contextlib

import peers
import pytest
import torch
from integration_cases import BF16, CASES, F32, T, batch, euler, seeded

from prefgrpo import integrations
from prefgrpo.integrations import dance_grpo, flow_factory, flow_grpo
from prefgrpo.sde.schedule import shifted_sigmas, truncated_times

SHAPES = {"sd3": (3, 16, 32, 32), "flux": (3, 256, 64), "wan": (3, 16, 3, 20, 24)}
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


def compare(what, name, theirs, ours, truth):
    """Assert that our error is at most twice the peer's plus 2 ulp; records the measured errors."""
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype, (what, name, theirs, ours)
    truth = torch.as_tensor(truth).double().expand(ours.shape)
    scale = max(truth.abs().max().item(), 1e-30)
    off = [(a.double() - b).abs().max().item() for a, b in ((theirs, truth), (ours, truth), (ours, theirs.double()))]
    ROWS.append((what, name, *(error / scale for error in off)))
    assert off[1] <= 2 * off[0] + 2 * ULP * scale, (what, name, *off, scale)


def shapes(case):
    """Latent shapes of a case: the Wan form takes clips only; clips otherwise only for `flux_step`."""
    return ["wan"] if "Wan" in case.name else ["flux", "sd3", "wan"] if "flux_step" in case.name else ["flux", "sd3"]


@pytest.mark.parametrize("case, shape", [pytest.param(c, s, id=f"{c.name} {s}") for c in CASES for s in shapes(c)])
def test_values_and_gradients(monkeypatch, case, shape):
    theirs = case.theirs(monkeypatch)
    if "factory" not in case.name:
        peers.same_parameters(case.name.split()[0], theirs, case.ours)
    x, v = (t.to(dtype) for t, dtype in zip(batch(SHAPES[shape]), case.dtypes, strict=True))
    for at in (
        (0, 5, T - 1, torch.tensor(3)) if case.one_step else [[0, 5, 9]] + [[0, 0, 0], [5, 2, 8]] * (not case.rounded)
    ):
        a, b = (case.call(f, x, v, at) for f in (theirs, case.ours))
        truth = case.truth(x, v, at)
        assert a.keys() == b.keys()
        for name in a.keys() - {"logp"}:
            if name == "x'" and case.rounded == BF16:  # both round to bf16: equal except for ties
                assert (a[name] != b[name]).double().mean() < 1e-3
            else:
                compare(case.name, name, a[name], b[name], truth[name])
        if "ODE" in case.name:
            continue
        stored = a["x'"]
        again = [case.call(f, x, v, at, stored)["logp"] for f in (theirs, case.ours)]
        compare(case.name, "logp", *again, case.score(truth["x'"] if "determ" in case.name else stored, truth))
        if case.dtypes[0] == F32 and "determ" not in case.name:
            check_gradients(case, theirs, x, v, at, stored)


def check_gradients(case, theirs, x, v, at, stored):
    """Gradients of a weighted sum of logp and, if it is returned with the log-prob and not nearly 0, of μ."""
    g = seeded()
    w_mean, w_logp = 1e-6 * torch.randn(x.shape, generator=g), torch.randn(x.shape[0], generator=g)
    through_mean = float("flow_grpo sde" in case.name or "cps" in case.name or "pref_grpo" in case.name)
    grads = []
    for f in (theirs, case.ours, None):
        leaf = (v.double() if f is None else v.clone()).requires_grad_()
        out = case.truth(x, leaf, at) if f is None else case.call(f, x, leaf, at, stored)
        logp = case.score(stored, out) if f is None else out["logp"]
        ((logp * w_logp).sum() + through_mean * (out["mean"] * w_mean).sum()).backward()
        grads.append(leaf.grad)
    if v.dtype == F32:
        compare(case.name, "d/dv", *grads)
    else:  # sum of two half-precision gradients: one more rounding in each
        assert (grads[1].double() - grads[2]).abs().max() <= 2.0**-7 * grads[2].abs().max()


def test_flow_grpo_one_timestep_for_a_batch_and_no_noise(monkeypatch):
    """The rollout passes one timestep for B latents; at noise level 0 both draw noise but take the ODE step."""
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


def test_published_sigmas_are_theirs_to_the_last_bit(monkeypatch):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    for steps in range(2, 101):
        for shift in (1, 3, 5, 7):
            want = theirs.sd3_time_shift(shift, torch.linspace(1, 0, steps + 1))
            ours = shifted_sigmas(steps, float(shift))
            assert torch.equal(ours, want)
            times = (truncated_times(ours) * 1000).round().long().tolist()
            assert times == [int(sigma * 1000) for sigma in want][:steps]


def their_scheduler(module, **kwargs):
    scheduler = module.FlowMatchEulerDiscreteSDEScheduler(shift=3.0, **kwargs)
    scheduler.set_timesteps(T)
    return scheduler


def test_flow_factory_arguments(monkeypatch):
    """Explicit next timesteps, integer steps, eval mode, steps outside the SDE set, requested output fields."""
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
    same(t[[2, 3, 9]], x)  # two are outside the SDE set: no noise, and a NaN log-prob in the peer
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
    """Flow-GRPO's SD3 pipeline on a tiny model gives the same latents and log-probs with our step."""
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


def test_dance_grpos_rollout_with_our_step(monkeypatch):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    x, embeds = torch.randn(1, 16, 64), torch.randn(1, 4, 8)

    class Model(torch.nn.Module):
        def forward(self, hidden_states, timestep, **_):
            return (torch.tanh(hidden_states.float()) * timestep.view(-1, 1, 1),)

    def run():
        torch.manual_seed(1)
        args = type("Args", (), {"eta": 0.3})
        ids = torch.zeros(1, 3)
        return theirs.run_sample_step(
            args, x, range(T), shifted_sigmas(T, 3.0), Model(), embeds, embeds, ids, ids, True
        )

    before = run()
    monkeypatch.setattr(theirs, "flux_step", dance_grpo.flux_step)
    after = run()
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
