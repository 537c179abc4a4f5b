"""GPU-only checks: launches per op, host syncs, one CUDA graph for a whole trajectory, large tensors.

Invariant: a failed check raises an error with what it found; a passed one returns the numbers stored in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import randn
from prefgrpo.ops import (
    PhiloxNoise,
    philox_normal,
    policy_loss,
    sde_logp,
    sde_step,
    use_backend,
    winrate_advantage,
)
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas

DEVICE = "cuda"


def _calls() -> dict[str, tuple[Callable[[], Any], int]]:
    """Each op with its maximum number of launches."""
    schedule = make_schedule(shifted_sigmas(10, 3.0), "flow", 0.7).to(DEVICE)
    x, v, e = (randn(4, 4096, 64, device=DEVICE) for _ in range(3))
    index, sample = torch.full((4,), 3, device=DEVICE), torch.arange(4, device=DEVICE)
    column, wins = randn(4, device=DEVICE), randn(48, 24, 24, device=DEVICE).abs()
    played = torch.ones_like(wins)
    c = schedule.coef
    return {
        "sde_step": (lambda: sde_step(x, v, c, index, noise=e), 2),
        "sde_step, counter-based noise": (lambda: sde_step(x, v, c, index, noise=PhiloxNoise(1, sample)), 2),
        "sde_logp": (lambda: sde_logp(x, v, e, c, index, v_ref=x, v_old=x), 2),
        "philox_normal": (lambda: philox_normal(1, sample, index, 4096), 1),
        "policy_loss": (lambda: policy_loss(column, column, column, clip_low=0.1), 1),
        "winrate_advantage": (lambda: winrate_advantage(wins, played), 1),
    }


def launches() -> dict[str, int]:
    """Kernels, copies and fills per call, counted by the profiler; raises if an op exceeds its maximum."""
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for name, (call, allowed) in _calls().items():
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            call()
            torch.cuda.synchronize()
        found[name] = len([event for event in trace.events() or () if "CUDA" in str(event.device_type)])
        if found[name] > allowed:
            raise AssertionError(f"{name}: {found[name]} launches, allowed {allowed}")
    return found


def host_waits() -> int:
    """Number of host syncs: 0, because torch raises at the first op that would sync."""
    calls = _calls()
    for call, _ in calls.values():
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call, _ in calls.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0


def _trajectory(x: Tensor, v: Tensor, coef: Tensor, index: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Ten steps whose row index is read on the device."""
    total = torch.zeros(x.shape[0], device=x.device)
    at = index.clone()
    for _ in range(10):
        x, logp, *_ = sde_step(x, v, coef, at, noise=PhiloxNoise(5, sample))
        total, at = total + logp, at + 1
    return x, total


def captured_graph() -> bool:
    """A ten-step loop in one CUDA graph equals the eager loop bit for bit, also for new inputs."""
    coef = make_schedule(shifted_sigmas(10, 3.0), "flow", 0.7).to(DEVICE).coef
    x, v = randn(2, 4096, 64, device=DEVICE), randn(2, 4096, 64, device=DEVICE).bfloat16()
    index, sample = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(2, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _trajectory(x, v, coef, index, sample)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _trajectory(x, v, coef, index, sample)
    for shift in (0, 7):
        sample.add_(shift)
        x.mul_(0.9)
        graph.replay()
        want = _trajectory(x, v, coef, index, sample)
        if not all(torch.equal(a, b) for a, b in zip(out, want, strict=True)):
            raise AssertionError("a captured loop differs from the eager loop")
    return True


def large_tensor() -> int:
    """Check the last elements of a tensor with more than 2³¹. Needs about 20 GB; returns the number of elements."""
    size = 2**31 + 2**20
    x = torch.zeros(1, size, dtype=torch.bfloat16, device=DEVICE)
    coef = torch.tensor([[0.0, 0.0, 1.0, -0.5, 0.0]], device=DEVICE)
    sample = torch.tensor([3], device=DEVICE)
    out = sde_step(x, x, coef, noise=PhiloxNoise(1, sample, sample)).x_next[:, -4096:]
    want = philox_normal(1, sample, sample, 4096, size - 4096).bfloat16()
    if not torch.equal(out, want):
        raise AssertionError("elements beyond 2³¹ are wrong")
    return size


def same_as_cpu() -> dict[str, bool]:
    """Counter-based noise and x' on CUDA equal those of the C++ CPU kernels bit for bit."""
    x, v = randn(3, 5000, device=DEVICE), randn(3, 5000, device=DEVICE)
    coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 3, device=DEVICE)
    ids = torch.arange(3, device=DEVICE)
    gpu = sde_step(x, v, coef, noise=PhiloxNoise(9, ids, ids, 5))
    with use_backend("cpu"):
        cpu = sde_step(x.cpu(), v.cpu(), coef.cpu(), noise=PhiloxNoise(9, ids.cpu(), ids.cpu(), 5))
    error = float((gpu.logp.cpu() - cpu.logp).abs().max())
    if error > 1e-5:
        raise AssertionError(f"logp of CUDA and CPU differ by {error}")
    return {"x_next": torch.equal(gpu.x_next.cpu(), cpu.x_next)}


def checks() -> dict[str, Any]:
    """Run all checks."""
    free, _ = torch.cuda.mem_get_info()
    return {
        "launches": launches(),
        "host_waits": host_waits(),
        "captured_graph": captured_graph(),
        "same_as_cpu": same_as_cpu(),
        "large_tensor": large_tensor() if free > 24e9 else None,
    }
