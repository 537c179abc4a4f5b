"""The cost of a call besides its kernel: Python overhead, launches and host reads per op, import and compile time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import cases, peers
from benchmarks.harness import Case, measure
from prefgrpo.ops import sde_logp, sde_step, library

OPS = ("view", "expand", "empty", "new_empty", "detach", "slice", "unsqueeze", "t", "_unsafe_view")
FREE = tuple(f"aten::{name}" for name in OPS)
"""Torch ops that launch no kernel."""


class Counter(TorchDispatchMode):
    """Counts torch ops that launch a kernel, also inside our ops, and values read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prefgrpo":  # only this mode made the call one opaque op: count the ops inside it
            with self:
                return getattr(library, func._opname).run(*args)
        name = func.name()
        if "_local_scalar_dense" in name or "nonzero" in name:
            self.reads += 1
        elif not name.startswith(FREE):
            self.launches += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Number of torch ops that launch a kernel, and of host reads, in one call. Our kernel itself is not a torch op."""
    with Counter() as counter:
        call()
    return {"torch_ops": counter.launches, "host_reads": counter.reads}


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """Forward calls at a tiny size, where only overhead remains."""
    d = cases.Latents("FLUX 512²", 1, torch.float32, torch.float32, device)
    d.x, d.v, d.eps = d.x[:, :1], d.v[:, :1], d.eps[:, :1]
    return {
        "sde_step": lambda: sde_step(d.x, d.v, d.coef, d.index, noise=d.eps),
        "sde_step, peers": lambda: peers.flow_step(d.x, d.v, d.eps, *d.columns),
        "sde_logp": lambda: sde_logp(d.x, d.v, d.x, d.coef, d.index),
        "sde_logp, peers": lambda: peers.flow_logp(d.x, d.v, d.x, *d.columns),
    }


def overhead(device: str, rounds: int) -> dict[str, Any]:
    """Microseconds per tiny call, torch ops and host reads, and import time."""
    tiny = calls(device)
    timed = measure(Case("overhead", "1 × 64", "fp32", 0, "", tiny, by_host=True), device, rounds)
    code = "import time, torch; t = time.perf_counter(); import prefgrpo.ops; print(time.perf_counter() - t)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    d = cases.Latents("FLUX 512²", 1, torch.float32, torch.float32, device)
    start = time.perf_counter()
    with torch._inductor.config.patch(force_disable_caches=True):
        cases.compiled(peers.flow_step)(d.x, d.v, d.eps, *d.columns)
    return {
        "call_us": timed["us"],
        "ops": {name: counted(call) for name, call in tiny.items()},
        "import_s": float(out),
        "torch_compile_first_call_s": time.perf_counter() - start,
    }
