"""The policy's updates against the formulas in fp64, and its state saved to and restored from a checkpoint.

Why these cases: to continue bit for bit, a resumed run needs AdamW's moments, its step count, the warm-up and the EMA;
and a non-finite gradient must leave every weight unchanged.
"""

from dataclasses import replace

import pytest
import torch
from diffusers.optimization import get_scheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import get_wsd_schedule
from world import ALONE

from prefgrpo.config.schema import Config, TrainConfig
from prefgrpo.run.checkpoint import CheckpointError, Checkpoints, read
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.notes import change_notes
from prefgrpo.update.policy import Policy, learning_rate

TRAIN = TrainConfig(lr=0.1, beta2=0.95, weight_decay=0.2, max_grad_norm=0.7, warmup_steps=4, ema_decay=0.9)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 4), "b": (5,), "c.never": (2,), "d.sometimes": (3,)}
    return {n: torch.randn(s, generator=generator).to(dtype).requires_grad_() for n, s in shapes.items()}


def give_gradients(policy, step):
    """`d.sometimes` has gradients in two of three updates, like an expert that not every window reaches."""
    generator = torch.Generator().manual_seed(step)
    for name, p in policy.parameters.items():
        if name != "c.never" and (name != "d.sometimes" or step % 3):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.fixture(params=["cuda", "cpu"], ids=lambda where: f"fused on {where}")
def fused_on(request, monkeypatch):
    """Where AdamW uses its fused kernel: on GPUs only, as shipped, or here too."""
    monkeypatch.setattr("prefgrpo.update.policy.FUSED_ON", (request.param,))


@pytest.mark.usefixtures("fused_on")
def test_ten_updates_against_the_formulas_in_fp64():
    """Decoupled weight decay (Loshchilov & Hutter), global-norm clipping, linear warm-up, EMA after the step. A weight
    without gradient does not move, and its moments and bias correction wait for the next one."""
    policy = Policy(parameters(), TRAIN)
    w = {n: p.detach().double() for n, p in policy.parameters.items()}
    m, v, ema = ({n: torch.zeros_like(t) for n, t in w.items()} for _ in range(3))
    ema = {n: t.clone() for n, t in w.items()}
    made = dict.fromkeys(w, 0)
    for step in range(1, 11):
        give_gradients(policy, step)
        g = {n: p.grad.double() for n, p in policy.parameters.items() if p.grad is not None}
        norm = torch.sqrt(sum(t.square().sum() for t in g.values()))
        assert policy.update(ALONE, step - 1) == pytest.approx(float(norm), rel=1e-5)
        lr = TRAIN.lr * min(1.0, step / TRAIN.warmup_steps)
        for n in g:
            made[n] += 1
            grad = g[n] * min(1.0, TRAIN.max_grad_norm / float(norm))
            m[n] = 0.9 * m[n] + (1 - 0.9) * grad
            v[n] = TRAIN.beta2 * v[n] + (1 - TRAIN.beta2) * grad.square()
            w[n] = w[n] * (1 - lr * TRAIN.weight_decay)
            unbiased = m[n] / (1 - 0.9 ** made[n]), v[n] / (1 - TRAIN.beta2 ** made[n])
            w[n] = w[n] - lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        for n in w:
            ema[n] = TRAIN.ema_decay * ema[n] + (1 - TRAIN.ema_decay) * w[n]
    for n, p in policy.parameters.items():
        assert torch.allclose(p.double(), w[n], rtol=1e-4, atol=1e-6), n
        assert torch.allclose(policy.ema[n].double(), ema[n], rtol=1e-4, atol=1e-6), n
    assert policy.updates == 10 and all(p.grad is None for p in policy.params)
    assert [int(policy.optimizer.state[p]["step"]) for p in policy.params] == list(made.values()) == [10, 10, 0, 7]
    never = parameters()["c.never"]
    state = policy.optimizer.state[policy.parameters["c.never"]]
    assert torch.equal(policy.parameters["c.never"], never) and torch.equal(policy.ema["c.never"], never)
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def published(scheduler, warmup, count):
    """Rates of `count` updates, and of one more, by the schedulers of diffusers and, for wsd, of transformers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    if scheduler == "wsd":
        of_peers = get_wsd_schedule(optimizer, warmup, count - max(warmup, count // 2), count, decay_type="linear")
    else:
        name = "constant_with_warmup" if scheduler == "constant" else scheduler
        of_peers = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=count)
    rates = []
    for _ in range(count + 1):
        rates.append(of_peers.get_last_lr()[0])
        optimizer.step()
        of_peers.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 3, 6, 9, 12])
@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "wsd"])
def test_schedules_of_the_learning_rate_are_the_published_ones(scheduler, warmup):
    """6 steps of 2 updates. The warm-up is one update ahead of theirs, whose first update has the rate 0: it ends with
    the full rate, where the decay begins."""
    train = TrainConfig(lr=2.0, steps=6, updates_per_rollout=2, warmup_steps=warmup, lr_scheduler=scheduler)
    theirs = published(scheduler, warmup, 12)
    expected = [*theirs[1:warmup], *[2.0] * (warmup > 0), *theirs[warmup:12]]
    assert [learning_rate(train, position) for position in range(12)] == pytest.approx(expected)
    assert max(expected) == 2.0


def test_a_prolonged_run_says_what_its_schedule_does():
    def notes(done, **now):
        before = TrainConfig(lr=2.0, steps=10, updates_per_rollout=2, lr_scheduler="linear")
        return change_notes(Config(train=before), Config(train=replace(before, **now)), done)

    longer = "it now falls to 0 at the end of step 20"
    assert notes(10, steps=20) == [
        "changed since: train.steps 10 → 20", f"learning rate of step 11: 1 instead of 0; {longer} (linear)",
    ]  # fmt: skip
    assert notes(5, steps=20)[1:] == [f"learning rate of step 6: 1.5 instead of 1; {longer} (linear)"]
    assert notes(5, lr=4.0, steps=20, lr_scheduler="wsd")[-1].startswith(
        f"learning rate of step 6: 4 instead of 1; {longer}"
    )
    assert len(notes(5, steps=20, lr_scheduler="constant")) == 2 and len(notes(5, ema_every=2)) == 1
    assert notes(10) == []


def test_averages_move_when_they_are_due():
    """The EMA moves every third update; the old policy moves on `update_old`, with the decay given there."""
    policy = Policy(parameters(), replace(TRAIN, ema_every=3), old=True)
    start = [t.clone() for t in policy.ema.values()]
    for step in range(3):
        assert all(torch.equal(a, b) for a, b in zip(start, policy.ema.values(), strict=True))
        give_gradients(policy, step)
        policy.update(ALONE, step)
    average = [0.9 * a + 0.1 * p for a, p in zip(start, policy.params, strict=True)]
    assert all(torch.allclose(a, b) for a, b in zip(average, policy.ema.values(), strict=True))
    policy.update_old(0.25)
    slow = [0.25 * a + 0.75 * p for a, p in zip(start, policy.params, strict=True)]
    assert all(torch.allclose(a, b) for a, b in zip(slow, policy.old.values(), strict=True))
    policy.update_old(0.0)
    assert all(torch.equal(a, b) for a, b in zip(policy.params, policy.old.values(), strict=True))


@pytest.mark.usefixtures("fused_on")
@pytest.mark.parametrize("at", [0, 2, 7])
def test_stopped_and_loaded_it_goes_on_bit_by_bit(at, tmp_path):
    straight, first = Policy(parameters(), TRAIN), Policy(parameters(), TRAIN)
    for step in range(10):
        give_gradients(straight, step)
        straight.update(ALONE, step)
        if step < at:
            give_gradients(first, step)
            first.update(ALONE, step)
    checkpoints = Checkpoints(RunFolder(tmp_path), ALONE, 2)
    checkpoints.save(at, first.state_dict(), {"updates": first.updates})
    give_gradients(first, at)
    first.update(ALONE, at)  # the writing thread has copies from before
    checkpoints.finished(wait=True)
    (path,) = RunFolder(tmp_path).all_checkpoints()
    second = Policy({n: torch.zeros_like(p).requires_grad_() for n, p in parameters().items()}, TRAIN)
    second.updates = read(path, second.state_dict(), ALONE)["updates"]
    for step in range(at, 10):
        give_gradients(second, step)
        second.update(ALONE, step)
    assert straight.state_dict().keys() == second.state_dict().keys()
    for key, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    for other, name in ((Policy({"x": torch.zeros(2)}, TRAIN), "param.x"), (Policy(parameters(), TRAIN, True), "old")):
        with pytest.raises(CheckpointError, match=f"do not fit this configuration.*{name}"):
            read(path, other.state_dict(), ALONE)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    policy = Policy(parameters(), TRAIN)
    give_gradients(policy, 0)
    policy.update(ALONE, 0)
    before = {k: t.detach().clone() for k, t in policy.state_dict().items()}
    give_gradients(policy, 1)
    policy.params[1].grad[2] = bad
    assert policy.update(ALONE, 1) is None
    assert all(torch.equal(before[k], t) for k, t in policy.state_dict().items()) and policy.updates == 1
    assert all(p.grad is None for p in policy.params), "the bad gradient was kept"


def test_the_average_is_lent_and_given_back():
    policy = Policy(parameters(), TRAIN)
    give_gradients(policy, 0)
    policy.update(ALONE, 0)
    live = [p.detach().clone() for p in policy.params]
    with pytest.raises(KeyError), policy.use_ema():
        assert all(torch.equal(p, policy.ema[n]) for n, p in policy.parameters.items())
        assert not torch.equal(policy.params[0], live[0])
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(live, policy.params, strict=True))
    plain = Policy(parameters(), TrainConfig(ema_decay=0.0))
    with plain.use_ema():
        assert torch.equal(plain.params[0], parameters()["a.weight"])


def test_norms_of_offloaded_shards_are_stacked_on_one_device(monkeypatch):
    """With offload: [weights], shards and their gradients are in CPU memory, replicated parameters on the GPU;
    fake tensors stack 0-d tensors of several devices, CUDA does not."""
    stack, devices = torch.stack, []
    monkeypatch.setattr(torch, "stack", lambda ts: devices.append({t.device.type for t in ts}) or stack(ts))
    monkeypatch.setattr("prefgrpo.update.policy.is_sharded", lambda p: p.device.type == "cpu")
    with FakeTensorMode():
        where = {"shard": "cpu", "replicated": "cuda"}
        policy = Policy({n: torch.ones(3, device=d, requires_grad=True) for n, d in where.items()}, TRAIN)
        for p in policy.params:
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError):  # at the norm's value, which fake tensors do not have
            policy.update(ALONE, 0)
    assert devices == [{"cuda"}, {"cpu"}, {"cuda"}]
