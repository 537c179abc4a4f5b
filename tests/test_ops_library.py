"""The custom ops under torch.compile: opcheck (schema, fake kernel, autograd registration) and whole graphs.

fullgraph=True fails on any graph break, so it proves that no value is read back and that the eager shortcuts stay
out of a graph; results must equal eager's bit for bit, since both run the same kernel. With each backend, since each
must do without autograd inside an op (Triton's interpreter is no part of a graph).
"""

import pytest
import torch
from ops_cases import DEVICE, ON_CPU, ON_GPU, make, serve

from prefgrpo.ops import (
    Guidance,
    NoiseAddress,
    affine_logp,
    affine_step_more,
    group_advantage,
    library,
    on_policy_grad,
    philox_normal,
    policy_loss,
    replay_policy_grad,
    winrate_advantage,
)
from prefgrpo.ops.backend import BACKENDS, implementation

kernels = pytest.mark.parametrize("backend", ON_GPU if DEVICE == "cuda" else [b for b in ON_CPU if b != "triton"])


def case():
    return make((5, 8), 3, torch.float32, torch.float32)


def arguments():
    c, ids = case(), torch.arange(3, device=DEVICE)
    v, u = c.v.clone().requires_grad_(), c.u.clone().requires_grad_()
    sigma = torch.rand(4, device=DEVICE)
    plain = (None, 0.0, False, False)
    column = torch.randn(3, device=DEVICE)
    leaf = column.clone().requires_grad_()
    leaves = [column.clone().requires_grad_() for _ in range(2)]
    wins = torch.rand(2, 4, 4, device=DEVICE)
    return {
        "philox_normal": (-5, ids, ids, 9, 3, torch.float32),
        "affine_step": (c.x, c.v, c.coef, c.index, *plain, c.eps, 0, None, None, 0, torch.float32, False, None, None),
        "affine_step more": (
            *(c.x, c.v, c.coef, c.index, c.u, 2.0, False, True, None, 7, ids, ids, 2),
            *(torch.bfloat16, True, sigma, torch.float16),
        ),
        "affine_logp": (c.x, v, c.eps, c.coef, c.index, *plain, None, None),
        "affine_logp more": (c.x, v, c.eps, c.coef, c.index, u, 2.0, True, False, c.v_ref, c.v_old),
        "affine_grad": (
            c.x,
            c.v,
            c.eps,
            c.coef,
            c.index,
            c.u,
            2.0,
            True,
            False,
            c.v_ref,
            c.v_old,
            column,
            column,
            column,
        ),
        "policy_loss": (leaf, column, column, 0.1, 0.2, 5.0, None, None, None, 0.0, None, None),
        "policy_loss more": (leaf, column, column, 0.1, 0.2, 5.0, column, column > 0, leaves[0], 0.1, leaves[1], 7.0),
        "group_advantage": (
            wins[0],
            ids.repeat(2)[:4],
            column[[0, 1, 2, 0]].double(),
            "weighted_sum",
            "group",
            1e-4,
            0,
            False,
            True,
        ),
        "winrate_advantage": (wins, torch.ones_like(wins), "group", 1e-4, 0),
    }


@kernels
@pytest.mark.parametrize("name", arguments())
def test_opcheck(name, backend):
    op = getattr(torch.ops.prefgrpo, name.split()[0]).default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with serve(backend):
        torch.library.opcheck(op, arguments()[name], test_utils=tests)


def test_every_backend_has_every_op():
    """By the name under which torch.ops.prefgrpo has it: an op that is added is added everywhere."""
    ops = [op.name for op in vars(library).values() if isinstance(op, library.Op)]
    assert sorted(ops) == sorted({name.split()[0] for name in arguments()})
    for backend in BACKENDS:
        if backend == "triton":
            pytest.importorskip("triton")
        assert not [name for name in ops if not callable(getattr(implementation(backend), name, None))]


def training_step(x, v, u, ref, old, coef, index, ids):
    """A rollout step, its replay, and the loss, as a foreign loop would write it."""
    pair = Guidance(u, 2.5, rescale=True)
    step = affine_step_more(
        x, v, coef, index, noise=NoiseAddress(5, ids), guidance=pair, want_mean=True, copy_dtype=torch.bfloat16
    )
    new = affine_logp(x, v, step.x_next, coef, index, v_ref=ref, v_old=old, guidance=pair)
    rewards = philox_normal(9, ids[:1], index[:1], x.shape[0])
    adv = group_advantage(rewards, ids // 2)
    rate, _ = winrate_advantage((rewards.T @ rewards).abs()[None], torch.ones_like(rewards.T @ rewards)[None])
    out = policy_loss(new.logp, step.logp, adv, clip_low=1e-4, kl=new.kl, kl_coef=0.1, log_ratio=new.log_ratio)
    return out.loss + rate.sum(), step.x_next, step.copy, step.mean, new.logp, out.metrics


@kernels
def test_one_graph_equals_eager(backend):
    c, ids = case(), torch.arange(3, device=DEVICE)
    compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager")
    results = []
    for step in (training_step, compiled):
        v, u = c.v.clone().requires_grad_(), c.u.clone().requires_grad_()
        with serve(backend):
            out = step(c.x, v, u, c.v_ref, c.v_old, c.coef, c.index, ids)
            out[0].backward()
        results.append((*out, v.grad, u.grad))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


def functional_step(x, v, u, ref, y, old, coef, index, ids):
    """The functional form, for loops that own their backward."""
    pair = Guidance(u, 1.5)
    out = replay_policy_grad(
        x, v, y, coef, index, old, old + 1, clip_low=0.1, v_ref=ref, kl_coef=0.1, v_old=ref, guidance=pair
    )
    return *out, on_policy_grad(v, coef, index, NoiseAddress(3, ids), old)


@kernels
def test_the_functional_form_is_one_graph_too(backend):
    c, ids = case(), torch.arange(3, device=DEVICE)
    given = (c.x, c.v, c.u, c.v_ref, c.eps, torch.randn(3, device=DEVICE), c.coef, c.index, ids)
    compiled = torch.compile(functional_step, fullgraph=True, backend="aot_eager")
    with serve(backend):
        for eager, graph in zip(functional_step(*given), compiled(*given), strict=True):
            assert torch.equal(eager, graph)


def test_batch_size_may_change_without_error():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def replay(x, v, y, coef, index):
        return affine_logp(x, v, y, coef, index).logp

    for batch in (2, 5, 7):
        c = make((6,), batch, torch.float32, torch.float32)
        want = affine_logp(c.x, c.v, c.eps, c.coef, c.index).logp
        assert torch.equal(replay(c.x, c.v, c.eps, c.coef, c.index), want)
