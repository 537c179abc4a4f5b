"""Every public function with every option × every way to trace, transform or differentiate it: it works or is refused.

Works: shapes, dtypes and strides match the fake kernels, values and gradients match eager's, also at other batch sizes.
Refused: with an error that names the op, or torch's own error where a transform forbids `out=`. The table fixes which
of the two applies, so a case that starts or stops working fails. Graphs are compiled with fullgraph=True, which fails
on any graph break: no value is read back, and the eager fast paths stay out of a graph.
"""

from typing import NamedTuple

import pytest
import torch
from ops_cases import DEVICE, kernels, make, serve
from test_ops_library import LAYOUTS, MIXTURES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from prefgrpo.ops import (
    Guidance,
    PhiloxNoise,
    sde_logp,
    sde_step,
    group_advantage,
    philox_normal,
    policy_loss,
    winrate_advantage,
)

F32 = torch.float32
FULL = pytest.mark.full


class Inputs(NamedTuple):
    """Inputs for B samples [B, 5, 8] in two dtypes; inputs without a batch dimension have None in BATCH."""

    x: Tensor
    v: Tensor
    u: Tensor
    ref: Tensor
    old: Tensor
    y: Tensor
    logp: Tensor
    logp_old: Tensor
    kl: Tensor
    index: Tensor
    spread: Tensor
    ids: Tensor
    out: Tensor
    wins: Tensor
    rewards: Tensor
    coef: Tensor
    weights: Tensor


BATCH = Inputs(*[0] * 14, 1, None, None)
LEAVES = ("v", "u", "logp", "kl")


def inputs(batch=3, x_dtype=F32, v_dtype=F32, lay=lambda t: t, seed=0):
    c, g = make((5, 8), batch, x_dtype, v_dtype, seed), torch.Generator().manual_seed(seed + 1)

    def draw(*shape):
        return torch.rand(*shape, generator=g).to(DEVICE)

    x, v, u, ref, old, y = (lay(t.clone()) for t in (c.x, c.v, c.u, c.v_ref, c.v_old, c.eps))
    logp, logp_old, kl = (lay(draw(batch)) for _ in range(3))
    n = len(x)
    return Inputs(
        x, v, u, ref, old, y, logp, logp_old, kl, c.index[:n], 1 + draw(n), torch.arange(n, device=DEVICE) + seed,
        torch.empty(n, 5, 8, dtype=v_dtype, device=DEVICE), draw(n, 4, 4), draw(2, n), c.coef, draw(2),
    )  # fmt: skip


def step(i, index=None, **options):
    return sde_step(i.x, i.v, i.coef, i.index if index is None else index, **{"noise": i.y, **options})


def logp(i, index=None, **options):
    return sde_logp(i.x, i.v, i.y, i.coef, i.index if index is None else index, **options)


def loss(i, **options):
    return policy_loss(i.logp, i.logp_old, i.kl.detach().float(), clip_low=0.1, **options)


CALLS = {
    "step": lambda i: step(i),
    "step, a pair, addressed, mean": lambda i: step(
        i, noise=PhiloxNoise(5, i.ids, offset=2), guidance=Guidance(i.u, 2.0, rescale=True), want_mean=True,
        out_dtype=torch.bfloat16,
    ),
    "step without noise, a row each": lambda i: sde_step(i.x, i.v, i.coef[i.index], noise=None),
    "step of one index": lambda i: step(i, 2, noise=PhiloxNoise(-3, i.ids.int())),
    "step, out": lambda i: step(i, out=i.out, out_dtype=i.out.dtype),
    "logp": lambda i: logp(i),
    "logp, a pair, KL, Guard": lambda i: logp(
        i, v_ref=i.ref, v_old=i.old, guidance=Guidance(i.u, 2.0, rescale=True)
    ),
    "logp, int32": lambda i: logp(i, i.index.int()),
    "normal": lambda i: philox_normal(9, i.ids, i.index, 40, 3),
    "normal, out": lambda i: philox_normal(9, i.ids, i.index, 40, dtype=i.out.dtype, out=i.out.flatten(1)),
    "loss": lambda i: loss(i),
    "loss, weight, KL, Guard": lambda i: loss(
        i, clip_high=0.2, weight=i.logp_old.float(), kl=i.kl, kl_coef=0.1, log_ratio=i.logp, denominator=7,
    ),
    "groups": lambda i: group_advantage(i.rewards, i.ids // 2),
    "groups, GDPO, ranks": lambda i: group_advantage(
        i.rewards, i.ids.int() // 2, i.weights, combine="weighted_advantage_sum", std="global", ddof=1, rank=True
    ),
    "groups, geometric": lambda i: group_advantage(i.rewards, i.ids, combine="geometric_mean", std="none"),
    "win rates": lambda i: winrate_advantage(i.wins, i.wins.mT, std="global"),
}  # fmt: skip
calls = pytest.mark.parametrize("name", CALLS)


def results(name, i):
    """The tensors that the call returns."""
    out = CALLS[name](i)
    return [t for t in ((out,) if isinstance(out, Tensor) else out) if t is not None]


def promise(t):
    return t.shape, t.dtype, t.device, t.stride() if t.numel() else ()


@kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mixture", [0, *(pytest.param(k, marks=FULL) for k in range(1, len(MIXTURES)))])
def test_fakes_of_public_functions(backend, layout, mixture):
    """Fake and real results agree in shape, dtype, strides and device, as test_ops_library.py checks for the ops."""
    i, mode = inputs(4, *MIXTURES[mixture][:2], LAYOUTS[layout]), FakeTensorMode()
    fakes = Inputs(*map(mode.from_tensor, i))
    for name in CALLS:
        with serve(backend), torch.no_grad():
            real = results(name, i)
            with mode:
                fake = results(name, fakes)
        assert list(map(promise, fake)) == list(map(promise, real)), name


def leaves(i):
    """The inputs; those named in LEAVES require a gradient."""
    return i._replace(**{name: getattr(i, name).detach().clone().requires_grad_() for name in LEAVES})


def values(call, i):
    """The results of call(*i), followed by the gradients of their sum if it has any."""
    i = leaves(i._replace(out=i.out.clone()))
    out = call(*i)
    total = [t.double().sum() for t in out if t.requires_grad]
    grads = torch.autograd.grad(sum(total), [getattr(i, n) for n in LEAVES], allow_unused=True) if total else ()
    return [t.detach().clone() for t in out] + [t for t in grads if t is not None]


def same(got, want):
    """Equal; on a CPU bit for bit, since both ran the same kernels."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert promise(g)[:3] == promise(w)[:3]
        torch.testing.assert_close(g, w, rtol=1e-6 * (DEVICE != "cpu"), atol=1e-7 * (DEVICE != "cpu"))


def static(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)


def dynamic(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)


@kernels
@calls
@pytest.mark.parametrize("how", [static, pytest.param(dynamic, marks=FULL)])
def test_compiled(backend, name, how):
    """One graph with eager's values and gradients; a dynamic graph is not recompiled for another batch size."""
    torch.compiler.reset()

    def call(*i):
        return results(name, Inputs(*i))

    compiled = how(call)
    with serve(backend):
        same(values(compiled, inputs(6)), values(call, inputs(6)))
        if how is dynamic:
            with torch._dynamo.config.patch(error_on_recompile=True):
                same(values(compiled, inputs(9, seed=1)), values(call, inputs(9, seed=1)))


class Module(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, *i):
        return results(self.name, Inputs(*i))


@pytest.mark.full
@kernels
@calls
def test_exported(backend, name):
    """Exported programs accept any batch size from 3 to 64."""
    count = torch.export.Dim("count", min=3, max=64)
    sizes = tuple(None if d is None else {d: count} for d in BATCH)
    with serve(backend), torch.no_grad():
        program = torch.export.export(Module(name), tuple(inputs(4)), dynamic_shapes=(sizes,))
        for batch in (4, 7):
            i = inputs(batch, seed=batch)
            got = program.module()(*i._replace(out=i.out.clone()))
            same(got, results(name, i))


DIFFERENTIABLE = [name for name in CALLS if name.startswith(("logp", "loss"))]


@kernels
@calls
def test_vmap_is_a_loop(backend, name):
    both = [inputs(seed=seed) for seed in (0, 1)]
    with serve(backend), torch.no_grad():
        want = [torch.stack(pair) for pair in zip(*(results(name, i) for i in both), strict=True)]
        got = torch.func.vmap(lambda *i: results(name, Inputs(*i)))(*map(torch.stack, zip(*both, strict=True)))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def functions(name):
    """(the sum of the call's results as a function of the leaves, the leaves)."""
    i = inputs()

    def total(*given):
        return sum(t.double().sum() for t in results(name, i._replace(**dict(zip(LEAVES, given, strict=True)))))

    return total, tuple(getattr(i, leaf) for leaf in LEAVES)


def forward_mode(total, given):
    return torch.func.jvp(total, given, given)[1]


def dual_numbers(total, given):
    with torch.autograd.forward_ad.dual_level():
        out = total(*(torch.autograd.forward_ad.make_dual(t, t) for t in given))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def func_grad(total, given):
    return torch.func.grad(total, tuple(range(len(given))))(*given)


def func_vjp(total, given):
    out, pull = torch.func.vjp(total, *given)
    return pull(torch.ones_like(out))


def backward(total, given):
    out = total(*(t.requires_grad_() for t in given))
    return torch.autograd.grad(out, given, allow_unused=True) if out.requires_grad else None


def twice(total, given):
    return torch.autograd.grad(total(*(t.requires_grad_() for t in given)), given, create_graph=True, allow_unused=True)


def hessian(total, given):
    return torch.func.hessian(total)(*given)


@kernels
@calls
@pytest.mark.parametrize("how", [forward_mode, dual_numbers, func_grad, func_vjp, backward, twice, hessian])
def test_derivatives_are_complete_refused_or_none(backend, name, how):
    """Refusals name the op. In reverse mode, a result without a gradient is a constant, like a detached tensor."""
    total, given = functions(name)
    op = {"log": "sde_logp", "los": "policy_loss"}.get(name[:3], "")
    forward = how in (forward_mode, dual_numbers) or (how is hessian and not name.startswith("step"))
    with serve(backend):
        if name in DIFFERENTIABLE and how is backward:
            assert any(t is not None and bool(t.any()) for t in how(total, given))
        elif name in DIFFERENTIABLE and how is twice:
            with pytest.raises(RuntimeError, match=f"{op} cannot be differentiated twice"):
                how(total, given)
        elif name in DIFFERENTIABLE or (forward and name.startswith(("step", "loss"))):
            with pytest.raises(NotImplementedError, match=f"{op}.* (backward only|no derivative)"):
                how(total, given)
        elif name.endswith(", out") and how in (forward_mode, func_grad, func_vjp, hessian):  # torch's own error
            with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
                how(total, given)
        elif how is twice:
            with pytest.raises(RuntimeError, match="does not require grad"):
                how(total, given)
        else:
            assert not any(t is not None and bool(t.any()) for t in tree_leaves(how(total, given)))
