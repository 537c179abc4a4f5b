"""Measurement of one op: variants interleaved over rounds, on inputs rotated beyond the cache.

On a GPU the time of a call is the device's, from a CUDA graph of one call per set of inputs, and `host` is what an
eager call costs before its kernels run. A copy of as many random bytes is measured in the same rounds. Invariant:
variants get the same inputs, rounds and order, and their results were compared before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefgrpo.ops import backend_of, use_backend

Variant = Callable[[Any], Any]
CACHE = {"cpu": 48 << 20, "cuda": 192 << 20}
"""Bytes of inputs to rotate through: more than a CPU's last level, and more than the 126 MB of a B200's L2."""


@dataclass
class Case:
    """One op at one shape; variants are functions of a set of inputs, "ours" and its rivals."""

    op: str
    shape: str
    dtypes: str
    bytes: int
    """Least memory traffic of a call; 0 if it is dominated by its launch."""
    make: Callable[[int], Any] = field(repr=False)
    """The k-th set of inputs."""
    variants: dict[str, Variant] = field(repr=False)
    """The one named triton runs with this backend."""
    tolerance: float = 1e-4


def run(name: str, variant: Variant, inputs: Any) -> Any:
    """One call of a variant with its backend."""
    if name != "triton":
        return variant(inputs)
    with use_backend("triton"):
        return variant(inputs)


def check(case: Case) -> None:
    """Raise RuntimeError unless every variant gives the result of ours, so that no wrong result is timed."""
    results = {name: run(name, variant, case.make(0)) for name, variant in case.variants.items()}
    want = results["ours"].detach().float()
    for name, result in results.items():
        error = float((result.detach().float() - want).abs().max() / want.abs().max())
        if not error <= case.tolerance:
            raise RuntimeError(f"{case.op}, {name}: differs from ours by {error:.3g}: wrong results would be timed")


def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """{variant: quartiles in µs}, the copy's among them, and host µs per eager call of ours."""
    check(case)
    sets = [case.make(k) for k in range(max(1, CACHE[device] // max(case.bytes, 1 << 20)))]
    calls = {name: [lambda name=name, v=v, i=i: run(name, v, i) for i in sets] for name, v in case.variants.items()}
    if case.bytes:
        bits = [torch.randint(0, 256, (2, case.bytes // 2), dtype=torch.uint8, device=device) for _ in sets]
        calls["copy"] = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in bits]
    samplers = {name: _graph(many) if device == "cuda" else _loop(many) for name, many in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            times[name].append(1e6 * sample() / len(sets))
    us = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
    described = {name: getattr(case, name) for name in ("op", "shape", "dtypes", "bytes")}
    return described | {"us": us, "host_us": _host(calls["ours"]) if device == "cuda" else None}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def each_variant(cases: Callable[[str], Iterable[Case]]) -> pytest.MarkDecorator:
    """Parametrises a test over (case, variant), for `pytest benchmarks --benchmark-only`."""
    pairs = [
        pytest.param(case, name, id=f"{case.op}-{case.shape}-{case.dtypes}-{name}")
        for case in cases(DEVICE)
        for name in case.variants
    ]
    return pytest.mark.parametrize(("case", "variant"), pairs)


def benchmarked(benchmark: Any, case: Case, variant: str) -> None:
    """Time one variant with pytest-benchmark, on one set of inputs, with a GPU sync after each call."""
    check(case)
    inputs = case.make(0)
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    benchmark.group = f"{case.op} · {case.shape} · {case.dtypes}"
    benchmark(lambda: (run(variant, case.variants[variant], inputs), wait()))


def _loop(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    sample()
    return sample


def _graph(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def sample() -> float:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return sample


def _host(calls: list[Callable[[], Any]]) -> float:
    """µs until an eager call returns, with an empty queue."""
    times = []
    for call in calls * 3:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def clocks() -> str:
    """The GPU's clocks and power now; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for all variants alike, as a GPU's caching allocator does."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def cpu_name() -> str:
    """Name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine(device: str) -> dict[str, Any]:
    """The machine of the measurement."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "backend": backend_of(device)}
    cores = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return {"device": name, **cores, **versions}


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Reproducible inputs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
