"""Which backend is selected: it can launch its kernels, runs on its tensors' device, and holds in every thread.

GPUs are simulated: an extension whose launch fails, and a device guard that records its use.
"""

import contextlib
import threading
import types

import pytest
import torch
from ops_cases import make

from prefgrpo.ops import (
    PhiloxNoise,
    _backend,
    backend_of,
    philox_normal,
    policy_loss,
    sde_logp,
    sde_step,
    use_backend,
    winrate_advantage,
)


def test_a_choice_holds_in_other_threads():
    """Autograd runs the backward of GPU tensors in its own threads: they must use the backend of the forward."""
    c, seen = make((2, 3), 2), []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(backend_of("cpu"))
            return g

    with use_backend("torch"):
        v = Backward.apply(c.v.requires_grad_())
        total = sde_logp(c.x, v, c.eps, c.coef, c.index).logp.sum()
        thread = threading.Thread(target=total.backward)
        thread.start()
        thread.join()
        with use_backend("torch"):
            pass
        assert seen == ["torch"] and backend_of("cpu") == "torch"
    assert backend_of("cpu") == "cpu"


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="expected one of cuda, triton, cpu, torch"), use_backend("metal"):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """Simulates an extension built with CUDA and a visible GPU; the test passes the function that a launch calls."""

    def install(launch):
        built = types.SimpleNamespace(cuda_archs="80,90", cuda_normal=launch)
        monkeypatch.setattr(_backend, "extension", lambda: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
        for name in ("zeros", "empty"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, make=make, device=None, **kind: make(*size, **kind))

    caches = (_backend._launch_error, _backend._select, _backend._for_dtypes)
    for cache in caches:
        cache.cache_clear()
    yield install
    for cache in caches:
        cache.cache_clear()


def test_a_gpu_that_cannot_start_our_kernels_falls_to_triton(gpu, monkeypatch):
    pytest.importorskip("triton")

    def launch(*_):
        raise RuntimeError("CUDA launch failed: no kernel image is available for execution on the device")

    gpu(launch)
    monkeypatch.setattr(_backend, "_interpreted", lambda: False)
    with pytest.warns(UserWarning, match="uses 'triton'.*no kernel image"):
        assert backend_of("cuda") == "triton"
    with pytest.raises(RuntimeError, match=r"'cuda' was selected but cannot run.*80,90"), use_backend("cuda"):
        pass


def test_one_launch_is_tried_once(gpu):
    tried = []
    gpu(lambda *arguments: tried.append(arguments))
    assert _backend.unavailable_reason("cuda") is None and _backend.unavailable_reason("cuda") is None
    assert backend_of("cuda") == "cuda" and len(tried) == 1


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    """Every kernel launch runs under a guard for the tensors' device, because Triton itself uses the current device."""
    pytest.importorskip("triton")
    from prefgrpo.kernels import noise, winrate
    from prefgrpo.kernels import policy_loss as loss
    from prefgrpo.kernels import sde_step as step

    guards, launches = [], []

    @contextlib.contextmanager
    def device_of(t):
        guards.append(t.device)
        yield
        guards.pop()

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(bool(guards))
            return self.kernel[grid]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module in (noise, loss, step, winrate):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    c, ids = make((2, 3), 2), torch.arange(2)
    v, column = c.v.requires_grad_(), torch.ones(2, requires_grad=True)
    with use_backend("triton"):
        y = sde_step(c.x, v, c.coef, c.index, noise=PhiloxNoise(1, ids)).x_next
        sde_logp(c.x, v, y, c.coef, c.index).logp.sum().backward()
        philox_normal(1, ids, ids, 3)
        policy_loss(column, ids.float(), ids.float(), clip_low=0.1)
        winrate_advantage(torch.rand(1, 2, 2), torch.ones(1, 2, 2))
    assert len(launches) == 8 and all(launches)
