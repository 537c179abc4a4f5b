"""Tests that need a GPU: launches, host synchronisation, graph capture, streams, size. Skipped if there is none.

On a GPU machine the tests of the ops run on the GPU too; the checks here are meaningless on a CPU.
"""

import numpy as np
import pytest
import torch

from benchmarks.harness import randn
from prefgrpo.ops import (
    PhiloxNoise,
    gated_residual,
    layernorm_modulate,
    philox_normal,
    policy_loss,
    qk_norm_rope,
    sde_logp,
    sde_step,
    use_backend,
    winrate_advantage,
)
from prefgrpo.ops._backend import unavailable_reason
from prefgrpo.sde.rows import sde_rows
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas
from tests.ops.test_noise import numpy_normal

why = unavailable_reason("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why), reason=why or "")]
DEVICE = "cuda"


def calls():
    """Each op with its maximum number of launches."""
    schedule = make_schedule(shifted_sigmas(10, 3.0), "flow", 0.7).to(DEVICE)
    x, v, e = (randn(4, 4096, 64, device=DEVICE) for _ in range(3))
    index, sample = torch.full((4,), 3, device=DEVICE), torch.arange(4, device=DEVICE)
    column = randn(4, device=DEVICE)
    leaf = v.clone().requires_grad_()
    y = e.bfloat16()
    wins = randn(48, 24, 24, device=DEVICE).abs()
    played = torch.ones_like(wins)
    c = schedule.coef
    q = x[:, :, None]
    return {
        "layernorm_modulate": (lambda: layernorm_modulate(x, x[:, 0], x[:, 1]), 1),
        "gated_residual": (lambda: gated_residual(x, v, x[:, 0]), 1),
        "qk_norm_rope": (lambda: qk_norm_rope(q, q, x[0, 0], x[0, 1], x[0], x[1]), 1),
        "sde_step": (lambda: sde_step(x, v, c, index, noise=e), 2),
        "sde_step, counter-based noise": (lambda: sde_step(x, v, c, 3, noise=PhiloxNoise(1, sample)), 2),
        "sde_step, bf16 x'": (lambda: sde_step(x, v, c, 3, noise=e, out_dtype=torch.bfloat16), 2),
        "sde_step without noise": (lambda: sde_step(x, v, c, 3, noise=None), 1),
        "sde_logp": (lambda: sde_logp(x, v, e, c, index, v_ref=x, v_old=x), 2),
        "sde_logp with gradient, bf16 x'": (
            lambda: torch.autograd.grad(sde_logp(x, leaf, y, c, 3).logp, leaf, column),
            3,
        ),
        "philox_normal": (lambda: philox_normal(1, sample, 3, 4096), 1),
        "policy_loss": (lambda: policy_loss(column, column, column, epsilon_low=0.1), 1),
        "sde_rows": (lambda: sde_rows("flow", column, column, column), 1),
        "winrate_advantage": (lambda: winrate_advantage(wins, played), 1),
    }


def test_few_launches_and_no_host_waits():
    """Kernels, copies and fills per call, counted by the profiler; torch raises at the first op that would wait."""
    from torch.profiler import ProfilerActivity, profile

    for name, (call, allowed) in calls().items():
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        found = [event.name for event in trace.events() or () if "CUDA" in str(event.device_type)]
        assert 0 < len(found) <= allowed, (name, found)


def trajectory(x, v, coef, index, sample):
    """Ten steps whose row index is read on the device."""
    total = torch.zeros(x.shape[0], device=x.device)
    at = index.clone()
    for _ in range(10):
        x, logp, *_ = sde_step(x, v, coef, at, noise=PhiloxNoise(5, sample))
        total = total + logp
        at = at + 1
    return x, total


def test_a_captured_loop_is_the_eager_loop():
    """Ten steps in one CUDA graph equal the eager loop bit for bit, also for new inputs."""
    coef = make_schedule(shifted_sigmas(10, 3.0), "flow", 0.7).to(DEVICE).coef
    x, v = randn(2, 4096, 64, device=DEVICE), randn(2, 4096, 64, device=DEVICE).bfloat16()
    index, sample = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(2, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        trajectory(x, v, coef, index, sample)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trajectory(x, v, coef, index, sample)
    for shift in (0, 7):
        sample.add_(shift)
        x.mul_(0.9)
        graph.replay()
        want = trajectory(x, v, coef, index, sample)
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))


def test_noise_and_x_are_those_of_the_cpu_bit_for_bit():
    x, v = randn(3, 5000, device=DEVICE), randn(3, 5000, device=DEVICE)
    coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 3, device=DEVICE)
    ids = torch.arange(3, device=DEVICE)
    gpu = sde_step(x, v, coef, noise=PhiloxNoise(9, ids, ids))
    with use_backend("cpu"):
        cpu = sde_step(x.cpu(), v.cpu(), coef.cpu(), noise=PhiloxNoise(9, ids.cpu(), ids.cpu()))
    assert torch.equal(gpu.x_next.cpu(), cpu.x_next)
    torch.testing.assert_close(gpu.logp.cpu(), cpu.logp, rtol=0, atol=1e-5)


def test_more_elements_than_an_int32_counts():
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    size = 2**31 + 2**20
    x = torch.zeros(1, size, dtype=torch.bfloat16, device=DEVICE)
    coef = torch.tensor([[0.0, 0.0, 1.0, -0.5, 0.0]], device=DEVICE)
    sample = torch.tensor([3], device=DEVICE)
    out = sde_step(x, x, coef, noise=PhiloxNoise(1, sample, sample)).x_next[:, -4096:]
    want = numpy_normal(1, 3, 3, 4096, size - 4096)
    assert np.abs(out.double().cpu().numpy() - want).max() < 0.02  # half a bf16 step of the largest


def test_it_runs_on_the_current_stream():
    """A step queued on a busy stream must see what earlier work on that stream wrote."""
    x = torch.zeros(1, 2**22, device=DEVICE)
    coef = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        out = sde_step(x, x, coef, noise=None).x_next
    side.synchronize()
    assert bool((out == 3.0).all())


def test_a_replay_compiled_into_cuda_graphs():
    """mode="reduce-overhead" runs once from the graph's memory pool before it captures: nothing may be kept of it."""
    x, v, y = torch.randn(3, 2, 4096, 64, device=DEVICE).unbind(0)
    coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 2, device=DEVICE)

    def total(v):
        return sde_logp(x, v, y, coef, v_ref=x, v_old=y).logp.sum()

    compiled = torch.compile(total, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        v = v.detach().mul(0.9).requires_grad_()
        got = compiled(v).clone(), *torch.autograd.grad(compiled(v), v)
        want = total(v), *torch.autograd.grad(total(v), v)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_device_that_is_not_the_current_one(backend):
    x = torch.ones(2, 100, device="cuda:1")
    coef = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0]] * 2, device="cuda:1")
    assert torch.cuda.current_device() == 0
    with use_backend(backend):
        assert bool((sde_step(x, x, coef, noise=None).x_next == 2.0).all())
