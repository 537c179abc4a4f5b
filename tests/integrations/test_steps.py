"""The drop-in step functions against fp64 formulas written from the papers.

Every rule and mode, in the latents' real shapes (SD3 [B, C, H, W], packed FLUX [B, L, C], Wan [B, C, T, H, W]) and odd
ones: sampling from the same generator as the peer, scoring a stored x', gradients through the log-prob and μ. Where
PREFGRPO_PEERS has the peer's checkout, its real function is called too: our error may be at most twice its plus 2 ulp
(`-s` prints the measured differences), and its own rollout runs with our step.
"""

import ops_cases
import peers
import pytest
import torch
from ops_cases import Counted

from prefgrpo.integrations import flow_factory, flow_grpo, pref_grpo, steps, verl_omni
from prefgrpo.ops import PhiloxNoise, sde_logp
from prefgrpo.sde.schedule import shifted_sigmas, truncated_times
from tests.integrations.cases import (
    BF16,
    CASES,
    F32,
    FACTORY_CALLS,
    FactoryScheduler,
    FactoryUniPC,
    T,
    batch,
    euler,
    seeded,
    unipc,
)

SHAPES = {"sd3": (3, 16, 32, 32), "flux": (3, 256, 64), "wan": (3, 16, 3, 20, 24), "odd": (3, 7, 1, 3, 1)}
CPU = torch.device("cpu")
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


def near(ours, truth, rtol=1e-5, atol=2e-6):
    torch.testing.assert_close(ours.double(), torch.as_tensor(truth).double().expand(ours.shape), rtol=rtol, atol=atol)


def compare(case, name, ours, truth, theirs, rtol=1e-5, atol=2e-6):
    """Ours near the fp64 truth and, if the peer's result is given, at most twice as far as it plus 2 ulp."""
    near(ours, truth, rtol, atol)
    if theirs is None:
        return
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype, (case.name, name, theirs, ours)
    truth = torch.as_tensor(truth).double().expand(ours.shape)
    scale = max(truth.abs().max().item(), 1e-30)
    off = [(a.double() - b).abs().max().item() for a, b in ((theirs, truth), (ours, truth), (ours, theirs.double()))]
    ROWS.append((case.name, name, *(error / scale for error in off)))
    assert off[1] <= 2 * off[0] + 2 * ULP * scale, (case.name, name, *off, scale)


def peer_of(case, monkeypatch):
    """The peer's function; None without its checkout, in the version that we compared with."""
    try:
        theirs = case.theirs(monkeypatch)
        if "flow_grpo" in case.name:
            peers.same_parameters(case.name.split()[0], theirs, case.ours)
    except pytest.skip.Exception:
        return None
    return theirs


def shapes(case):
    """The Wan form takes clips only."""
    return ["wan", "odd"] if "Wan" in case.name else SHAPES


@pytest.mark.parametrize("case, shape", [pytest.param(c, s, id=f"{c.name} {s}") for c in CASES for s in shapes(c)])
def test_values_and_gradients(monkeypatch, case, shape):
    peer = peer_of(case, monkeypatch)
    x, v = (t.to(dtype) for t, dtype in zip(batch(SHAPES[shape]), case.dtypes, strict=True))
    rough = case.rounded == BF16
    lists = ([0, 5, T - 1],) if case.rounded else ([0, 5, T - 1], [0, 0, 0], [5, 2, 8])
    for at in (0, 5, T - 1, torch.tensor(3)) if case.one_step else lists:
        truth = case.truth(x, v, at)
        out = case.call(case.ours, x, v, at)
        theirs = {} if peer is None else case.call(peer, x, v, at)
        for name in out.keys() - {"logp", "x'"}:  # std of a bf16 model has the accuracy of bf16
            compare(case, name, out[name], truth[name], theirs.get(name), atol=1e-5 if v.dtype == BF16 else 2e-6)
            assert out[name].dtype == F32
        if rough:
            near(out["x'"], truth["x'"], rtol=2**-8, atol=1e-5)
            assert torch.equal(out["x'"], out["x'"].bfloat16().float()), "x' is rounded before scoring"
            if theirs:  # both round to bf16: equal except for ties
                assert (theirs["x'"] != out["x'"]).double().mean() < 1e-3
        else:
            compare(case, "x'", out["x'"], truth["x'"], theirs.get("x'"))
        if "ODE" in case.name:
            assert not out["logp"].any()
            continue
        again = case.call(case.ours, x, v, at, out["x'"])
        assert torch.equal(again["logp"], out["logp"]), "sampling and scoring are not bitwise equal"
        stored = theirs.get("x'", out["x'"])
        logp = case.call(case.ours, x, v, at, stored)["logp"]
        scored = None if peer is None else case.call(peer, x, v, at, stored)["logp"]
        of = truth["x'"] if "determ" in case.name else stored
        compare(case, "logp", logp, case.score(of, truth), scored, rtol=1e-4, atol=2e-5)
        if case.dtypes[0] == F32:
            check_gradients(case, peer, x, v, at, stored)


def check_gradients(case, peer, x, v, at, stored):
    """Gradients of a weighted sum of logp and, if the peer returns it with a gradient, of μ."""
    g = seeded()
    w_mean, w_logp = 1e-6 * torch.randn(x.shape, generator=g), torch.randn(x.shape[0], generator=g)
    through_mean = any(name in case.name for name in ("flow_grpo sde", "cps", "pref_grpo", "verl_omni"))

    def gradient(f):
        leaf = (v.double() if f is None else v.clone()).requires_grad_()
        out = case.truth(x, leaf, at) if f is None else case.call(f, x, leaf, at, stored)
        logp = case.score(stored, out) if f is None else out["logp"]
        total = (logp * w_logp).sum()
        if through_mean:
            total = total + (out["mean"] * w_mean).sum()
        return torch.autograd.grad(total, leaf)[0]

    ours, truth = gradient(case.ours), gradient(None)
    largest = truth.abs().max().item()
    theirs = None if peer is None or "determ" in case.name else gradient(peer)
    if v.dtype == F32:
        compare(case, "d/dv", ours, truth, theirs, rtol=2e-4, atol=2e-5 * largest)
    else:  # sum of two half-precision gradients: one more rounding in each
        assert (ours.double() - truth).abs().max() <= 2.0**-7 * largest


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
    given, wan = seeded(), unipc()
    s = flow_grpo.wan_sde_step_with_logprob(wan, v, wan.timesteps[:1], x, None, given, True)[3]
    near(s, ops_cases.wan(x, v, *wan.sigmas[:2], wan.sigmas[1], wan.sigmas[-1])[1])
    assert torch.equal(given.get_state(), used.get_state()), "the Wan form also draws unused noise"
    logp = pref_grpo.dance_grpo_step(v.requires_grad_(), x, 0.0, scheduler.sigmas, 2, x, True, True)[2]
    logp.sum().backward()
    assert (logp == 0).all() and (v.grad == 0).all()


def test_last_cps_step_keeps_the_peers_score():
    """σ' = 0: sampling is exact there, but a stored x' is still scored, by −mean (x' − μ)²."""
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    mean = x.double() - scheduler.sigmas[T - 1].double() * v
    t = scheduler.timesteps[[T - 1]]
    near(flow_grpo.sde_step_with_logprob(scheduler, v, t, x, 0.8, x, sde_type="cps")[1], ops_cases.square(x, mean))


def test_timesteps_are_looked_up_as_diffusers_does():
    """Also with repeated timesteps, where the second one counts, and int64 timesteps (UniPC)."""
    for scheduler in (euler(), unipc()):
        wanted = [4, 0, 5, 2]
        t = scheduler.timesteps[wanted]
        assert steps.index_of(scheduler.timesteps, t, CPU).tolist() == wanted
        assert steps.index_of(scheduler.timesteps, float(t[1]), CPU).tolist() == [0]
    scheduler = euler(steps=6)
    scheduler.timesteps = torch.tensor([900.0, 500.0, 500.0, 500.0, 100.0, 10.0])
    for t in scheduler.timesteps:
        assert steps.index_of(scheduler.timesteps, t, CPU).item() == scheduler.index_for_timestep(t)


def test_a_schedule_that_changed_in_place_is_looked_up_again():
    x, v = batch((2, 7, 3))

    def step(scheduler):
        return flow_grpo.sde_step_with_logprob(scheduler, v, scheduler.timesteps[2:3], x, 0.7, x)

    scheduler = euler()
    first = step(scheduler)
    scheduler.sigmas *= 0.9
    scheduler.timesteps *= 0.9
    fresh = euler()
    fresh.sigmas = scheduler.sigmas.clone()
    fresh.timesteps = scheduler.timesteps.clone()
    changed = step(scheduler)
    assert not torch.equal(changed[1], first[1])
    for ours, want in zip(changed, step(fresh), strict=True):
        assert torch.equal(ours, want)


def test_errors_say_what_was_expected():
    scheduler, (x, v) = euler(), batch((2, 7, 3))
    with pytest.raises(ValueError, match=r"sde_type: expected one of sde, cps, got 'ddim'"):
        flow_grpo.sde_step_with_logprob(scheduler, v, scheduler.timesteps[:1], x, sde_type="ddim")
    with pytest.raises(RuntimeError, match="timestep: not one of the scheduler's"):
        flow_grpo.sde_step_with_logprob(scheduler, v, scheduler.timesteps[:1] + 1, x)
    with pytest.raises(IndexError):
        pref_grpo.dance_grpo_step(v, x, 0.3, scheduler.sigmas, T, None, True, True)
    with pytest.raises(ValueError, match="expected grpo=True and sde_solver=True"):
        pref_grpo.dance_grpo_step(v, x, 0.3, scheduler.sigmas, 0, None, True, False)
    with pytest.raises(RuntimeError, match="timestep: not one of the scheduler's"):
        flow_factory.step(FactoryScheduler("CPS"), v, scheduler.timesteps[2] + 1, x, noise_level=0.4)
    with pytest.raises(ValueError, match="gradients flow only to v"):
        pref_grpo.flow_grpo_step(v, x.clone().requires_grad_(), 0.7, scheduler.sigmas, 0, x)
    with pytest.raises(ValueError, match="dynamics_type: expected one of"):
        flow_factory.step(FactoryScheduler("SDE"), v, scheduler.timesteps[2], x)


def test_flow_factory_arguments(monkeypatch):
    """All ways to say which step, against each other and the peer; eval mode takes the mean."""
    scheduler, (x, v) = FactoryScheduler("Flow-SDE"), batch((3, 7, 3))
    functions = [flow_factory.step]
    if theirs := peer_of(CASES[-1], monkeypatch):
        functions.append(theirs)
    results = {}
    for name, call in FACTORY_CALLS.items():
        args, options = call(scheduler.timesteps, x)
        mine, *rest = (f(scheduler, v, *args, generator=seeded(), **options) for f in functions)
        results[name] = mine
        for other in rest:
            for field, value in vars(mine).items():
                want = getattr(other, field, None)
                assert (value is None) == (want is None)
                if value is not None:  # the peer's log-prob without noise is NaN
                    torch.testing.assert_close(value, torch.nan_to_num(want), rtol=1e-4, atol=1e-6)
    base = results["a timestep"].next_latents
    assert torch.equal(results["a number"].next_latents, base)
    assert torch.equal(results["a step number"].next_latents, base)
    mixed = results["timesteps, two without noise"]
    assert torch.equal(mixed.next_latents[1], mixed.next_latents_mean[1]) and mixed.log_prob[1] == 0
    scheduler.is_eval = True
    still = flow_factory.step(scheduler, v, scheduler.timesteps[2], x)
    assert torch.equal(still.next_latents, still.next_latents_mean)


def test_flow_factory_computes_what_is_asked_for(monkeypatch):
    """No step for the velocity alone, as NFT, AWM, CRD, DPO and DGPO ask; its noise is drawn all the same."""
    scheduler = FactoryScheduler("Flow-SDE")
    x, v = batch((3, 7, 3))
    t = torch.tensor([613.0, 250.5, 77.0])
    options = {"timestep_next": torch.zeros(3), "noise_level": 0.0, "return_kwargs": ["noise_pred"]}
    given = seeded()
    used = seeded()
    torch.randn(x.shape, generator=used)
    full = flow_factory.step(scheduler, v, t, x, timestep_next=torch.zeros(3), noise_level=0.6, generator=seeded())
    near(full.next_latents_mean, ops_cases.flow(x, v, t[:, None, None] / 1000, 0.0 * t[:, None, None], 0.6, 0.9)[0])
    asked = []
    monkeypatch.setattr(steps, "sde_step", lambda *args, **more: asked.append(more))
    monkeypatch.setattr(steps, "sde_logp", lambda *args, **more: asked.append(more) or sde_logp(*args, **more))
    out = flow_factory.step(scheduler, v, t, x, compute_log_prob=False, generator=given, **options)
    assert torch.equal(out.noise_pred, v) and out.next_latents is None and not asked
    assert torch.equal(given.get_state(), used.get_state())
    options |= {"return_kwargs": ["log_prob", "dt"], "noise_level": 0.6}
    out = flow_factory.step(scheduler, v, t, x, full.next_latents, **options)
    assert asked == [{"want_mean": False}] and out.next_latents_mean is None
    assert torch.equal(out.log_prob, full.log_prob)
    near(out.dt.flatten(), -t / 1000)


@pytest.mark.parametrize("name", ["sde_step_with_logprob", "wan_sde_step_with_logprob"])
def test_flow_grpo_without_a_mean(monkeypatch, name):
    """Where no KL reads it: nothing of the latents' size is computed beside the log-prob, whose bits are the same."""
    scheduler = unipc() if name.startswith("wan") else euler()
    x, v = batch((2, 3, 1, 4, 4))
    step = getattr(flow_grpo, name)
    t = scheduler.timesteps[[3, 3]]
    taken = step(scheduler, v, t, x, generator=seeded())
    asked = []
    monkeypatch.setattr(steps, "sde_logp", lambda *args, **more: asked.append(more) or sde_logp(*args, **more))
    scored = step(scheduler, v, t, x, prev_sample=taken[0], want_mean=False)
    assert scored[2] is None and asked == [{"want_mean": False}] and torch.equal(scored[1], taken[1])
    assert step(scheduler, v, t, x, generator=seeded(), want_mean=False)[2] is None


@pytest.mark.parametrize("sde_type", verl_omni.RULES)
def test_a_noise_level_as_a_tensor_is_the_numbers(sde_type):
    """verl-omni's, of one for all or one each; bitwise, with and without the normaliser."""
    scheduler = euler()
    x, v = batch((3, 7, 3))
    options = {"timestep": scheduler.timesteps[[1, 4, 6]], "sde_type": sde_type, "prev_sample": x + 0.1}
    for normalizer in (True, False):
        options |= {"include_logprob_normalizer": normalizer}
        numbers = [verl_omni.sample_previous_step(scheduler, x, v, noise_level=n, **options) for n in (0.3, 0.7, 0.9)]
        for shape in ((3,), (3, 1, 1)):
            level = torch.tensor([0.3, 0.7, 0.9], dtype=torch.float64).view(shape)
            each = verl_omni.sample_previous_step(scheduler, x, v, noise_level=level, **options)
            assert torch.equal(each[1], torch.stack([number[1][k] for k, number in enumerate(numbers)]))
        one = verl_omni.sample_previous_step(
            scheduler, x, v, noise_level=torch.tensor(0.7, dtype=torch.float64), **options
        )
        assert torch.equal(one[1], numbers[1][1]) and torch.equal(one[2], numbers[1][2])


def test_a_counter_is_the_schedules_step():
    """A PhiloxNoise without a step gets the same ε with σ from timestep_next, from `sigma_max` and from the table."""
    scheduler = FactoryScheduler("CPS")
    x, v = batch((3, 7, 3))
    t = scheduler.timesteps
    noise = PhiloxNoise(1, torch.arange(3))
    ways = ({}, {"timestep_next": t[5]}, {"sigma_max": 0.9}, {"noise_level": torch.tensor(0.6)})
    outs = [flow_factory.step(scheduler, v, t[4], x, generator=noise, **{"noise_level": 0.6} | way) for way in ways]
    for out in outs[1:]:
        near(out.next_latents, outs[0].next_latents)


def test_flow_factorys_wan_scheduler():
    """σ is timestep / 1000 of integers; in eval mode the step is UniPC's own, whose history it keeps."""
    x, v = batch((2, 3, 1, 4, 4))
    scheduler = FactoryUniPC()
    plain = FactoryUniPC()
    t = scheduler.timesteps
    assert t.dtype == torch.int64
    options = {"timestep_next": t[[4, 3]], "noise_level": 0.6, "return_dict": False}
    x_next, logp, mean, std, dt = flow_factory.unipc_step(scheduler, v, t[[3, 2]], x, generator=seeded(), **options)
    sigma, after = (t[at].double().view(-1, 1, 1, 1, 1) / 1000 for at in ([3, 2], [4, 3]))
    want, s, want_std = ops_cases.flow(x, v, sigma, after, 0.6, scheduler.sigmas[1])
    near(mean, want)
    near(logp, ops_cases.gaussian(x_next, want, s))
    near(std, want_std)
    near(dt, after - sigma)
    scheduler.is_eval = True
    for k in range(3):
        out = flow_factory.unipc_step(scheduler, v, t[k], x, timestep_next=t[k + 1], return_kwargs=["next_latents"])
        assert torch.equal(out.next_latents, plain.step(v, t[k], x, return_dict=False)[0])
    plain.set_timesteps(T)
    scheduler.set_timesteps(T)
    for k in range(3):  # a step number, as in `step`
        out = flow_factory.unipc_step(scheduler, v, k, x)
        assert torch.equal(out.next_latents, plain.step(v, t[k], x, return_dict=False)[0])


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
        pref_grpo.dance_grpo_step(v, x, 0.3, scheduler.sigmas, index, None, True, True)
        flow_factory.step(factory, v, t, x, noise_level=0.6)

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


drawing = pytest.mark.parametrize(
    "case", [c for c in CASES if "ODE" not in c.name and "determ" not in c.name], ids=lambda case: case.name
)


@drawing
def test_a_call_is_at_most_fifteen_operations(case):
    """After the first one on a schedule."""
    x, v = batch((3, 7, 5), dtype=BF16)
    first, second = (2, 3) if case.one_step else (slice(2, 3), slice(3, 4))
    y = case.call(case.ours, x, v, first)["x'"]
    for stored, leaf in ((None, v), (y, v.clone().requires_grad_())):
        with Counted() as counted:
            case.call(case.ours, x, leaf, second, stored)
        assert len(counted.names) <= 15, counted.names


@drawing
def test_the_first_ratio_is_one_with_stored_bf16_latents(case):
    """Sampled in one batch in inference mode, replayed in another packing, with gradient."""
    noise = PhiloxNoise(1, torch.arange(4))
    at = 3 if case.one_step else [3]
    x = torch.randn(4, 33, 7, generator=seeded()).bfloat16()
    with torch.inference_mode():
        out = case.call(case.ours, x, torch.tanh(x), at, generator=noise, out_dtype=BF16)
    y = out["x'"].clone()
    logp = out["logp"].clone()
    assert y.dtype == BF16
    for part in (slice(0, 4), slice(1, 3), slice(3, 4)):
        leaf = torch.tanh(x[part]).requires_grad_()
        new = case.call(case.ours, x[part], leaf, at, y[part])["logp"]
        assert torch.equal(new.detach(), logp[part])
        new.sum().backward()
    out = case.call(case.ours, x.float(), torch.tanh(x), at, generator=noise)
    assert out["x'"].dtype == F32, "the host's own dtype by default"


# ---- the peers' own loops with our step
def test_flow_grpos_pipeline_with_our_step(monkeypatch, tmp_path):
    """Flow-GRPO's SD3 pipeline on a tiny model gives the same latents and log-probs."""
    from diffusers import StableDiffusion3Pipeline

    from prefgrpo.tiny import pipelines

    name = "flow_grpo.diffusers_patch.sd3_pipeline_with_logprob"
    theirs = peers.module("flow_grpo", name, monkeypatch)
    peers.same_parameters("flow_grpo", theirs.sde_step_with_logprob, flow_grpo.sde_step_with_logprob)
    pipe = StableDiffusion3Pipeline.from_pretrained(str(pipelines.make("sd3", tmp_path)))
    pipe.set_progress_bar_config(disable=True)
    args = {"prompt": "a red square", "num_inference_steps": 4, "height": 32, "width": 32, "output_type": "latent"}

    def run():
        torch.manual_seed(0)
        with torch.no_grad():
            return theirs.pipeline_with_logprob(pipe, **args, noise_level=0.7, generator=seeded())

    before = run()
    monkeypatch.setattr(theirs, "sde_step_with_logprob", flow_grpo.sde_step_with_logprob)
    after = run()
    for k in (1, 2):
        assert len(before[k]) > 0
        for a, b in zip(before[k], after[k], strict=True):
            near(b, a, rtol=1e-4, atol=1e-4)


def test_wan_samples_and_scores_with_one_function(monkeypatch, tmp_path):
    """docs/ops.md deletes the pipeline's own function, which the training script imports from there, for ours."""
    from diffusers import WanPipeline

    from prefgrpo.tiny import pipelines

    theirs = peers.module("flow_grpo", "flow_grpo.diffusers_patch.wan_pipeline_with_logprob", monkeypatch)
    script = (peers.folder("flow_grpo") / "scripts/train_wan2_1.py").read_text()
    assert "wan_pipeline_with_logprob import wan_pipeline_with_logprob, sde_step_with_logprob" in script
    pipe = WanPipeline.from_pretrained(str(pipelines.make("wan", tmp_path)))
    pipe.scheduler = unipc()
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 1.0}
    calls = []

    def run(step):
        def recorded(*args, **options):
            calls.append(args)
            return step(*args, **options)

        monkeypatch.setattr(theirs, "sde_step_with_logprob", recorded)
        torch.manual_seed(0)
        with torch.no_grad():
            return theirs.wan_pipeline_with_logprob(
                pipe, prompt="a red square", output_type="latent", return_dict=False, **size
            )

    before = run(theirs.sde_step_with_logprob)
    calls.clear()
    _, latents, logps, _ = run(flow_grpo.wan_sde_step_with_logprob)
    for mine, want in zip(latents, before[1], strict=True):
        near(mine, want, rtol=1e-4, atol=1e-4)
    for args, x_next, logp in zip(calls, latents[1:], logps, strict=True):
        again = flow_grpo.wan_sde_step_with_logprob(*args, prev_sample=x_next, return_dt_and_std_dev_t=True)[1]
        assert torch.equal(again, logp), "the first ratio is not 1"


def test_dance_grpo_defines_its_step_in_every_script():
    """So an import above the definition changes nothing: docs/ops.md deletes the definition."""
    scripts = [p for p in (peers.folder("dance_grpo") / "fastvideo").glob("*.py") if "flux_step(" in p.read_text()]
    assert len(scripts) == 7 and all(p.name.startswith("train_grpo_") for p in scripts)
    assert all("\ndef flux_step(" in p.read_text() for p in scripts)


def test_dance_grpos_rollout_with_our_step(monkeypatch):
    theirs = peers.functions("dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", monkeypatch)
    for count in range(2, 101):
        for shift in (1, 3, 5, 7):
            want = theirs.sd3_time_shift(shift, torch.linspace(1, 0, count + 1))
            ours = shifted_sigmas(count, float(shift))
            assert torch.equal(ours, want), "published sigmas are theirs to the last bit"
            times = (truncated_times(ours) * 1000).round().long().tolist()
            assert times == [int(sigma * 1000) for sigma in want][:count]
    x, embeds, ids = torch.randn(1, 16, 64), torch.randn(1, 4, 8), torch.zeros(1, 3)

    class Model(torch.nn.Module):
        def forward(self, hidden_states, timestep, **_):
            return (torch.tanh(hidden_states.float()) * timestep.view(-1, 1, 1),)

    def run():
        torch.manual_seed(1)
        rest = (range(T), shifted_sigmas(T, 3.0), Model(), embeds, embeds, ids, ids, True)
        return theirs.run_sample_step(type("Args", (), {"eta": 0.3}), x, *rest)

    before = run()
    monkeypatch.setattr(theirs, "flux_step", pref_grpo.dance_grpo_step)
    for a, b in zip(before, run(), strict=True):
        near(b, a, rtol=1e-4, atol=1e-5)
