"""Measurement of one op: variants interleaved over rounds, on inputs rotated beyond the cache. On a GPU, the device's
time of at least 20 calls in one CUDA graph whose results all stay alive (so that every write reaches DRAM), queued
behind a sleep (so that no launch is waited for); on a CPU with one thread, the process's CPU time, which other
processes change least. Ours is measured a second time as if it were a rival ("again"): smaller differences are noise.
Invariant: variants get the same inputs, upstream gradients, rounds and order, and every result was compared with an
fp64 one before.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, cuda
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.ops import backend_of, use_backend

Results = dict[str, Tensor]
Variant = Callable[[Any], Results]
CPU_CACHE = 24 << 20
"""Maximum size of a CPU's last-level cache in bytes; a GPU reports its own."""
CALLS = 20
"""Minimum number of calls in a timed region of a GPU."""
SLEEP = (1 << 21, 1 << 31)
"""Cycles that a GPU sleeps before a timed region, first (1 ms) and most (1 s): doubled until the region is queued."""
TOLERANCE = {"logp": 2e-5, "kl": 1e-4, "log_ratio": 1e-3, "y0": 1e-2, "y1": 1e-2, "d0": 1e-2, "d1": 1e-2}
"""Largest error relative to a result's largest value (else 1e-5; bf16 adds its rounding). KL and log-ratio cancel; in
blocks of transformers, eager rounds each step to bf16.
"""
BANDWIDTH = {
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 PCIe": 2000,
    "NVIDIA H200": 4800,
    "NVIDIA B200": 8000,
    "NVIDIA L40S": 864,
    "NVIDIA GeForce RTX 4090": 1008,
}
"""Published GB/s of a card's memory, by torch's name of the card (NVIDIA's data sheets)."""


@dataclass
class Case:
    """One op at one shape; variants are functions of a set of inputs, "ours" and its rivals."""

    op: str
    shape: str
    dtypes: str
    bytes: int
    """Memory traffic of a call whose backward reads its inputs again; 0 if it is dominated by its launch."""
    make: Callable[[int], Any] = field(repr=False)
    """The k-th set of inputs, upstream gradients among them."""
    variants: dict[str, Variant] = field(repr=False)
    """The one named triton runs with this backend."""
    truth: Callable[[Any, Results], Results] = field(repr=False)
    """What to compare with, in fp64, for a set of inputs and a variant's results (whose x' is scored)."""
    is_host_only: bool = False
    """Time the host only: a variant waits for the device."""


def run(name: str, variant: Variant, inputs: Any) -> Results:
    """One call of a variant with its backend."""
    if name != "triton":
        return variant(inputs)
    with use_backend("triton"):
        return variant(inputs)


class _NoFills(TorchDispatchMode):
    """Raises RuntimeError where a tensor of ones or of another constant is made, as for a missing upstream gradient."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("ones", "ones_like", "full", "full_like", "fill_"):
            raise RuntimeError(f"{func}: a constant is filled in the timed region; build it with the inputs")
        return func(*args, **(kwargs or {}))


def check(case: Case) -> None:
    """Raise RuntimeError for a variant with a wrong result, or one that makes its upstream gradient itself."""
    for name, variant in case.variants.items():
        inputs = case.make(0)
        results = run(name, variant, inputs)
        for key, want in case.truth(inputs, results).items():
            got = results[key].detach()
            rounding = 2**-8 if got.dtype == torch.bfloat16 else 0.0
            allowed = TOLERANCE.get(key, 1e-5) * want.abs().max() + rounding * want.abs()
            excess = float(((got.double() - want).abs() / allowed).max())
            if not excess <= 1:
                raise RuntimeError(f"{case.op}, {name}: {key} differs from fp64 by {excess:.3g} times the tolerance")
        if not case.is_host_only and name in ("ours", "triton", "eager"):  # compiled ones have eager's wrapper
            with _NoFills():
                run(name, variant, inputs)


class GpuTimer:
    """Samples of the device's seconds per call; the calls are captured once, with all their results alive.

    Raises ValueError for fewer than CALLS calls, RuntimeError if results share memory or if a region is never queued
    in time.
    """

    def __init__(self, calls: Sequence[Callable[[], Results]]) -> None:
        if len(calls) < CALLS:
            raise ValueError(f"expected at least {CALLS} calls in a timed region, got {len(calls)}")
        side = cuda.Stream()
        with cuda.stream(side):
            for call in calls[:3]:
                call()
        cuda.synchronize()
        self.count = len(calls)
        self.cycles, self.longest = SLEEP
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            self.results = [call() for call in calls]
        disjoint([t for result in self.results for t in result.values()])

    def __call__(self) -> float:
        """One sample."""
        while self.cycles <= self.longest:
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(self.cycles)
            begin.record()
            self.graph.replay()
            end.record()
            is_queued = not begin.query()
            end.synchronize()
            if is_queued:
                return begin.elapsed_time(end) / 1e3 / self.count
            self.cycles *= 2
        raise RuntimeError("the device reached the timed region before it was queued")

    def clocks(self) -> list[float] | None:
        """`clocks` during half a second of calls; None if they ended before."""
        end = cuda.Event()
        for _ in range(math.ceil(0.5 / (self() * self.count))):
            self.graph.replay()
        end.record()
        now = clocks()
        is_busy = not end.query()
        cuda.synchronize()
        return now if is_busy else None


def disjoint(tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if two of the tensors share memory: a second write would stay in the cache."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise RuntimeError("results of a timed region share memory")


def _loop(calls: Sequence[Callable[[], Results]]) -> Callable[[], float]:
    """Samples of a CPU's seconds per call, with all results alive: CPU time, or with several threads the clock's."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def sample() -> float:
        start = clock()
        _ = [call() for call in calls]
        return (clock() - start) / len(calls)

    sample()
    return sample


def host_us(calls: Sequence[Callable[[], Results]], device: str) -> float:
    """Median µs until a call returns, with an empty queue."""
    wait = cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for k in range(CALLS + 3):
        wait()
        start = time.perf_counter()
        calls[k % len(calls)]()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[3:])


def launches(call: Callable[[], Results]) -> int:
    """Kernels, copies and fills that a call queues on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def peak_bytes(call: Callable[[], Results]) -> int:
    """Most bytes of the GPU that a call holds at once above its inputs, its results among them."""
    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    call()
    return cuda.max_memory_allocated() - before


def sets_of(size: int, device: str) -> int:
    """How many sets of inputs of a case with `size` bytes are rotated: 3, or as many as are twice the cache."""
    cache = cuda.get_device_properties().L2_cache_size if device == "cuda" else CPU_CACHE
    return max(3, math.ceil(2 * cache / size)) if size else 3


def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """A case's row: `us`, {variant: quartiles}, also of ours again and the copy; `host_us`, `launches` and `peak` by
    variant, on a GPU."""
    check(case)
    sets = [case.make(k) for k in range(sets_of(case.bytes, device))]
    count = max(CALLS if device == "cuda" else 1, len(sets))
    calls: dict[str, list[Callable[[], Results]]] = {}
    for name, variant in case.variants.items():
        calls[name] = [partial(run, name, variant, sets[k % len(sets)]) for k in range(count)]
    row: dict[str, Any] = {name: getattr(case, name) for name in ("op", "shape", "dtypes", "bytes")}
    row |= {"us": {}, "host_us": None, "launches": None, "peak": None, "clocks": None}
    if device == "cuda" or case.is_host_only:
        row["host_us"] = {name: host_us(many, device) for name, many in calls.items()}
    if device == "cuda":
        row["launches"] = {name: launches(many[0]) for name, many in calls.items()}
        row["peak"] = {name: peak_bytes(many[0]) for name, many in calls.items()}
    if case.is_host_only:
        return row
    calls["again"] = calls["ours"]
    if case.bytes:
        bits = [torch.randint(0, 256, (case.bytes // 2,), dtype=torch.uint8, device=device) for _ in sets]
        calls["copy"] = [lambda k=k: {"copy": bits[k % len(bits)].clone()} for k in range(count)]
    samplers = {name: (GpuTimer if device == "cuda" else _loop)(many) for name, many in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            times[name].append(1e6 * sample())
    row["us"] = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
    if isinstance(samplers["ours"], GpuTimer):
        row["clocks"] = samplers["ours"].clocks()
    return row


def clocks() -> list[float] | None:
    """The GPU's SM and memory clocks in MHz and its power in W, now; None without nvidia-smi."""
    wanted = [f"--id=GPU-{cuda.get_device_properties().uuid}", "--format=csv,noheader,nounits"]
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", *wanted]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return [float(number) for number in answer.split(",")]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


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
    """The machine, versions, commit and day of the measurement."""
    name = cuda.get_device_name() if device == "cuda" else cpu_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "backend": backend_of(device)}
    threads = torch.get_num_threads()
    clock = "the GPU's" if device == "cuda" else "CPU time" if threads == 1 else "wall clock"
    cores = {"threads": threads, "cores": os.cpu_count(), "load": os.getloadavg()[0], "clock": clock}
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"device": name, **cores, **versions, "commit": commit or "unknown", "date": date.today().isoformat()}


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Reproducible inputs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
