"""The ops in graphs: opcheck of every custom op, and every public function compiled, exported and with fake tensors.

Graphs are compiled with fullgraph=True, which fails on any graph break. Inside, results equal eager's bit for bit,
since both run the same kernel; every backend is tested, since each must work without autograd inside an op (Triton's
interpreter cannot be part of a graph).
"""

import itertools
from typing import Any

import pytest
import torch
from ops_cases import BF16, DEVICE, F16, F32, F64, kernels, make, serve
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prefgrpo.ops import PhiloxNoise, group_advantage, philox_normal, policy_loss, sde_logp, sde_step, winrate_advantage


def operations(x_dtype, v_dtype, out_dtype):
    """(custom op, arguments) for every op and combination of its options."""
    c = make((4, 6), 3, x_dtype, v_dtype)
    column = torch.rand(3, device=DEVICE)
    y = c.eps.to(x_dtype)

    def results(*like):
        return [None if t is None else torch.empty(3, device=DEVICE) for t in like]

    yield "philox_normal", (c.index, c.index, -5, 3, torch.empty(3, 9, dtype=out_dtype, device=DEVICE))
    noises = (None, 0, None, None, 0), (c.eps, 0, None, None, 0), (None, 7, c.index, c.index, 2)
    for (coef, index), noise, mean in itertools.product(
        ((c.coef, c.index), (c.rows, None)), noises, (None, torch.empty_like(c.x, dtype=F32))
    ):
        out = torch.empty_like(c.x, dtype=out_dtype)
        yield "sde_step", (c.x, c.v, coef, index, *noise, out, column.clone(), mean)
    for ref, old in itertools.product((None, c.v_ref), (None, c.v_old)):
        inputs = (c.x, c.v, y, c.coef, c.index, ref, old)
        yield "sde_logp", (*inputs, *results(c.x, ref, old))
        upstream = (column, None if ref is None else column, None if old is None else -column)
        yield "sde_grad", (*inputs, *upstream, torch.empty_like(c.v))
    for weight, kl, delta in itertools.product((None, column), repeat=3):
        inputs = (column, column * 0.9, column - 0.3, weight, kl, delta)
        loss = torch.empty((), device=DEVICE)
        metrics = torch.empty(8, device=DEVICE)
        yield "policy_loss", (*inputs, 0.1, 0.2, 5.0, 0.1, 7.0, loss, metrics, column.clone(), *results(kl))
    wins = torch.rand(2, 3, 3, device=DEVICE)
    for use_std, ddof in itertools.product((False, True), (0, 1)):
        rate, advantage = torch.empty(2, 2, 3, device=DEVICE).unbind(0)
        yield "winrate_advantage", (wins, torch.ones_like(wins), use_std, 1e-4, ddof, rate.clone(), advantage.clone())


PROMISES = ("test_schema", "test_autograd_registration", "test_faketensor")


@kernels
@pytest.mark.parametrize("mixture", [(F32, BF16, F32), *(pytest.param(m, marks=pytest.mark.full) for m in (
    (F32, F32, F32), (BF16, F32, BF16), (BF16, BF16, BF16), (F32, BF16, F16), (F16, F16, F32), (F64, F32, BF16)
))], ids=str)  # fmt: skip
def test_opcheck(backend, mixture, request):
    tests = PROMISES if mixture == (F32, BF16, F32) else (*PROMISES, "test_aot_dispatch_dynamic")
    seen = set()
    for name, arguments in operations(*mixture):
        with serve(backend):
            torch.library.opcheck(getattr(torch.ops.prefgrpo, name).default, arguments, test_utils=tests)
        seen.add(name)
    assert seen == {"philox_normal", "sde_step", "sde_logp", "sde_grad", "policy_loss", "winrate_advantage"}


LEAVES = ("v", "logp", "kl")
STATIC = ("coef", "weights")
"""Inputs without a batch dimension."""


def inputs(batch=3, x_dtype=F32, v_dtype=F32, seed=0) -> dict[str, Tensor]:
    """Inputs of the calls below for B samples."""
    c = make((5, 8), batch, x_dtype, v_dtype, seed)
    g = torch.Generator().manual_seed(seed + 1)

    def rand(*shape):
        return torch.rand(*shape, generator=g).to(DEVICE)

    named = {"x": c.x, "v": c.v, "ref": c.v_ref, "old": c.v_old, "y": c.eps, "coef": c.coef, "index": c.index}
    named |= {name: rand(batch) for name in ("logp", "logp_old", "kl")} | {"ids": torch.arange(batch, device=DEVICE)}
    return named | {"wins": rand(batch, 4, 4), "rewards": rand(batch, 2), "weights": rand(2)}


def step(i, **options):
    return sde_step(i["x"], i["v"], i["coef"], i["index"], **{"noise": i["y"], **options})


def logp(i, **options):
    return sde_logp(i["x"], i["v"], i["y"], i["coef"], i["index"], **options)


def loss(i, **options):
    return policy_loss(i["logp"], i["logp_old"], i["rewards"][:, 0], clip_low=0.1, **options)


def training_step(i):
    """A rollout step, its replay, the advantage and the loss, as a user's own loop would write them."""
    taken = step(i, noise=PhiloxNoise(5, i["ids"]), want_mean=True)
    new = sde_logp(i["x"], i["v"], taken.x_next, i["coef"], i["index"], v_ref=i["ref"], v_old=i["old"])
    advantage = group_advantage(philox_normal(9, i["ids"], i["index"], 2).T, i["ids"] // 2)
    out = policy_loss(
        new.logp, taken.logp, advantage, clip_low=1e-4, kl=new.kl, kl_coef=0.1, log_ratio=new.log_ratio
    )  # fmt: skip
    return out.loss, taken.x_next, taken.mean, new.logp, out.metrics


CALLS: dict[str, Any] = {
    "step": step,
    "step, counters, mean, bf16": lambda i: step(
        i, noise=PhiloxNoise(5, i["ids"], offset=2), want_mean=True, out_dtype=BF16
    ),
    "step without noise, a row each": lambda i: sde_step(i["x"], i["v"], i["coef"][i["index"]], noise=None),
    "step of one index": lambda i: sde_step(i["x"], i["v"], i["coef"], 2, noise=PhiloxNoise(-3, i["ids"].int())),
    "logp": logp,
    "logp, KL, Guard": lambda i: logp(i, v_ref=i["ref"], v_old=i["old"]),
    "logp of a transposed latent": lambda i: sde_logp(i["x"].mT, i["v"].mT, i["y"].mT, i["coef"], i["index"]),
    "normal": lambda i: philox_normal(9, i["ids"], i["index"], 40, 3),
    "loss": loss,
    "loss, weight, KL, Guard": lambda i: loss(
        i, clip_high=0.2, weight=i["kl"].detach(), kl=i["kl"], kl_coef=0.1, log_ratio=i["logp"] / 2, denominator=7
    ),
    "groups": lambda i: group_advantage(i["rewards"].T, i["ids"] // 2),
    "groups, GDPO, ranks": lambda i: group_advantage(
        i["rewards"].T, i["ids"].int() // 2, i["weights"], combine="weighted_advantage_sum", std="global", rank=True
    ),
    "win rates": lambda i: winrate_advantage(i["wins"], i["wins"].mT),
    "win rates, global": lambda i: winrate_advantage(i["wins"], i["wins"].mT, std="global"),
    "training": training_step,
}
calls = pytest.mark.parametrize("name", CALLS)


def results(name, i):
    out = CALLS[name](i)
    return [t for t in ((out,) if isinstance(out, Tensor) else out) if t is not None]


def values(call, i):
    """The results of call(i), followed by the gradients of their sum if it has any."""
    i = {k: t.detach().clone().requires_grad_() if k in LEAVES else t for k, t in i.items()}
    out = call(i)
    total = [t.double().sum() for t in out if t.requires_grad]
    grads = torch.autograd.grad(sum(total), [i[k] for k in LEAVES], allow_unused=True) if total else ()
    return [t.detach().clone() for t in out] + [t for t in grads if t is not None]


def same(got, want):
    """Equal; on a CPU bit for bit, since both ran the same kernels."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype, g.device) == (w.shape, w.dtype, w.device)
        torch.testing.assert_close(g, w, rtol=1e-6 * (DEVICE != "cpu"), atol=1e-7 * (DEVICE != "cpu"))


@kernels
@calls
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled(backend, name, dynamic):
    """One graph with eager's values and gradients; a dynamic graph is not recompiled for another batch size."""
    torch.compiler.reset()

    def call(i):
        return results(name, i)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with serve(backend):
        same(values(compiled, inputs(6)), values(call, inputs(6)))
        if dynamic:
            with torch._dynamo.config.patch(error_on_recompile=True):
                same(values(compiled, inputs(9, seed=1)), values(call, inputs(9, seed=1)))


@kernels
@pytest.mark.parametrize("mixture", [(F32, F32), (F32, BF16), (BF16, BF16), (F64, F32)], ids=str)
def test_fake_tensors(backend, mixture):
    """Fake and real results agree in shape, dtype, strides and device."""
    i = inputs(4, *mixture)
    mode = FakeTensorMode()
    for name in CALLS:
        with serve(backend), torch.no_grad():
            real = results(name, i)
            with mode:
                fake = results(name, {k: mode.from_tensor(t) for k, t in i.items()})
        for r, f in zip(real, fake, strict=True):
            assert (f.shape, f.dtype, f.device, f.stride()) == (r.shape, r.dtype, r.device, r.stride()), name


@pytest.mark.full
@kernels
def test_exported(backend):
    """Exported programs accept any batch size from 3 to 64."""

    class Module(torch.nn.Module):
        def forward(self, i):
            return [t for name in CALLS for t in results(name, i)]

    count = torch.export.Dim("count", min=3, max=64)
    sizes = {k: None if k in STATIC else {0: count} for k in inputs()}
    with serve(backend), torch.no_grad():
        program = torch.export.export(Module(), (inputs(4),), dynamic_shapes=(sizes,))
        for batch in (4, 7):
            i = inputs(batch, seed=batch)
            same(program.module()(i), Module()(i))


@kernels
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F64), (F64, F32)], ids=str)
def test_the_gradient_of_a_compiled_loss(backend, dtypes):
    """By inductor. Oracle: d/dl of mean(−A·exp(l)) is −A·exp(l)/B, also for an fp64 advantage."""
    pytest.importorskip("torch._inductor.cpp_builder")
    torch.compiler.reset()
    delta = torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    advantage = torch.tensor([1.0, -2.0, 3.0], dtype=F64, device=DEVICE)
    want = -advantage * delta.double().exp() / 3
    leaf = delta.to(dtypes[0]).requires_grad_()
    old = torch.zeros(3, dtype=dtypes[1], device=DEVICE)
    compiled = torch.compile(lambda *t: policy_loss(*t, clip_low=0.5).loss)
    with serve(backend):
        (got,) = torch.autograd.grad(compiled(leaf, old, advantage), leaf)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
