"""Which backend is selected: it can launch its kernels, runs on its tensors' device, and holds in every thread.

GPUs are simulated: an extension whose launch fails, and a device guard that records its use.
"""

import contextlib
import subprocess
import sys
import threading
import types

import pytest
import torch
from ops_cases import make

from prefgrpo.ops import _backend, backend_of, sde_logp, use_backend


def test_a_choice_holds_in_other_threads():
    """Autograd runs the backward of GPU tensors in its own threads: they must use the backend of the forward."""
    c, seen = make((2, 3), 2), []
    v = c.v.requires_grad_()
    with use_backend("torch"):
        total = sde_logp(c.x, v, c.eps, c.coef, c.index).logp.sum()
        v.register_hook(lambda g: seen.append(backend_of("cpu")))
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
        built = types.SimpleNamespace(cuda_archs="80,90", cuda_normal=launch, cpu_runs=True)
        monkeypatch.setattr(_backend, "extension", lambda: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
        for name in ("zeros", "empty"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, make=make, device=None, **kind: make(*size, **kind))

    caches = (_backend._launch_error, _backend._select)
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


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_are_launched_on_the_device_of_their_tensors(gpu, monkeypatch, backend):
    """Under a guard for it, because Triton and CUDA themselves use the current device."""
    guards, launches = [], []

    @contextlib.contextmanager
    def device_of(t):
        guards.append(t)
        yield
        guards.pop()

    gpu(lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(_backend, "_kernel", lambda *_: lambda *args: launches.append(list(guards)))
    x = torch.zeros(2)
    _backend.launch(backend, "normal", x, 1)
    assert launches == [[x]]


def test_a_tensor_without_memory_is_an_error_not_a_crash(root):
    """DTensor, fake, functional and meta tensors as any argument of any op, beside plain ones."""
    done = subprocess.run(
        [sys.executable, root / "tests" / "no_memory.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("tried 155\n"), done.stdout[-500:] + done.stderr[-3000:]
