"""The custom ops: fake kernels against real results, opcheck, whole graphs, and everything that intercepts ops.

A fake kernel promises shapes, dtypes and strides; a graph compiled from a wrong promise silently computes garbage. So a
table compares fakes with results over dtypes, strides, options and backends. Modes, tracers, tensor subclasses and
functorch must see a dispatched op, not a kernel that reads raw memory. In a graph, results must equal eager's bit for
bit, since both run the same kernel; graphs of single functions are in test_ops_graphs.py. Every backend is tested,
since each must work without autograd inside an op (Triton's interpreter cannot be part of a graph).
"""

import itertools
import shutil
from typing import ClassVar

import pytest
import torch
from ops_cases import DEVICE, HERE, each_backend, kernels, make, serve
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.ops import (
    Guidance,
    PhiloxNoise,
    sde_logp,
    sde_step,
    group_advantage,
    library,
    philox_normal,
    policy_loss,
    winrate_advantage,
)
from prefgrpo.ops._backend import BACKENDS, implementation

LAYOUTS = {
    "contiguous": lambda t: t,
    "turned": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.repeat_interleave(2)[::2],
    "slices": lambda t: torch.stack((t, t), 1)[:, 1],
    "one for all": lambda t: t[:1].expand_as(t),
    "negated": lambda t: torch._neg_view(-t),
    "no samples": lambda t: t[:0],
}
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MIXTURES = [(F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16), (F16, F16, F32), (F64, F32, BF16), (F32, F64, F64)]


def table(layout, x_dtype, v_dtype, out_dtype):
    """(op, arguments) for every op, with tensors of these dtypes and strides."""
    lay, c = LAYOUTS[layout], make((4, 6), 3, x_dtype, v_dtype)
    x, v, u, ref, old, eps = map(lay, (c.x, c.v, c.u, c.v_ref, c.v_old, c.eps))
    index = c.index[: len(x)]
    column = lay(torch.rand(3, device=DEVICE).to(F64 if F64 in (x_dtype, v_dtype) else F32))
    coef, wins = (lay(torch.rand(*size, device=DEVICE)) for size in ((4, 5), (2, 3, 3)))
    if layout == "no samples":
        coef = torch.rand(4, 5, device=DEVICE)
    given, addressed = (eps, 0, None, None, 0), (None, 7, index, index, 2)
    yield "philox_normal", (-5, index, index, 9, 3, out_dtype)
    for pair, noise, more in (
        ((None, 0.0, False, False), given, True),
        ((u, 2.0, False, True), addressed, True),
        ((u, 2.0, True, False), (None, 0, None, None, 0), False),
    ):
        yield "sde_step", (x, v, coef, index, *pair, *noise, out_dtype, more)
        yield "sde_logp", (x, v, eps, coef, index, *pair, *((ref, old) if more else (None, None)))
        yield "sde_grad", (x, v, eps, coef, index, *pair, ref, old, column, column if more else None, None)
    yield "policy_loss", (column, column, column.float(), 0.1, 0.2, 5.0, None, None, 0.0, None, None)
    more = (column.float(), column, 0.1, column, 7.0)
    yield "policy_loss", (column.float(), column.float(), column.float(), 0.1, 0.2, 5.0, *more)
    yield "winrate_advantage", (wins.to(x_dtype), wins.to(v_dtype), True, 1e-4, 0)


def with_leaves(name, given):
    """The arguments with every tensor cloned; those through which the op has a gradient require one."""
    flows = {"sde_logp": ("v", "uncond"), "policy_loss": ("logp", "kl", "log_ratio")}.get(name, ())
    fields = getattr(library, name).fields
    own = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
    return [t.requires_grad_() if f in flows and t is not None else t for f, t in zip(fields, own, strict=True)]


def options(x_dtype, v_dtype, out_dtype):
    """(op, arguments) for every op and every combination of its options; tensors are contiguous."""
    c = make((4, 6), 3, x_dtype, v_dtype)
    column = torch.rand(3, device=DEVICE)
    flags = (False, True)
    pairs = [(None, 0.0, False, False), *((c.u, 2.0, *both) for both in itertools.product(flags, flags))]
    noises = (None, 0, None, None, 0), (c.eps, 0, None, None, 0), (None, 7, c.index, c.index, 2)

    def each(*options):
        return itertools.product(*((None, option) for option in options))

    tables = (c.coef, c.index), (c.rows, None)
    for (coef, row), pair in itertools.product(tables, pairs):
        for noise, mean in itertools.product(noises, flags):
            yield "sde_step", (c.x, c.v, coef, row, *pair, *noise, out_dtype, mean)
        for others in each(c.v_ref, c.v_old):
            given = (c.x, c.v, c.eps, coef, row, *pair, *others)
            yield "sde_logp", given
            for upstream in each(column, column, -column):
                if all(g is None or t is not None for g, t in zip(upstream[1:], others, strict=True)):
                    yield "sde_grad", (*given, *upstream)
    for weight, kl, delta, n in each(column, column, column - 0.5, 7.0):
        yield "policy_loss", (column, column * 0.9, column - 0.3, 0.1, 0.2, 5.0, weight, kl, 0.1, delta, n)
    wins = torch.rand(2, 3, 3, device=DEVICE)
    for use_std, ddof in itertools.product(flags, (0, 1)):
        yield "winrate_advantage", (wins, torch.ones_like(wins), use_std, 1e-4, ddof)


CALLS = [name for name, _ in table("contiguous", F32, F32, F32)]
PROMISES = ("test_schema", "test_autograd_registration", "test_faketensor")
IN_GRAPHS = (*PROMISES, "test_aot_dispatch_dynamic")  # 20 times as long


def opcheck(name, given, tests=IN_GRAPHS):
    op = getattr(torch.ops.prefgrpo, name).default
    torch.library.opcheck(op, tuple(with_leaves(name, given)), test_utils=tests)


@kernels
@pytest.mark.parametrize("call", range(len(CALLS)), ids=lambda k: f"{k} {CALLS[k]}")
def test_opcheck(call, backend):
    with serve(backend):
        opcheck(*list(table("contiguous", F32, F32, F32))[call])


@pytest.mark.full
@kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_over_dtypes(layout, backend):
    """Every triple of dtypes; those in MIXTURES also in graphs. A call whose dtypes were already tested is skipped."""
    seen = set()
    for mixture in sorted(itertools.product((F32, BF16, F16, F64), repeat=3), key=lambda m: m not in MIXTURES):
        for k, (name, given) in enumerate(table(layout, *mixture)):
            kind = k, *(getattr(t, "dtype", t) for t in given if isinstance(t, torch.Tensor | torch.dtype))
            if kind not in seen:
                seen.add(kind)
                with serve(backend):
                    opcheck(name, given, IN_GRAPHS if mixture in MIXTURES else PROMISES)


@pytest.mark.full
@kernels
@pytest.mark.parametrize("mixture", [MIXTURES[0], MIXTURES[2]], ids=str)
def test_opcheck_over_options(mixture, backend):
    for name, given in options(*mixture):
        with serve(backend):
            opcheck(name, given, PROMISES)


@pytest.mark.parametrize("backend", [b for b in HERE if b != "torch" and (DEVICE == "cuda" or b != "triton")])
def test_every_combination_of_options_agrees_with_torch(backend):
    for name, given in options(F32, F32, F32):
        results = []
        for served in (backend, "torch"):
            with serve(served):
                results.append(getattr(torch.ops.prefgrpo, name)(*given))
        torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6, msg=lambda text, call=name: f"{call}: {text}")


def test_every_backend_has_every_op():
    """Under its name in torch.ops.prefgrpo, so a new op must be added to every backend."""
    ops = [op.name for op in vars(library).values() if isinstance(op, library.Op)]
    assert sorted(ops) == sorted(set(CALLS))
    for backend in BACKENDS:
        if backend == "triton":
            pytest.importorskip("triton")
        assert not [name for name in ops if not callable(getattr(implementation(backend), name, None))]


@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_against_reality(backend, layout):
    """Shape, dtype, strides and device agree; and no result aliases another result or an input."""
    for mixture in MIXTURES[:: 3 if backend == "triton" and DEVICE == "cpu" else 1]:  # its interpreter is slow
        for name, given in table(layout, *mixture):
            op, mode = getattr(torch.ops.prefgrpo, name).default, FakeTensorMode()
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given]
            with serve(backend):
                real, fake = op(*given), op(*fakes)
            real, fake = ((out,) if isinstance(out, torch.Tensor) else out for out in (real, fake))
            for k, (r, f) in enumerate(zip(real, fake, strict=True)):
                promised, got = ((t.shape, t.dtype, t.device, t.stride() if t.numel() else 0) for t in (f, r))
                assert promised == got, (name, k, mixture)
            inputs = {t.data_ptr() for t in given if isinstance(t, torch.Tensor) and t.numel()}
            memory = [t.data_ptr() for t in real if t.numel()]
            assert len({*memory, *inputs}) == len(memory) + len(inputs), (name, mixture)


@kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.full
def test_the_gradient_of_a_compiled_loss_with_an_fp64_advantage(backend):
    """Oracle: d/dl of mean(−A·exp(l)) is −A·exp(l)/B. With an earlier, wrong fake kernel the first element was 0."""
    logp = torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    advantage = torch.tensor([1.0, -2.0, 3.0], dtype=F64, device=DEVICE)
    want = -advantage * logp.double().exp() / 3

    def loss(logp, old, advantage):
        return policy_loss(logp, old, advantage, clip_low=0.5).loss

    for dtypes in itertools.product((F32, F64), repeat=2):
        leaf, old = logp.to(dtypes[0]).requires_grad_(), torch.zeros_like(logp, dtype=dtypes[1])
        with serve(backend):
            (got,) = torch.autograd.grad(torch.compile(loss)(leaf, old, advantage), leaf)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def training_step(x, v, u, ref, old, coef, index, ids):
    """A rollout step, its replay and the loss, as a user's own training loop would write them."""
    pair = Guidance(u, 2.5, rescale=True)
    step = sde_step(x, v, coef, index, noise=PhiloxNoise(5, ids), guidance=pair, want_mean=True)
    new = sde_logp(x, v, step.x_next, coef, index, v_ref=ref, v_old=old, guidance=pair)
    rewards = philox_normal(9, ids[:1], index[:1], x.shape[0])
    adv = group_advantage(rewards, ids // 2)
    rate, _ = winrate_advantage((rewards.T @ rewards).abs()[None], torch.ones_like(rewards.T @ rewards)[None])
    out = policy_loss(new.logp, step.logp, adv, clip_low=1e-4, kl=new.kl, kl_coef=0.1, log_ratio=new.log_ratio)
    return out.loss + rate.sum(), step.x_next, step.mean, new.logp, out.metrics


class Exported(torch.nn.Module):
    """Calls every op, without autograd, which exported programs do not support; the last results are in bf16."""

    def forward(self, *given):
        x, v, u, ref, old, coef, index, ids = given
        half, pair = x.mT.bfloat16(), Guidance(u.mT, 1.5, from_cond=True)
        step = sde_step(half, v.mT, coef, index, noise=ref.mT, guidance=pair)
        losses = {"clip_low": 0.1, "kl_coef": 0.1, "denominator": 7.0}
        new = sde_logp(half, v.mT, step.x_next, coef, index, v_ref=old.mT, guidance=pair)
        loss = policy_loss(new.logp, step.logp - 0.1, ids.float(), kl=new.kl, **losses)
        grad = torch.ops.prefgrpo.sde_grad(
            half, v.mT, step.x_next, coef, index, *pair, old.mT, None, new.logp, new.kl, None
        )
        ranks = group_advantage(x[:, :2, 0].T, ids % 2, std="global", combine="weighted_advantage_sum", rank=True)
        return *training_step(*given), step.x_next, *grad, *loss, ranks


def exported(backend):
    """The program exported for batch sizes 3 to 64, and inputs with another batch size than in its export."""
    count = torch.export.Dim("count", min=3, max=64)
    with serve(backend), torch.no_grad():
        given = tuple(t.detach() for t in inputs(batch=4))
        sizes = tuple(None if k == 5 else {0: count} for k in range(len(given)))
        program = torch.export.export(Exported(), given, dynamic_shapes=(sizes,))
    return program, tuple(t.detach() for t in inputs(1, batch=7))


@kernels
def test_an_exported_program_holds_for_other_batches(backend):
    program, given = exported(backend)
    seen = {node.target.name() for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert seen >= {f"prefgrpo::{name}" for name in CALLS}
    with serve(backend), torch.no_grad():
        for got, want in zip(program.module()(*given), Exported()(*given), strict=True):
            assert torch.equal(got, want)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_an_aot_inductor_package(tmp_path):
    backend = "cuda" if DEVICE == "cuda" else "cpu"
    program, given = exported(backend)
    with serve(backend), torch.no_grad():
        want = Exported()(*given)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
        got = torch._inductor.aoti_load_package(package)(*given)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def inputs(seed=0, batch=3):
    c = make((5, 8), batch, F32, F32, seed)
    v, u = c.v.clone().requires_grad_(), c.u.clone().requires_grad_()
    return c.x, v, u, c.v_ref, c.v_old, c.coef, c.index, torch.arange(batch, device=DEVICE) + seed


class Dispatched(TorchDispatchMode):
    seen: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    seen: ClassVar[set[str]] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name() if isinstance(func, torch._ops.OpOverload) else "")
        return func(*args, **(kwargs or {}))


class Latents(torch.Tensor):
    """A tensor subclass that records the ops called on it and changes nothing."""

    seen: ClassVar[set[str]] = set()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.add(func.name() if isinstance(func, torch._ops.OpOverload) else "")
        return super().__torch_function__(func, types, args, kwargs)


@kernels
@pytest.mark.parametrize("observer", [Dispatched, Called, Latents])
def test_an_observer_sees_the_ops_and_changes_nothing(backend, observer):
    def run(step, given):
        out = step(*given)
        out[0].backward()
        return *out, given[1].grad, given[2].grad

    with serve(backend):
        want = run(training_step, inputs())
        if observer is Latents:
            x, v, u, *rest = inputs()
            got = run(training_step, (x.as_subclass(Latents), v, u, *rest))
        else:
            with observer():
                got = run(training_step, inputs())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert observer.seen >= {"prefgrpo::sde_step", "prefgrpo::sde_logp"}


@kernels
@pytest.mark.parametrize("how", ["make_fx", "jit.trace"])
def test_a_trace_holds_for_other_inputs(backend, how):
    def forward(*given):
        with torch.no_grad():
            return training_step(*given)

    with serve(backend):
        if how == "make_fx":
            traced = make_fx(forward, tracing_mode="real")(*inputs())
        else:
            traced = torch.jit.trace(forward, inputs(), check_trace=False)
        for got, want in zip(traced(*inputs(5)), forward(*inputs(5)), strict=True):
            assert torch.equal(got, want)


def test_metrics_have_no_gradient_in_a_graph_either():
    leaf, zero = torch.zeros(3, requires_grad=True, device=DEVICE), torch.zeros(3, device=DEVICE)
    with Dispatched():
        out = policy_loss(leaf, zero, zero + 1, clip_low=0.1)
    assert out.loss.requires_grad and not out.metrics.requires_grad
