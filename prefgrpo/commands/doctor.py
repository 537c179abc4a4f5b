"""`prefgrpo doctor`: show what is installed and test which backends work on this machine.

Backends are tested by calling them: each op backend runs an affine step that is compared with the reference, and each
attention backend runs forward and backward. Invariant: anything missing or failing is reported as a row and never
raises; the exit code is 1 only if the reference itself is wrong.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefgrpo import __version__

PACKAGES = {
    "needed": ("torch", "numpy"),
    "to train": ("diffusers", "transformers", "peft", "accelerate", "safetensors", "aiohttp", "tyro", "tensorboard"),
    "optional": ("triton", "kernels", "flash-attn", "xformers", "torchvision", "open-clip-torch", "wandb"),
}
COEF = torch.tensor([(0.9, -0.1, 0.3, -5.0, 0.25), (1.0, -0.05, 0.0, 0.0, 0.0)])
"""An SDE row and an ODE row (a, b, s, w, c)."""
OTHER_DEVICES = ("_native_npu", "_native_xla")
"""Attention backends for accelerators that prefgrpo does not support."""


class Row(NamedTuple):
    """One row of the output."""

    name: str
    ok: bool | None
    """None: neither good nor bad (not installed, or for information only)."""
    detail: str


def doctor(folder: Path = Path("runs"), hub: bool = False) -> int:
    """Show what is installed and test which backends work; returns 1 if the reference ops are wrong, else 0.

    Args:
        folder: Folder that runs will be written to; its free disk space is shown.
        hub: Also test the attention backends that download a kernel from the hub.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = _run_check("reference", _reference)
    _print("Versions", _versions())
    _print("Machine", _machine(folder))
    _print("Judge server (in a separate environment)", _vllm())
    _print("Ops (affine step compared with the reference)", [reference, _extension(), *_ops(device)])
    _print(f"Attention backends of diffusers on {device} (one forward and backward call)", _attention(device, hub))
    return int(not reference.ok)


def _print(title: str, rows: Iterable[Row]) -> None:
    print(title)
    width = max(40, shutil.get_terminal_size().columns)
    for name, ok, detail in rows:
        head = f"  {name:<20} {'-' if ok is None else 'ok' if ok else 'no':<3} "
        print(textwrap.fill(detail, width, initial_indent=head, subsequent_indent=" " * len(head)))
    print()


def _run_check(name: str, check: Callable[[], tuple[bool | None, str]]) -> Row:
    """The row with the result of `check`, or with its error."""
    try:
        return Row(name, *check())
    except Exception as error:  # noqa: BLE001 - third-party compilers, drivers and kernels may raise anything
        return Row(name, False, f"{type(error).__name__}: {str(error).strip()[:160]}".splitlines()[0])


def _versions() -> Iterator[Row]:
    yield Row("prefgrpo", True, f"{__version__}, {Path(__file__).parents[1]}")
    yield Row("python", True, platform.python_version())
    for group, names in PACKAGES.items():
        for name in names:
            try:
                yield Row(name, True, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                yield Row(name, None if group == "optional" else False, f"not installed ({group})")


def _vllm() -> Iterator[Row]:
    """The vLLM that `judge serve` would start."""
    from prefgrpo.judge.serve import find_vllm
    from prefgrpo.judge.verdict import JudgeError

    try:
        yield Row("vllm", True, find_vllm())
    except JudgeError as error:
        yield Row("vllm", None, str(error))


def _machine(folder: Path) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, omp = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS", "unset")
    yield Row("CPU", threads <= cores, f"{cores} cores; torch uses {threads} threads; OMP_NUM_THREADS is {omp}")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        yield Row(f"GPU {i}", True, f"{p.name}, {memory}, compute capability {p.major}.{p.minor}")
    if torch.cuda.is_available():
        driver = ""
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        yield Row("CUDA", True, f"torch built for CUDA {torch.version.cuda}, driver {driver or 'unknown'}")
    else:
        yield Row("GPU", None, "torch finds none" if torch.version.cuda else "none; this torch was built without CUDA")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield Row("disk", free > 5, f"{free:.0f} GiB free for {folder}")


def _inputs(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, v, ε [4, 3, 67] in fp32, coefficient rows [2, 5] and row indices [4]; D uses all vector lanes and a tail."""
    generator = torch.Generator().manual_seed(0)
    x, v, eps = (torch.randn(4, 3, 67, generator=generator).to(device) for _ in range(3))
    return x, v, eps, COEF.to(device), torch.tensor([0, 1, 0, 1]).to(device)


def _reference() -> tuple[bool, str]:
    """Compare the reference with the equation in numpy: x' = a·x + b·v + s·ε, log-prob w·mean((s·ε)²) + c."""
    from prefgrpo.ops import reference

    x, v, eps, coef, index = _inputs("cpu")
    rows = coef[index].double()
    got = reference.affine_step(x.double(), v.double(), rows, eps.double(), torch.float64)
    a, b, s, w, c = (column[:, None, None] for column in rows.numpy().T)
    noise = s * eps.double().numpy()
    x_next = a * x.double().numpy() + b * v.double().numpy() + noise
    logp = (w * (noise**2).mean((1, 2), keepdims=True) + c)[:, 0, 0]
    worst = max(float(np.abs(g.numpy() - e).max()) for g, e in zip(got, (x_next, logp), strict=True))
    return worst < 1e-12, f"plain torch in fp64; largest error against the equation: {worst:.1e}"


def _extension() -> Row:
    from prefgrpo.ops.backend import extension

    built = extension()
    if built is None:
        return Row("prefgrpo._C", None, "not built; `pip install -e .` with a C++17 compiler builds it")
    cuda = f"CUDA for {built.cuda_archs}" if built.cuda_archs else "no CUDA"
    return Row("prefgrpo._C", True, f"CPU ({built.isa()}), {cuda}; {built.__file__}")


def _ops(gpu: torch.device) -> Iterator[Row]:
    """Compare each backend's affine step and log-prob with the reference, on the device that it runs on."""
    from prefgrpo.ops import affine_step
    from prefgrpo.ops.backend import BACKENDS, backend_of, unavailable_reason, use_backend

    def check(name: str) -> tuple[bool | None, str]:
        if reason := unavailable_reason(name):
            return None, reason
        device = gpu if name in ("cuda", "triton") else torch.device("cpu")
        x, v, eps, coef, index = _inputs(device)
        with use_backend(name):
            if (serves := backend_of(device, x.dtype)) != name:
                raise RuntimeError(f"{device} tensors are handled by '{serves}' instead")
            got = affine_step(x, v, coef, index, noise=eps)
        with use_backend("torch"):
            expected = affine_step(x, v, coef, index, noise=eps)
        dx, dl = (float((g - e).abs().max()) for g, e in zip(got[:2], expected[:2], strict=True))
        return dx < 1e-6 and dl < 1e-5, f"ran on {device}; largest difference: {dx:.1e} in x', {dl:.1e} in log-prob"

    yield from (_run_check(name, partial(check, name)) for name in BACKENDS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = ", ".join(f"{d} → {backend_of(d)}" for d in dict.fromkeys(("cpu", gpu.type)))
    yield Row("chosen", None, "; ".join([chosen, *(str(w.message) for w in said)]))


def _attention(device: torch.device, hub: bool) -> Iterator[Row]:
    """Test each attention backend of diffusers with one call on this device."""
    try:
        from diffusers.models import attention_dispatch as dispatch
    except ImportError as error:
        yield Row("diffusers", None, str(error))
        return
    names = [b.value for b in dispatch.AttentionBackendName if b.value not in OTHER_DEVICES]
    tried = [name for name in names if hub or "_hub" not in name]
    rows = [_run_check(name, partial(_probe, name, device)) for name in tried]
    absent = [row.name for row in rows if "missing package" in row.detail]
    yield from (row for row in rows if row.name not in absent)
    yield Row("not installed", None, ", ".join(absent))
    if skipped := ", ".join(name for name in names if name not in tried):
        yield Row("from the hub", None, f"{skipped}: not tested because they download a kernel; use --hub to test them")


def _probe(name: str, device: torch.device) -> tuple[bool, str]:
    """Compare output and gradients of one backend on [1, 32, 2, 64] with torch's own attention in fp32."""
    from prefgrpo.parallel.attention import LIMIT, errors

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    output, gradient = errors(name, (1, 32, 2, 64), dtype, device)
    detail = f"relative error in {str(dtype).removeprefix('torch.')}: output {output:.1e}, gradients {gradient:.1e}"
    if output <= LIMIT[dtype] < gradient:
        detail += "; usable for evaluation only"
    return max(output, gradient) <= LIMIT[dtype], detail
