"""Shared by the tests of the ops: the backends that can run here, random cases of every rule, and an fp64 reference."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.ops import backend_of, sde_step, use_backend
from prefgrpo.ops import sde_step as public
from prefgrpo.ops._backend import unavailable_reason
from prefgrpo.sde.rules import sde_row

sde = __import__("sys").modules[public.__module__]
"""The module prefgrpo.ops.sde_step; in the package, the name is the function's."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = (DEVICE, "triton", "torch")
"""The backends of the device."""
INTERPRETED = DEVICE == "cpu"
"""Whether Triton runs in its interpreter, which is slow."""
F32 = torch.float32
BF16 = torch.bfloat16
F64 = torch.float64

each_backend = pytest.mark.parametrize("backend", HERE)
compiled = pytest.mark.parametrize("backend", [b for b in HERE if b != "torch"])
each_in_graphs = pytest.mark.parametrize(
    "backend", [DEVICE, *["triton"] * (not INTERPRETED), pytest.param("torch", marks=pytest.mark.full)]
)
"""Without Triton's interpreter, which cannot be part of a graph. Graphs contain the same ops, whatever runs in them."""
MANY = [range(first, first + 500) for first in range(25, 3025, 500)]
seeds = pytest.mark.parametrize(
    "cases", [range(25), *(pytest.param(r, marks=pytest.mark.full) for r in MANY)], ids=lambda r: f"{r[0]}-{r[-1]}"
)
"""Numbers of random cases: a few, and three thousand more."""


def few(backend: str, cases: range) -> range:
    """A third of a short range, and a tenth of a long one, where a case is slow: in Triton's interpreter and on fibers
    instead of CUDA threads. These are there for the program; the CPU's code and the reference have all cases."""
    slow = (backend == "triton" and INTERPRETED) or "PREFGRPO_SHIM" in os.environ
    return cases[:: 3 if len(cases) < 100 else 10] if slow else cases


def serve(backend: str) -> Any:
    """`use_backend`, or skip with the reason; asserts that this backend really is the one used on the device."""
    if why := unavailable_reason(backend):
        pytest.skip(why)
    block = use_backend(backend)
    with use_backend(backend):
        assert backend_of(DEVICE) == backend
    return block


STEPS = ("flow", 0.9, 0.8, 0.7), ("dance", 0.5, 0.4, 0.3), ("cps", 0.9, 0.8, 0.8), ("ode", 0.4, 0.3, 0.0)
TABLE = torch.tensor([sde_row(*step) for step in STEPS], dtype=F64)
"""One step of four rules; the last has no log-prob."""
SHAPES = [(1,), (2,), (3, 5), (127,), (64, 16), (1025,), (3, 5, 7), (4, 2, 6, 5), (2, 3, 4, 5, 3), (8, 1024), (2049,)]
LAYOUTS = {
    "contiguous": lambda t: t,
    "turned": lambda t: t.mT.contiguous().mT if t.dim() > 2 else t.repeat_interleave(2, -1)[..., ::2],
    "slices": lambda t: torch.stack((t, t), 1)[:, 1],
    "odd start": lambda t: torch.cat([t[:1].flatten()[:1], t.flatten()])[1:].view(t.shape),
    "one for all": lambda t: t[:1].expand_as(t),
}


@dataclass
class Case:
    """Inputs of a step and of its replay."""

    x: Tensor
    v: Tensor
    v_ref: Tensor
    v_old: Tensor
    eps: Tensor
    coef: Tensor
    index: Tensor

    @property
    def rows(self) -> Tensor:
        return self.coef[self.index]


def make(
    shape: tuple[int, ...], batch: int, x_dtype: torch.dtype = F32, v_dtype: torch.dtype = F32, seed: int = 0
) -> Case:
    """A case of B samples; sample i follows row i % 4 of TABLE."""
    g = torch.Generator().manual_seed(seed)
    x, v, ref, old, eps = torch.randn(5, batch, *shape, generator=g).to(DEVICE)
    velocities = [(v + 0.05 * t).to(v_dtype) for t in (0 * v, ref, old)]
    return Case(x.to(x_dtype), *velocities, eps, TABLE.float().to(DEVICE), (torch.arange(batch) % 4).to(DEVICE))


def draw(seed: int, dtypes: tuple[torch.dtype, ...] = (F32, BF16)) -> tuple[Case, torch.dtype, random.Random]:
    """(a random case, storage dtype of x', generator for further choices)."""
    pick = random.Random(seed)
    shape = pick.choice(SHAPES)
    batch = pick.randint(1, 4)
    c = make(shape, batch, pick.choice(dtypes), pick.choice(dtypes), seed)
    for name in ("x", "v", "v_ref", "v_old", "eps"):
        setattr(c, name, LAYOUTS[pick.choice([*LAYOUTS])](getattr(c, name)))
    return c, pick.choice(dtypes), pick


def truth_logp(c: Case, x_next: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """fp64 (logp, kl, Guard log-ratio) in plain torch; with `grad` [3, B] also their gradient with respect to v."""
    x, y, ref, old, rows = (t.double() for t in (c.x, x_next, c.v_ref, c.v_old, c.rows))
    v = c.v.double().requires_grad_()
    a, b, s, w, _ = (column.view(-1, *[1] * (x.dim() - 1)) for column in rows.unbind(1))
    noisy = s > 0

    def mean(t: Tensor) -> Tensor:
        return t.flatten(1).mean(1)

    b_over_s = torch.where(noisy, b / torch.where(noisy, s, 1.0), 0.0)
    logp = mean(w * (y - a * x - b * v).square()) + rows[:, 4]
    kl = mean((b_over_s * (v - ref)).square() / 2)
    log_ratio = mean(b_over_s * (y - a * x - b * old) * (v - old))
    out = (logp, kl, log_ratio)
    if grad is None:
        return tuple(t.detach() for t in out)
    total = sum((g.double() * t).sum() for g, t in zip(grad, out, strict=True))
    return *(t.detach() for t in out), *torch.autograd.grad(total, v)


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance, in units in the last place, between two tensors of the same dtype."""
    if a.numel() == 0:
        return 0
    kind = torch.int32 if a.dtype == F32 else torch.int16
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


def copy_of_noise(x: Tensor, noise: Any) -> Tensor:
    """The noise that a step adds, as a tensor like x: a step with a = b = 0 and s = 1."""
    coef = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], device=x.device).repeat(x.shape[0], 1)
    return sde_step(torch.zeros_like(x, dtype=F32), torch.zeros_like(x, dtype=F32), coef, noise=noise).x_next


class Counted(TorchDispatchMode):
    """Counts the operations that a GPU runs: neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view and "empty" not in function._schema.name:
            self.names.append(function._schema.name)
        return function(*args, **kwargs or {})
