"""Rollout and replay on the tiny FLUX pipeline.

Why these cases: what is stored (only the window, the rounded value, shared tensors), what is scored (the stored
value), whose noise it is (global ids, groups that share it), batching of stored steps, dropped samples, KL, and that
the loop never reads a number back from the device (which would stall a GPU).
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo import models
from prefgrpo.rollout.embed import Embeddings, collate, select
from prefgrpo.rollout.replay import replay
from prefgrpo.rollout.rollout import rollout, stack
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines

H, W, T = 16, 32, 5
SIZE = {"height": H, "width": W}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = pipelines.make("flux", tmp_path_factory.mktemp("flux"))
    adapter = models.load("flux", str(folder), torch.float32, torch.device("cpu"))
    adapter.add_lora(4, 8.0)
    for name, p in adapter.trainable():
        if "lora_B" in name:
            p.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    return adapter


@pytest.fixture(scope="module")
def condition(adapter):
    return collate(Embeddings(adapter, 16)(["red", "red", "blue", "blue"]))


def schedule_of(adapter, window=(1, 2, 3), rule="flow"):
    return make_schedule(adapter.sigmas(T, H, W), rule, 0.7, window)


IDS = torch.tensor([4, 5, 6, 7])


def test_only_the_window_is_stored_and_neighbours_share_tensors(adapter, condition):
    done = rollout(adapter, schedule_of(adapter), condition, IDS, seed=0, **SIZE)
    assert [step.index.tolist() for step in done.steps] == [[k] * 4 for k in (1, 2, 3)]
    assert done.steps[0].x_next is done.steps[1].x and done.steps[1].x_next is done.steps[2].x
    assert not done.latents.requires_grad and not done.steps[0].logp.requires_grad
    ode = rollout(adapter, schedule_of(adapter, rule="ode"), condition, IDS, seed=0, **SIZE)
    assert ode.steps == () and torch.isfinite(ode.latents).all()
    last = rollout(adapter, schedule_of(adapter, window=(T - 1,)), condition, IDS, seed=0, **SIZE)
    assert torch.equal(last.steps[0].x_next, last.latents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["flow", "dance", "cps", "cps_normalised"])
def test_logp_is_that_of_the_stored_value(adapter, condition, dtype, rule):
    """fp64 truth from the stored, rounded latents; it must also be what replay gives, exactly."""
    schedule = schedule_of(adapter, rule=rule)
    done = rollout(adapter, schedule, condition, IDS, seed=0, latent_dtype=dtype, **SIZE)
    for step in done.steps:
        assert step.x.dtype == step.x_next.dtype == dtype
        k = int(step.index[0])
        with torch.no_grad():
            v = adapter.velocity(step.x, schedule.sigmas[k].expand(4), condition, **SIZE).double()
        a, b, _, w, c = schedule.coef[k].double()
        truth = w * (step.x_next.double() - a * step.x.double() - b * v).square().flatten(1).mean(1) + c
        assert torch.allclose(step.logp.double(), truth, rtol=1e-5)
        assert torch.equal(replay(adapter, schedule, condition, step, **SIZE).logp, step.logp)


def test_noise_belongs_to_the_global_id(adapter, condition):
    schedule = schedule_of(adapter)
    whole = rollout(adapter, schedule, condition, IDS, seed=3, **SIZE)
    rows = torch.tensor([2, 0])
    part = rollout(adapter, schedule, select(condition, rows), IDS[rows], seed=3, **SIZE)
    assert (part.latents - whole.latents[rows]).abs().max() <= 1e-5
    other = rollout(adapter, schedule, condition, IDS, seed=4, **SIZE)
    assert (other.latents - whole.latents).abs().max() > 0.1


def test_a_group_may_share_its_initial_noise(adapter, condition):
    schedule = schedule_of(adapter, window=(0, 1))
    shared = torch.tensor([4, 4, 6, 6])
    done = rollout(adapter, schedule, condition, IDS, seed=0, initial_sample=shared, **SIZE)
    x0, x1 = done.steps[0].x, done.steps[0].x_next
    assert torch.equal(x0[0], x0[1]) and torch.equal(x0[2], x0[3]) and not torch.equal(x0[0], x0[2])
    assert not torch.equal(x1[0], x1[1]), "the steps' own noise stays each sample's own"


def test_given_initial_latents(adapter, condition):
    schedule = schedule_of(adapter, window=(0,))
    x = torch.randn(4, *adapter.latent_shape(H, W))
    assert torch.equal(rollout(adapter, schedule, condition, IDS, seed=0, initial=x, **SIZE).steps[0].x, x)
    with pytest.raises(ValueError, match="initial latents: expected"):
        rollout(adapter, schedule, condition, IDS, seed=0, initial=x[:3], **SIZE)


def test_stacked_steps_and_dropped_samples(adapter, condition):
    schedule = schedule_of(adapter)
    done = rollout(adapter, schedule, condition, IDS, seed=0, **SIZE)
    stacked = replay(adapter, schedule, condition, done.steps, kl="gaussian", **SIZE)
    single = [replay(adapter, schedule, condition, step, kl="gaussian", **SIZE) for step in done.steps]
    assert stacked.logp.shape == (12,)
    assert torch.allclose(stacked.logp, torch.cat([s.logp for s in single]), atol=1e-5)
    assert torch.allclose(stacked.kl, torch.cat([s.kl for s in single]), rtol=1e-3)
    gradients = []
    for loss in (stacked.logp.sum(), sum(s.logp.sum() for s in single)):
        adapter.transformer.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for _, p in adapter.trainable()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))

    rows = torch.tensor([3, 0])
    kept = [step.select(rows) for step in done.steps]
    new = replay(adapter, schedule, select(condition, rows), kept, **SIZE)
    assert torch.allclose(new.logp, stack(kept).logp, atol=1e-5)
    assert torch.equal(kept[0].x, done.steps[0].x[rows])


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
def test_kl_is_of_its_form_and_its_gradient_skips_the_reference(adapter, condition, form):
    """Oracle: torch.distributions.kl_divergence of the two steps' Normals, mean over elements.

    Flow-GRPO's Normals have its `std_dev_t` = η·sqrt(σ / (1 − σ)), which knows no step length (train_sd3.py).
    """
    schedule = schedule_of(adapter)
    step = rollout(adapter, schedule, condition, IDS, seed=0, **SIZE).steps[1]
    new = replay(adapter, schedule, condition, step, kl=form, **SIZE)
    a, b, s, _, _ = schedule.coef[2].double()
    if form == "flow_grpo":
        level = float(schedule.sigmas[2])
        s = 0.7 * (level / (1 - level)) ** 0.5
    sigma = schedule.sigmas[2].expand(4)
    with torch.no_grad():
        v = adapter.velocity(step.x, sigma, condition, **SIZE).double()
        with adapter.reference():
            v_ref = adapter.velocity(step.x, sigma, condition, **SIZE).double()
    assert (v - v_ref).abs().max() > 1e-3
    means = [torch.distributions.Normal(a * step.x.double() + b * u, s) for u in (v, v_ref)]
    truth = torch.distributions.kl_divergence(*means).flatten(1).mean(1)
    assert torch.allclose(new.kl.double(), truth, rtol=1e-4)
    new.kl.sum().backward()
    assert all(p.requires_grad for name, p in adapter.trainable()) and len(adapter.trainable()) == 60


class NoReadback(TorchDispatchMode):
    """Fails on every op that would make the host wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(str(func).startswith(f"aten.{name}") for name in self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_back_in_the_loop(adapter, condition):
    schedule = schedule_of(adapter)
    with NoReadback():
        done = rollout(adapter, schedule, condition, IDS, seed=0, **SIZE)
        replay(adapter, schedule, condition, done.steps[0], kl="gaussian", **SIZE).logp.sum().backward()
    with pytest.raises(AssertionError, match="waits"), NoReadback():
        float(done.steps[0].logp[0])


def test_every_initial_latent_is_standard_normal(adapter, condition):
    ids = torch.arange(512)
    many = {key: value[:1].expand(512, *value.shape[1:]) for key, value in condition.items()}
    schedule = make_schedule(torch.tensor([1.0, 0.5]), "flow", 0.7, (0,))
    x = rollout(adapter, schedule, many, ids, seed=0, **SIZE).steps[0].x
    n = x.numel()
    assert abs(float(x.mean())) < 5 / math.sqrt(n) and abs(float(x.var()) - 1) < 5 * math.sqrt(2 / n)
