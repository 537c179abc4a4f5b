"""Which backend is selected: it is set per thread, must be able to launch its kernels, and runs on its tensors' device.

GPUs are simulated: an extension whose launch fails, and a device guard that records its use.
"""

import contextlib
import threading
import types

import pytest
import torch
from ops_cases import make

from prefgrpo.ops import (
    Guidance,
    PhiloxNoise,
    sde_logp,
    sde_step,
    backend,
    backend_of,
    philox_normal,
    policy_loss,
    use_backend,
    winrate_advantage,
)


def test_a_choice_is_of_one_thread():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with use_backend("torch"):
            inside.set()
            leave.wait(600)
        seen.append(backend_of("cpu"))

    before, thread = backend_of("cpu"), threading.Thread(target=other)
    thread.start()
    assert inside.wait(600)
    assert backend_of("cpu") == before
    with use_backend("torch"):
        leave.set()
        thread.join()
        assert backend_of("cpu") == "torch"
    assert seen == [before] and backend_of("cpu") == before


@pytest.fixture
def gpu(monkeypatch):
    """Simulates an extension built with CUDA and a visible GPU; the test passes the function that a launch calls."""

    def install(launch):
        built = types.SimpleNamespace(cuda_archs="80,90a", normal=launch)
        monkeypatch.setattr(backend, "extension", lambda: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
        for name in ("zeros", "empty"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, make=make, device=None, **kind: make(*size, **kind))

    caches = (backend._launch_error, backend._default_backend, backend._select, backend._module_for)
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
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    with pytest.warns(UserWarning, match="uses 'triton'.*no kernel image"):
        assert backend_of("cuda") == "triton"
    with pytest.raises(RuntimeError, match=r"'cuda' was selected but cannot run.*80,90a"), use_backend("cuda"):
        pass


def test_one_launch_is_tried_once(gpu):
    tried = []
    gpu(lambda *given: tried.append(given))
    assert backend.unavailable_reason("cuda") is None and backend.unavailable_reason("cuda") is None
    assert backend_of("cuda") == "cuda" and len(tried) == 1


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    """Every kernel launch runs under a guard for the tensors' device, because Triton itself uses the current device."""
    pytest.importorskip("triton")
    from prefgrpo.kernels import affine, noise, small
    from prefgrpo.ops import triton_launch

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
    for module in (affine, noise, small):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    c, ids, pair = make((2, 3), 2, torch.float32, torch.float32), torch.arange(2), None
    monkeypatch.setattr(backend, "_module_for", lambda device, name: triton_launch)
    v, column = c.v.requires_grad_(), torch.ones(2, requires_grad=True)
    for pair in (None, Guidance(c.u, 2.0, rescale=True)):
        y = sde_step(c.x, v, c.coef, c.index, noise=PhiloxNoise(1, ids), guidance=pair).x_next
        sde_logp(c.x, v, y, c.coef, c.index, guidance=pair).logp.sum().backward()
    philox_normal(1, ids, ids, 3)
    policy_loss(column, ids.float(), ids.float(), clip_low=0.1)
    winrate_advantage(torch.rand(1, 2, 2), torch.ones(1, 2, 2))
    assert len(launches) >= 11 and all(launches)
