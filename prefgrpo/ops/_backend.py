"""Which implementation runs an op: cuda (C++), triton, cpu (C++) or torch (the reference).

Order of preference on a GPU: cuda, triton, torch; on a CPU: cpu, torch. `PREFGRPO_BACKEND` or `use_backend` selects one
for the devices it supports; other devices keep their order.
Invariant: a backend that is missing, or whose kernels do not launch, changes the speed, never the result; one warning
tells the user.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

BACKENDS = ("cuda", "triton", "cpu", "torch")
PACKAGE = __name__.split(".")[0]
"""prefgrpo, or the name that the hub's loader gives the package; also the namespace of the custom ops."""
SOURCES = Path(__file__).parents[2] / "csrc"
"""Sources of the compiled module, in a checkout."""
_choices: list[str] = [os.environ.get("PREFGRPO_BACKEND", "")]
"""Backends chosen by the environment and by `use_backend`, per process: autograd runs backward in its own threads."""
_PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, type(None)})
"""Types of arguments that a kernel reads; another subclass of Tensor may have no memory."""


def op(name: str, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that writes into its arguments `mutates` the custom op torch.ops.prefgrpo.<name>.

    Graphs and subclasses of Tensor (fake tensors, DTensor) use the op, whose fake kernel does nothing; eager calls go
    directly to the function, because the dispatcher costs more than the small kernels.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        custom = torch.library.custom_op(f"{PACKAGE}::{name}", function, mutates_args=mutates)
        custom.register_fake(lambda *args: None)

        @wraps(function)
        def call(*args: Any) -> None:
            if is_compiling() or not _PLAIN.issuperset(map(type, args)):
                custom(*args)
            else:
                function(*args)

        return call

    return decorate


@lru_cache(None)
def extension() -> Any | None:
    """The compiled module prefgrpo._C, or None if it was not built; warns if it is older than its sources."""
    name = f"{PACKAGE}._C"
    if importlib.util.find_spec(name) is None:
        return None
    built = importlib.import_module(name)
    sources = [file.stat().st_mtime for file in SOURCES.glob("*.*")]
    if max(sources, default=0) > Path(str(built.__file__)).stat().st_mtime:
        warnings.warn("prefgrpo._C is older than csrc/: run pip install -e . again", stacklevel=2)
    return built


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
        return "prefgrpo._C is not built (pip install -e . with a C++20 compiler)"
    if name == "cpu":
        return None if built.cpu_runs else "this CPU lacks AVX2 or FMA"
    if not built.cuda_archs:
        return "prefgrpo._C was built without CUDA (rebuild where nvcc is found)"
    return _launch_error() if torch.cuda.is_available() else "no CUDA device is visible"


@lru_cache(None)
def _launch_error() -> str | None:
    """Why prefgrpo._C's kernels cannot be launched on the current GPU (tried once), or None if they can."""
    built: Any = extension()
    ids = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = torch.empty(1, 4, dtype=torch.float32, device="cuda")
    try:
        fields = {"batch": 1, "dim": 4, "out": out, "seed": 0, "sample": ids, "step": None, "number": 0, "offset": 0}
        built.cuda_normal(torch.cuda.current_stream().cuda_stream, fields)
    except RuntimeError as error:
        return (
            f"its kernels, built for {built.cuda_archs}, do not launch on this GPU ({error}); rebuild with "
            "PREFGRPO_CUDA_ARCHS naming this GPU, or update its driver"
        )
    return None


@lru_cache(None)
def _select(device: str, choice: str) -> str:
    if choice and choice not in BACKENDS:
        raise ValueError(f"unknown backend '{choice}': expected one of {', '.join(BACKENDS)}")
    if choice and (why := unavailable_reason(choice)):
        raise RuntimeError(f"backend '{choice}' was selected but cannot run: {why}")
    serves = "cpu" if choice == "cpu" or (choice == "triton" and _interpreted()) else "cuda"
    if choice == "torch" or (choice and device == serves):
        return choice
    order = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpu", "torch")}.get(device, ("torch",))
    reasons = {name: unavailable_reason(name) for name in order}
    chosen = next(name for name, why in reasons.items() if why is None)
    if chosen != order[0] or order == ("torch",):
        why = reasons[order[0]] or "there are no kernels for this device"
        text = f"prefgrpo.ops on {device} uses '{chosen}', slower but with the same results: {why}"
        warnings.warn(text, stacklevel=4)
    return chosen


def backend_of(device: torch.device | str, *dtypes: torch.dtype) -> str:
    """Name of the backend that runs ops on `device`; fp64 and fp16 always run in torch."""
    if torch.float16 in dtypes:
        _warn_half()
    if torch.float64 in dtypes or torch.float16 in dtypes:
        return "torch"
    return _select(device if isinstance(device, str) else device.type, _choices[-1])


@lru_cache(None)
def _warn_half() -> None:
    warnings.warn("prefgrpo.ops run fp16 in torch, several times slower: use bf16 or fp32", stacklevel=5)


@torch.compiler.assume_constant_result
def triton_or_torch(device: torch.device, *dtypes: torch.dtype) -> str:
    """`backend_of` for an op whose only kernel is Triton's; a graph keeps the answer of its compilation."""
    chosen = backend_of(device, *dtypes)
    if chosen == "cuda":
        return _beside_cuda()
    return "torch" if chosen == "cpu" else chosen


@lru_cache(None)
def _beside_cuda() -> str:
    """Backend of an op without a kernel in C++ on a GPU where the others use theirs."""
    why = unavailable_reason("triton")
    if why:
        warnings.warn(f"prefgrpo.ops without a kernel in C++ use 'torch', slower: {why}", stacklevel=4)
    return "torch" if why else "triton"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops of this process with backend `name` inside the block, in every thread; for tests and comparisons.

    Raises ValueError for an unknown name and RuntimeError, with the reason, for one that cannot run here.
    """
    _select("cpu", name)
    _choices.append(name)
    try:
        yield
    finally:
        _choices.pop()


@lru_cache(None)
def _kernel(backend: str, name: str) -> Callable[..., None]:
    if backend == "triton":
        module = {
            "sde_logp": "sde_step", "sde_grad": "sde_step", "normal": "noise", "dequantise_rows": "quantise_rows",
        }.get(name, name.removesuffix("_grad"))  # fmt: skip
        return getattr(importlib.import_module(f"{PACKAGE}.kernels.{module}"), name)
    return getattr(extension(), f"{backend}_{name}")


def launch(backend: str, name: str, like: Tensor, *args: Any, fields: dict[str, Any] | None = None) -> None:
    """Call a kernel on the device of `like`, with its arguments or the fields of its struct in csrc/kernels.h."""
    call = _kernel(backend, name)
    device = like.get_device()
    if backend == "cpu":
        call(torch.get_num_threads(), fields)
    elif device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(backend, name, like, *args, fields=fields)
    elif backend == "cuda":
        call(torch._C._cuda_getCurrentRawStream(device), fields)  # 4 µs less than through a Stream object
    else:
        call(*args, **(fields or {}))


def cuda_scratch(backend: str, x: Tensor, dim: int, size: int, sums: int) -> Tensor | None:
    """Partial sums of a CUDA reduction; the other kernels have their own."""
    if backend != "cuda":
        return None
    built: Any = extension()
    return torch.empty(sums * x.shape[0] * built.partials(dim, size), dtype=torch.float64, device=x.device)
