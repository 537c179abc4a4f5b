"""The ops in graphs: opcheck of every custom op, and every public function compiled and with fake tensors.

Graphs are compiled with fullgraph=True, which fails on any graph break. Inside, results equal eager's bit for bit,
since both run the same kernel; every backend is tested, since each must work without autograd inside an op (Triton's
interpreter cannot be part of a graph).
"""

from functools import partial
from typing import Any

import pytest
import torch
from ops_cases import BF16, DEVICE, F32, F64, INTERPRETED, each_in_graphs, make, serve
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.ops import (
    PhiloxNoise,
    _backend,
    philox_normal,
    policy_loss,
    sde_logp,
    sde_step,
    winrate_advantage,
)

LEAVES = ("v", "logp", "kl")


def inputs(batch=3, x_dtype=F32, v_dtype=F32, seed=0) -> dict[str, Tensor]:
    """Inputs of the calls below for B samples."""
    c = make((5, 8), batch, x_dtype, v_dtype, seed)
    g = torch.Generator().manual_seed(seed + 1)

    def rand(*shape):
        return torch.rand(*shape, generator=g).to(DEVICE)

    named = {"x": c.x, "v": c.v, "ref": c.v_ref, "old": c.v_old, "y": c.eps, "coef": c.coef, "index": c.index}
    named |= {name: rand(batch) for name in ("logp", "logp_old", "kl", "advantage")}
    return named | {"ids": torch.arange(batch, device=DEVICE), "wins": rand(batch, 4, 4)}


def step(i, **options):
    return sde_step(i["x"], i["v"], i["coef"], i["index"], **{"noise": i["y"], **options})


def logp(i, **options):
    return sde_logp(i["x"], i["v"], i["y"], i["coef"], i["index"], **options)


def loss(i, **options):
    return policy_loss(i["logp"], i["logp_old"], i["advantage"], epsilon_low=0.1, **options)


def training_step(i):
    """A rollout step, its replay, the advantage and the loss, as a user's own loop would write them."""
    taken = step(i, noise=PhiloxNoise(5, i["ids"]), want_mean=True)
    new = sde_logp(i["x"], i["v"], taken.x_next, i["coef"], i["index"], v_ref=i["ref"], v_old=i["old"])
    advantage = winrate_advantage(i["wins"], torch.ones_like(i["wins"]))[1][:, 0]
    out = policy_loss(
        new.logp, taken.logp, advantage, epsilon_low=1e-4, kl=new.kl, kl_coef=0.1, weight=new.log_ratio.detach()
    )  # fmt: skip
    return out.loss, taken.x_next, taken.mean, new.logp, out.metrics


CALLS: dict[str, Any] = {
    "step": step,
    "step, counters, mean, bf16": lambda i: step(i, noise=PhiloxNoise(5, i["ids"]), want_mean=True, out_dtype=BF16),
    "step without noise, a row each": lambda i: sde_step(i["x"], i["v"], i["coef"][i["index"]], noise=None),
    "step of one index": lambda i: sde_step(i["x"], i["v"], i["coef"], 2, noise=PhiloxNoise(-3, i["ids"].int())),
    "logp": logp,
    "logp, KL, Guard": lambda i: logp(i, v_ref=i["ref"], v_old=i["old"]),
    "logp, mean": lambda i: logp(i, want_mean=True),
    "logp, KL": lambda i: logp(i, v_ref=i["ref"]),
    "logp of a transposed latent": lambda i: sde_logp(i["x"].mT, i["v"].mT, i["y"].mT, i["coef"], i["index"]),
    "normal": lambda i: philox_normal(9, i["ids"], i["index"], 40),
    "loss": loss,
    "loss, weight, KL": lambda i: loss(
        i, epsilon_high=0.2, weight=i["kl"].detach(), kl=i["kl"], kl_coef=0.1, denominator=7
    ),
    "loss of a log-ratio, each sample's": lambda i: policy_loss(
        i["logp"] / 2, None, i["advantage"], epsilon_low=0.1, reduction="none"
    ),
    "win rates": lambda i: winrate_advantage(i["wins"], i["wins"].mT),
    "training": training_step,
}


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


class Recorder(TorchDispatchMode):
    """Records the calls of custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "prefgrpo":
            self.calls.append((func, [t.clone() if isinstance(t, Tensor) else t for t in args]))
        return func(*args, **(kwargs or {}))


FULL = pytest.mark.full
SEVERAL = ("step of one index", "logp of a transposed latent", "normal", "win rates", "training")
"""Calls that together have every op; other options of an op are other arguments, not other graphs."""
PROMISES = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("backend, mixture", [
    (DEVICE, (F32, BF16)),
    *(pytest.param(DEVICE, m, marks=FULL) for m in ((F32, F32), (BF16, F32), (BF16, BF16), (F64, F32))),
    pytest.param("torch", (F32, BF16), marks=FULL),
    *([("triton", (F32, BF16))] * (not INTERPRETED)),
], ids=str)  # fmt: skip
def test_opcheck(backend, mixture, monkeypatch):
    """Of every custom op, with the arguments that the public functions pass to it in a graph."""
    tests = PROMISES if mixture == (F32, BF16) else (*PROMISES, "test_aot_dispatch_dynamic")
    monkeypatch.setattr(_backend, "is_compiling", lambda: True)  # eager calls take the ops, too
    with serve(backend), Recorder() as recorder:
        for call in CALLS:
            values(partial(results, call), inputs(3, *mixture))
    monkeypatch.undo()
    with serve(backend):
        for op, arguments in recorder.calls:
            torch.library.opcheck(op, arguments, test_utils=tests)
    assert {op._schema.name.partition("::")[2] for op, _ in recorder.calls} == {
        "philox_normal", "sde_step", "sde_logp", "sde_grad", "policy_loss", "winrate_advantage",
    }  # fmt: skip


@pytest.mark.parametrize("backend, name, dynamic", [
    *((backend, name, False) for backend in (DEVICE, *["triton"] * (not INTERPRETED)) for name in CALLS),
    *(pytest.param("torch", name, False, marks=FULL) for name in SEVERAL),
    *(pytest.param(DEVICE, name, True, marks=FULL) for name in SEVERAL),
])  # fmt: skip
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


@each_in_graphs
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


@FULL
@each_in_graphs
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
    compiled = torch.compile(lambda *t: policy_loss(*t, epsilon_low=0.5).loss)
    with serve(backend):
        (got,) = torch.autograd.grad(compiled(leaf, old, advantage), leaf)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
