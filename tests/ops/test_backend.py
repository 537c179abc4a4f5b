"""Which backend is selected: it can launch its kernels, runs on its tensors' device, and holds in every thread.

GPUs are simulated: an extension whose launch fails, and a device guard that records its use.
"""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import threading
import types
from pathlib import Path

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


def test_fp16_warns_once_that_it_runs_in_torch(recwarn):
    _backend._warn_half.cache_clear()
    c = make((2, 3), 2, torch.float16)
    for _ in range(2):
        sde_logp(c.x, c.v, c.eps, c.coef, c.index)
    assert [str(w.message)[:33] for w in recwarn] == ["prefgrpo.ops run fp16 in torch, s"]


@pytest.mark.parametrize("later_s, warned", [(60, 1), (-60, 0)])
def test_a_module_older_than_its_sources_is_told(later_s, warned, tmp_path, monkeypatch, recwarn):
    built = Path(_backend.extension().__file__).stat().st_mtime
    (tmp_path / "math.h").touch()
    os.utime(tmp_path / "math.h", (built + later_s,) * 2)
    monkeypatch.setattr(_backend, "SOURCES", tmp_path)
    assert _backend.extension.__wrapped__() is not None
    assert [str(w.message)[:37] for w in recwarn] == ["prefgrpo._C is older than csrc/: run "] * warned


def test_the_environment_names_a_backend(monkeypatch):
    """As `use_backend` does; an unknown one, or one that cannot run, is refused at the first op."""
    answers = {"torch": "torch", "metal": "expected one of cuda, triton, cpu, torch"}
    answers["cuda"] = f"selected but cannot run: {why}" if (why := _backend.unavailable_reason("cuda")) else "cuda"
    for name, answer in answers.items():
        monkeypatch.setenv("PREFGRPO_BACKEND", name)
        fresh = runpy.run_path(_backend.__file__, run_name=_backend.__name__)
        if name == answer:
            assert fresh["backend_of"]("cuda" if name == "cuda" else "cpu") == name
            continue
        for call in (lambda: fresh["backend_of"]("cpu"), lambda: use_backend(name).__enter__()):  # noqa: B023
            with pytest.raises((ValueError, RuntimeError), match=re.escape(answer)):
                call()


@pytest.fixture
def gpu(monkeypatch):
    """Simulates an extension built with CUDA and a visible GPU; the test passes the function that a launch calls."""

    def install(launch):
        built = types.SimpleNamespace(cuda_archs="80,90", cuda_normal=launch, cpu_runs=True)
        monkeypatch.setattr(_backend, "extension", lambda: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
    """On its current stream, and under a guard only if it is not the current one, which Triton and CUDA use."""
    current = [0]
    guards = []
    launches = []

    @contextlib.contextmanager
    def guard(device):
        guards.append(device)
        current.append(device)
        yield
        current.pop()

    gpu(lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    monkeypatch.setattr(
        _backend, "_kernel", lambda *_: lambda *args, **fields: launches.append((current[-1], *args[:1]))
    )
    for device in (0, 1):
        _backend.launch(backend, "normal", types.SimpleNamespace(get_device=lambda d=device: d), fields={"batch": 1})
    assert launches == ([(0,), (1,)] if backend == "triton" else [(0, 100), (1, 101)]) and guards == [1]


@pytest.mark.full
def test_a_tensor_without_memory_is_an_error_not_a_crash(root):
    """DTensor, fake, functional and meta tensors as any argument of any op, beside plain ones."""
    done = subprocess.run(
        [sys.executable, root / "tests" / "ops" / "no_memory.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("tried 145\n"), done.stdout[-500:] + done.stderr[-3000:]
