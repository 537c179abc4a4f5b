"""Rollout and replay on the tiny FLUX pipeline.

Why these cases: what is stored (only the window, shared tensors), whose noise is shared within groups, KL, and that the
loop never reads a value back from the device (which would stall a GPU).
Log-probs: tests/models/test_families.py, tests/ops/test_sde_step.py.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from world import case_of, conditions, policy, stored

from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.update.trajectory import replay

FLUX = case_of("flux")
S = FLUX.sampling((16, 32), 5)


@pytest.fixture(scope="module")
def adapter():
    return policy(FLUX)


@pytest.fixture(scope="module")
def condition(adapter):
    return conditions(adapter, FLUX, ["red", "red", "blue", "blue"])


def schedule_of(adapter, window=(1, 2, 3), rule="flow"):
    return make_schedule(adapter.sigmas(S), rule, 0.7, window)


IDS = torch.tensor([4, 5, 6, 7])


def test_only_the_window_is_stored_and_neighbours_share_tensors(adapter, condition):
    done = rollout(adapter, schedule_of(adapter), condition, IDS, S, seed=0)
    assert [step.k for step in done.transitions] == [1, 2, 3]
    assert {t.dtype for t in stored(done)} == {torch.float32}
    assert done.transitions[0].x_next is done.transitions[1].x and done.transitions[1].x_next is done.transitions[2].x
    assert not done.latents.requires_grad and not done.transitions[0].logp.requires_grad
    ode = rollout(adapter, schedule_of(adapter, rule="ode"), condition, IDS, S, seed=0)
    assert ode.transitions == () and torch.isfinite(ode.latents).all()
    last = rollout(adapter, schedule_of(adapter, window=(S.steps - 1,)), condition, IDS, S, seed=0)
    assert torch.equal(last.transitions[0].x_next, last.latents)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_group_may_share_its_initial_noise(adapter, condition, first):
    """Before the first stochastic step, one sample is denoised for its group. Oracle: every sample on its own."""
    schedule, starts, seen = schedule_of(adapter, window=(first, 3)), [4, 4, 6, 4], []
    condition = condition.select(torch.tensor([0, 1, 2, 0]))
    alone = [
        rollout(adapter, schedule, condition.select(row), IDS[row], S, seed=0, initial_sample=[starts[row]])
        for row in torch.arange(4).split(1)
    ]
    count = adapter.transformer.register_forward_pre_hook(
        lambda module, args, given: seen.append(len(given["hidden_states"])), with_kwargs=True
    )
    done = rollout(adapter, schedule, condition, IDS, S, seed=0, initial_sample=starts)
    count.remove()
    assert seen == [2] * first + [4] * (S.steps - first)
    x0, x1 = done.transitions[0].x, done.transitions[0].x_next
    assert torch.equal(x0[0], x0[1]) and torch.equal(x0[0], x0[3]) and not torch.equal(x0[0], x0[2])
    assert not torch.equal(x1[0], x1[1]), "the noise of later steps must not be shared"
    for whole, *each in zip(stored(done), *(stored(one) for one in alone), strict=True):
        assert torch.allclose(whole, torch.cat(each), rtol=1e-4, atol=1e-4)
    for step in done.transitions:
        assert torch.equal(replay(adapter, schedule, condition, step, S).logp, step.logp)


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
def test_kl_is_of_its_form(adapter, condition, form):
    """Oracle: torch.distributions.kl_divergence of the two steps' Normals, averaged over elements.

    In Flow-GRPO (train_sd3.py) their std is `std_dev_t` = η·sqrt(σ / (1 − σ)), which leaves out the step length.
    """
    schedule = schedule_of(adapter)
    step = rollout(adapter, schedule, condition, IDS, S, seed=0).transitions[1]
    sigma = schedule.sigmas[2].expand(4)
    with torch.no_grad(), adapter.reference():
        v_ref = adapter.velocity(step.x, sigma, condition, S)
    new = replay(adapter, schedule, condition, replace(step, v_ref=v_ref), S, form)
    a, b, s, _, _ = schedule.coef[2].double()
    if form == "flow_grpo":
        level = float(schedule.sigmas[2])
        s = 0.7 * (level / (1 - level)) ** 0.5
    with torch.no_grad():
        v = adapter.velocity(step.x, sigma, condition, S).double()
    v_ref = v_ref.double()
    assert (v - v_ref).abs().max() > 1e-3
    means = [torch.distributions.Normal(a * step.x.double() + b * u, s) for u in (v, v_ref)]
    truth = torch.distributions.kl_divergence(*means).flatten(1).mean(1)
    assert torch.allclose(new.kl.double(), truth, rtol=1e-4)
    new.kl.sum().backward()
    assert all(p.requires_grad for name, p in adapter.trainable()) and len(adapter.trainable()) == 60


@pytest.mark.parametrize("family", ["sd3", "z_image", "qwen_image"])
def test_the_gradient_of_a_guidance_pair(family):
    """Oracle: plain torch with one denoiser call per prompt, and u detached if guidance_gradient is conditional."""
    case = case_of(family)
    adapter, sampling = policy(case), case.sampling()
    condition, rows, gradients = conditions(adapter, case), torch.tensor([0, 1]), []
    parameters, cfg = [p for _, p in adapter.trainable()], adapter.cfg

    def gradient(of):
        parts = torch.autograd.grad(of.sum(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (1, 2))
    negative, sigma = replace(condition.negative, sources=condition.sources), schedule.times[1].expand(2)
    for kind in ("both", "conditional"):
        adapter.guidance_gradient = kind
        step = rollout(adapter, schedule, condition, rows, sampling, seed=0).transitions[0]
        new = replay(adapter, schedule, condition, step, sampling)
        assert torch.equal(new.logp, step.logp), "the first update's ratio must be exactly 1"
        c, u = (
            adapter.predict(adapter.transformer, step.x, sigma, prompt, sampling)
            for prompt in (replace(condition, negative=None), negative)
        )
        u = u.detach() if kind == "conditional" else u
        v = (c if cfg.from_cond else u) + sampling.guidance * (c - u)
        v = v * (c.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True)) if cfg.rescale else v
        a, b, _, w, shift = schedule.coef[1]
        truth = gradient(w * (step.x_next - a * step.x - b * v).square().flatten(1).mean(1) + shift)
        gradients.append(gradient(new.logp))
        assert (gradients[-1] - truth).norm() < 1e-4 * truth.norm()
    assert torch.cosine_similarity(*gradients, dim=0) < 0.99, "the two modes must give different gradients"


class NoReadback(TorchDispatchMode):
    """Fails on any op that would make the host wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(str(func).startswith(f"aten.{name}") for name in self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_back_in_the_loop(adapter, condition):
    schedule = schedule_of(adapter)
    with NoReadback():
        done = rollout(adapter, schedule, condition, IDS, S, seed=0)
        replay(
            adapter, schedule, condition, replace(done.transitions[0], v_ref=done.transitions[0].x), S
        ).logp.sum().backward()
    with pytest.raises(AssertionError, match="waits"), NoReadback():
        float(done.transitions[0].logp[0])
