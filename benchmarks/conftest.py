"""`pytest benchmarks --benchmark-only`: the cases of `make bench` one by one, for saving and comparing timings.

Variants are timed separately; for ratios use `make bench`, which interleaves them. Both check the results first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.cases import NAMES, Latents, plan
from benchmarks.harness import Case, keep_freed_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENTS = plan(DEVICE, quick=False)


@pytest.fixture(scope="session", autouse=True)
def _memory() -> None:
    keep_freed_memory()


@pytest.fixture(params=LATENTS, ids=lambda p: f"{p[0]} x{p[1]}-{NAMES[p[2]]}-{NAMES[p[3]]}")
def latents(request: pytest.FixtureRequest) -> tuple[Latents, bool]:
    """Inputs of one shape, and whether torch.compile is among the variants."""
    *size, with_compile = request.param
    return Latents(*size, DEVICE), with_compile


@pytest.fixture
def device() -> str:
    """Device of the tensors."""
    return DEVICE


@pytest.fixture
def timed(benchmark: Any) -> Callable[[Case, str], None]:
    """Time one variant of a case, with a GPU sync after each call."""

    def run(case: Case, variant: str) -> None:
        if variant not in case.calls:
            pytest.skip("not compiled at this shape")
        call, wait = case.calls[variant], torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
        benchmark.group = f"{case.op} · {case.shape} · {case.dtypes}"
        benchmark.extra_info["bytes"] = case.bytes
        benchmark(lambda: (call(), wait()))

    return run
