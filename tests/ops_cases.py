"""Shared by the tests of the ops: the backends that can run here, cases of every rule, and an fp64 reference."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefgrpo.ops import Guidance, backend_of, reference, use_backend
from prefgrpo.ops._backend import unavailable_reason
from prefgrpo.sde.rules import sde_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = (DEVICE, "triton", "torch")
"""The backends of the device."""
QUICK = settings(max_examples=25, deadline=None, derandomize=True)

each_backend = pytest.mark.parametrize("backend", HERE)
compiled = pytest.mark.parametrize("backend", [b for b in HERE if b != "torch"])
kernels = pytest.mark.parametrize("backend", [b for b in HERE if b != "triton" or DEVICE == "cuda"])
"""Without Triton's interpreter, which cannot be part of a graph."""


def fuzz(**strategies):
    """A test with random inputs on every backend; Triton's interpreter is slow and gets few examples."""

    def decorate(test):
        @each_backend
        def on(backend):
            most = 8 if backend == "triton" and DEVICE == "cpu" else 25
            settings(max_examples=most, deadline=None, derandomize=True)(given(**strategies)(test))(backend)

        on.__name__, on.__doc__ = test.__name__, test.__doc__
        return on

    return decorate


def serve(backend: str):
    """`use_backend`, or skip with the reason; asserts that this backend really is the one used on the device."""
    if why := unavailable_reason(backend):
        pytest.skip(why)
    block = use_backend(backend)
    with use_backend(backend):
        assert backend_of(DEVICE) == backend
    return block


def row(
    rule: str, sigma: float, sigma_next: float, eta: float, sigma_max: float = 0.95, sigma_min: float = 0.0
) -> list[float]:
    """Coefficients (a, b, s, w, c) of one step in fp64."""
    return list(sde_row(rule, sigma, sigma_next, eta, sigma_max, sigma_min))


TABLE = torch.tensor(
    [row("flow", 0.9, 0.8, 0.7), row("dance", 0.5, 0.4, 0.3), row("cps", 0.9, 0.8, 0.8), row("ode", 0.4, 0.3, 0.0)],
    dtype=torch.float64,
)
"""One step of four rules; the last has no log-prob."""

SHAPES = st.sampled_from(
    [(1,), (2,), (3, 5), (127,), (64, 16), (1025,), (3, 5, 7), (4, 2, 6, 5), (2, 3, 4, 5, 3), (8, 1024)]
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@dataclass
class Case:
    """Random inputs of one affine op."""

    x: Tensor
    v: Tensor
    u: Tensor
    v_ref: Tensor
    v_old: Tensor
    eps: Tensor
    coef: Tensor
    index: Tensor

    @property
    def rows(self) -> Tensor:
        return self.coef[self.index]


def make(shape: tuple[int, ...], batch: int, x_dtype: torch.dtype, v_dtype: torch.dtype, seed: int = 0) -> Case:
    """A case of B samples; sample i follows row i % 4 of TABLE."""
    g = torch.Generator().manual_seed(seed)
    x, v, u, ref, old, eps = torch.randn(6, batch, *shape, generator=g).to(DEVICE)
    kinds = [x.to(x_dtype), *((v + 0.05 * t).to(v_dtype) for t in (0 * v, u, ref, old)), eps]
    return Case(*kinds, TABLE.float().to(DEVICE), (torch.arange(batch) % 4).to(DEVICE))


def truth_logp(
    c: Case, x_next: Tensor, guidance: Guidance | None = None, grad: Tensor | None = None
) -> tuple[Tensor, ...]:
    """fp64 (logp, kl, Guard log-ratio); with `grad` [3, B] also their gradient with respect to v (and u)."""
    v, u = (t.double().requires_grad_() for t in (c.v, c.u))
    q = v if guidance is None else reference.guided(v, u, guidance.scale, guidance.from_cond, guidance.rescale)
    x, y, rows = c.x.double(), x_next.double(), c.rows.double()
    out = (
        reference.sde_logp(x, q, y, rows),
        reference.affine_kl(q, c.v_ref.double(), rows),
        reference.guard_log_ratio(x, q, y, c.v_old.double(), rows),
    )
    if grad is None:
        return tuple(t.detach() for t in out)
    total = sum((g.double() * t).sum() for g, t in zip(grad, out, strict=True))
    wanted = (v,) if guidance is None else (v, u)
    return *(t.detach() for t in out), *torch.autograd.grad(total, wanted)


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance, in units in the last place, between two tensors of the same dtype."""
    if a.numel() == 0:
        return 0
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    ints = [t.contiguous().view(kind).long() for t in (a, b)]
    low = -(2 ** (8 * a.element_size() - 1))
    ordered = [torch.where(i < 0, low - i, i) for i in ints]
    return int((ordered[0] - ordered[1]).abs().max())


def assert_close(got: Tensor, want: Tensor, rtol: float, floor: float) -> None:
    """Assert |got − want| <= rtol·|want| + floor; the message gives the largest excess over rtol·|want|."""
    assert got.shape == want.shape
    assert not torch.isnan(got).any(), "NaN"
    got, want = got.detach().double(), want.detach().double()
    error = torch.where(got == want, 0.0, (got - want).abs() - rtol * want.abs())
    assert error.numel() == 0 or float(error.max()) <= floor, f"exceeds rtol {rtol} by {float(error.max()):.3g}"
