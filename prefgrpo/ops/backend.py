"""Which implementation runs an op: cuda (C++), triton, cpu (C++) or torch (the reference).

Order of preference on a GPU: cuda, triton, torch; on a CPU: cpu, torch. `PREFGRPO_BACKEND` (for the process) or
`use_backend` (for a block of one thread) selects one for the devices it supports; other devices keep their order.
Invariant: a backend that is missing, or whose kernels do not launch, changes the speed, never the result; one warning
tells the user.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

BACKENDS = ("cuda", "triton", "cpu", "torch")
_MODULES = {"cuda": "native", "cpu": "native", "triton": "triton_launch", "torch": "plain"}
_EXTENSION_NAME = f"{__name__.split('.')[0]}._C"
_ORDER: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
_override: ContextVar[str | None] = ContextVar("prefgrpo_backend", default=None)


@lru_cache(None)
def extension() -> Any | None:
    """The compiled module prefgrpo._C, or None if it was not built."""
    if importlib.util.find_spec(_EXTENSION_NAME) is None:
        return None
    return importlib.import_module(_EXTENSION_NAME)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable_reason(name: str) -> str | None:
    """Why backend `name` cannot run on this machine at all, or None if it can."""
    if name == "torch":
        return None
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        return None if _interpreted() or torch.cuda.is_available() else "triton needs a GPU (or TRITON_INTERPRET=1)"
    built = extension()
    if built is None:
        return "prefgrpo._C is not built (pip install -e . with a C++17 compiler)"
    if name == "cpu":
        return None
    if not built.cuda_archs:
        return "prefgrpo._C was built without CUDA (rebuild where nvcc is found)"
    return _launch_error() if torch.cuda.is_available() else "no CUDA device is visible"


@lru_cache(None)
def _launch_error() -> str | None:
    """Why prefgrpo._C's kernels cannot be launched on the current GPU (tried once), or None if they can."""
    built: Any = extension()
    try:
        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        out = torch.empty(4, dtype=torch.float32, device="cuda")
        address, view = (0, ids.data_ptr(), ids.data_ptr(), 0), (out.data_ptr(), 4, 0)
        built.normal(1, 1, 4, address, view, torch.cuda.current_stream().cuda_stream)
    except RuntimeError as error:
        return (
            f"its kernels, built for {built.cuda_archs}, do not launch on this GPU ({error}); rebuild with "
            "PREFGRPO_CUDA_ARCHS naming this GPU, or update its driver"
        )
    return None


def _supports(name: str, device: str) -> bool:
    if name == "triton":
        return device == ("cpu" if _interpreted() else "cuda")
    return name in ("torch", device)


@lru_cache(None)
def _from_environment() -> str | None:
    name = os.environ.get("PREFGRPO_BACKEND", "")
    return _validated(name) if name else None


def _validated(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"unknown backend '{name}': expected one of {', '.join(BACKENDS)}")
    if why := unavailable_reason(name):
        raise RuntimeError(f"backend '{name}' was selected but cannot run: {why}")
    return name


@lru_cache(None)
def _default_backend(device: str) -> str:
    order = _ORDER.get(device, ())
    chosen = next((name for name in order if unavailable_reason(name) is None), "torch")
    if not order or chosen != order[0]:
        why = unavailable_reason(order[0]) if order else "there are no kernels for this device"
        warnings.warn(
            f"prefgrpo.ops on {device} uses '{chosen}', slower but with the same results: {why}", stacklevel=4
        )
    return chosen


@lru_cache(None)
def _select(device: torch.device | str, name: str | None) -> str:
    kind = torch.device(device).type
    return name if name is not None and _supports(name, kind) else _default_backend(kind)


def backend_of(device: torch.device | str, *dtypes: torch.dtype) -> str:
    """Name of the backend that runs ops on `device`; fp64 always runs in torch, fp16 in Triton or torch."""
    if torch.float64 in dtypes:
        return "torch"
    name = _select(device, _override.get() or _from_environment())
    if torch.float16 in dtypes and name in ("cuda", "cpu"):
        return "triton" if name == "cuda" and unavailable_reason("triton") is None else "torch"
    return name


@lru_cache(None)
def _module_for(device: torch.device, name: str | None) -> ModuleType:
    return implementation(_select(device, name))


def module_for(device: torch.device) -> ModuleType:
    """The module of the backend that runs ops on `device` (except fp64)."""
    return _module_for(device, _override.get() or _from_environment())


@lru_cache(None)
def implementation(name: str) -> ModuleType:
    """The module that implements backend `name`; all have the same functions."""
    return importlib.import_module(f"{__package__}.{_MODULES[name]}")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops with backend `name` inside the block, for tests and comparisons; other threads are not affected.

    Raises ValueError for an unknown name and RuntimeError, with the reason, for one that cannot run here.
    """
    before = _override.set(_validated(name))
    try:
        yield
    finally:
        _override.reset(before)
