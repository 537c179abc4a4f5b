"""Tests that need a GPU: launches, host synchronisation, graph capture, streams, size. Skipped if there is none.

On a GPU machine the tests of the ops run on the GPU too; the checks here are meaningless on a CPU.
"""

import pytest
import torch

from benchmarks import gpu
from prefgrpo.ops import backend_of, sde_logp, sde_step
from prefgrpo.ops._backend import unavailable_reason

why = unavailable_reason("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why), reason=why or "")]


@pytest.mark.parametrize("name", ["launches", "host_waits", "captured_graph", "same_as_cpu"])
def test_check(name):
    getattr(gpu, name)()


def test_more_elements_than_an_int32_counts():
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    assert gpu.large_tensor() > 2**31


def test_it_runs_on_the_current_stream():
    """A step queued on a busy stream must see what earlier work on that stream wrote."""
    assert backend_of("cuda") == "cuda"
    x = torch.zeros(1, 2**22, device="cuda")
    coef = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]], device="cuda")
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
    x, v, y = torch.randn(3, 2, 4096, 64, device="cuda").unbind(0)
    coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 2, device="cuda")

    def total(v):
        return sde_logp(x, v, y, coef, v_ref=x, v_old=y).logp.sum()

    compiled = torch.compile(total, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        v = v.detach().mul(0.9).requires_grad_()
        got = compiled(v).clone(), *torch.autograd.grad(compiled(v), v)
        want = total(v), *torch.autograd.grad(total(v), v)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    x = torch.ones(2, 100, device="cuda:1")
    coef = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0]] * 2, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert bool((sde_step(x, x, coef, noise=None).x_next == 2.0).all())
