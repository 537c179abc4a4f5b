"""Measurement: interleaved variants, medians over rounds, and the time of a copy of the same bytes for comparison.

On a CPU a timing sample is enough calls to fill a few milliseconds; on a GPU it is a CUDA graph of calls, to measure
device time and not host time. Invariant: every variant of a case gets the same tensors, rounds and order.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


@dataclass
class Case:
    """One op at one shape with its baselines; `ours` is a key of `calls`."""

    op: str
    shape: str
    dtypes: str
    bytes: int
    """Minimum memory traffic of one call in bytes; 0 if the launch, not traffic, dominates its cost."""
    formula: str
    calls: dict[str, Call] = field(repr=False)
    by_host: bool = False
    """On a GPU: time from the host with a final sync, for calls that sync themselves and so cannot be captured."""


def _sampler(call: Call, device: str, seconds: float, by_host: bool) -> Call:
    """A function that returns seconds per call, averaged over enough calls to be measurable."""
    for _ in range(3):
        call()
    if device == "cuda" and not by_host:
        return _graph_sampler(call)
    start = time.perf_counter()
    call()
    count = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    return sample


def _graph_sampler(call: Call, count: int = 20) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    return sample


def measure(case: Case, device: str, rounds: int, seconds: float = 0.004) -> dict[str, Any]:
    """The case's description and `us`: median microseconds per call of every variant, one sample of each per round.

    spread: interquartile range over the median. copy_us: time of a copy of the same bytes; 0 without traffic.
    """
    calls = dict(case.calls)
    if case.bytes:
        source = torch.empty(max(case.bytes // 8, 1), dtype=torch.float32, device=device).fill_(1.0)
        target = torch.empty_like(source)
        calls["copy"] = lambda: target.copy_(source)
    samplers = {name: _sampler(call, device, seconds, case.by_host) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            times[name].append(1e6 * sample())
    us = {name: statistics.median(values) for name, values in times.items()}
    spread = {}
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        spread[name] = (high - low) / us[name]
    copy = us.pop("copy", 0.0)
    described = {name: getattr(case, name) for name in ("op", "shape", "dtypes", "bytes", "formula")}
    return described | {"us": us, "spread": spread, "copy_us": copy}


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for all variants alike, as a GPU's caching allocator does.

    Otherwise, whether a result of a few MB causes page faults depends on what another variant freed before.
    """
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
    from prefgrpo.ops._backend import backend_of, extension

    built = extension()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend_of(device),
        "isa": built.isa() if built is not None else "",
        "compiler": "inductor",
    }


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Reproducible inputs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(device, dtype)
