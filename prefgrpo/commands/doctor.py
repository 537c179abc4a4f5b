"""`prefgrpo doctor`: what is installed and what really runs here.

Every claim comes from a call: an op backend has run an affine step that equals the reference, an attention backend has
run forward and backward (setting one may succeed where the call fails). Invariant: a part that is absent is a
row, never an error; the exit code is 1 only if the reference itself is wrong.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from prefgrpo import __version__

PACKAGES = {
    "needed": ("torch", "numpy"),
    "to train": ("diffusers", "transformers", "peft", "accelerate", "safetensors", "aiohttp", "tyro", "tensorboard"),
    "optional": ("triton", "kernels", "flash-attn", "xformers", "torchvision", "open-clip-torch", "wandb"),
}
COEF = ((0.9, -0.1, 0.3, -5.0, 0.25), (1.0, -0.05, 0.0, 0.0, 0.0))
"""An SDE row and an ODE row (a, b, s, w, c)."""
ABSENT = "not installed"
OTHER_DEVICES = ("_native_npu", "_native_xla")
"""Attention backends of accelerators that prefgrpo does not run on."""


class Row(NamedTuple):
    """One finding."""

    name: str
    ok: bool | None
    """None: neither good nor bad (absent, or only told)."""
    detail: str


def doctor(folder: Path = Path("runs"), hub: bool = False) -> int:
    """Print what is installed and what runs; returns 1 if the reference ops are wrong, else 0.

    Args:
        folder: Where runs will be written; its free disk space is shown.
        hub: Also probe the attention backends that download a kernel from the hub.
    """
    reference = list(_reference())
    _print("Versions", _versions())
    _print("Machine", _machine(folder))
    _print("Judge engines, each in an environment of its own", list(_engines()))
    _print("Ops (affine step against the reference)", [*reference, *_extension(), *_ops()])
    _print(f"Attention in diffusers on {_device()} (one call, forward and backward)", _attention(hub))
    return int(not all(row.ok for row in reference))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _print(title: str, rows: Iterator[Row] | list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(width=4)
    table.add_column(overflow="fold")
    words = {True: "[green]ok[/]", False: "[red]no[/]", None: "[dim]-[/]"}
    for row in rows:
        table.add_row(row.name, words[row.ok], row.detail.replace("[", r"\["))
    console = Console()
    console.print(table)
    console.print()


def _why(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _versions() -> Iterator[Row]:
    yield Row("prefgrpo", True, f"{__version__}, {Path(__file__).parents[1]}")
    yield Row("python", True, platform.python_version())
    for group, names in PACKAGES.items():
        for name in names:
            try:
                yield Row(name, True, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                yield Row(name, None if group == "optional" else False, f"not installed ({group})")


def _engines() -> Iterator[Row]:
    """The engines that `judge serve` would start, as they are found."""
    from prefgrpo.judge.engines import find_engine, too_old, vllm_version
    from prefgrpo.judge.verdict import JudgeError

    for engine in ("vllm", "sglang"):
        try:
            path = find_engine(engine, "")
        except JudgeError as error:
            yield Row(engine, None, str(error))
            continue
        version = vllm_version(path) if engine == "vllm" else ""
        why = too_old(version)
        yield Row(engine, not why, f"{why or version or 'of unknown version'}, {path}")


def _machine(folder: Path) -> Iterator[Row]:
    omp = os.environ.get("OMP_NUM_THREADS", "unset")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    yield Row("CPU", threads <= cores, f"{cores} cores, {threads} threads in torch, OMP_NUM_THREADS {omp}")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        yield Row(f"GPU {i}", True, f"{p.name}, {memory}, compute capability {p.major}.{p.minor}")
    if torch.cuda.is_available():
        yield Row("CUDA", True, f"torch built for {torch.version.cuda}, driver {_driver()}")
    else:
        yield Row("GPU", None, "torch sees none" if torch.version.cuda else "none: this torch is built without CUDA")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    yield Row("disk", free > 5, f"{free:.0f} GiB free for {folder}")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "unknown (no nvidia-smi)"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 else f"unknown ({done.stderr.strip()})"


def _inputs(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, v, ε [4, 3, 67] in fp32, coefficient rows [2, 5] and row indices [4]: every lane and tail is used."""
    generator = torch.Generator().manual_seed(0)
    x, v, eps = (torch.randn(4, 3, 67, generator=generator).to(device) for _ in range(3))
    return x, v, eps, torch.tensor(COEF).to(device), torch.tensor([0, 1, 0, 1]).to(device)


def _reference() -> Iterator[Row]:
    """The reference against the equation, written out in Python floats."""
    from prefgrpo.ops import reference

    x, v, eps, coef, index = _inputs("cpu")
    try:
        x_next, logp = reference.affine_step(x.double(), v.double(), coef[index].double(), eps.double(), torch.float64)
    except Exception as error:  # noqa: BLE001 - whatever it is, the row says it
        yield Row("reference", False, _why(error))
        return
    worst = 0.0
    for i, row in enumerate(coef[index].tolist()):
        a, b, s, w, c = row
        flat = zip(x[i].flatten().tolist(), v[i].flatten().tolist(), eps[i].flatten().tolist(), strict=True)
        mean_noise = [(a * p + b * q, s * e) for p, q, e in flat]
        got = x_next[i].flatten().tolist()
        worst = max(worst, *(abs(g - m - n) for g, (m, n) in zip(got, mean_noise, strict=True)))
        squares = math.fsum((g - m) ** 2 for g, (m, _) in zip(got, mean_noise, strict=True)) / len(got)
        worst = max(worst, abs(float(logp[i]) - (w * squares + c)))
    yield Row("reference", worst < 1e-12, f"plain torch in fp64, largest error {worst:.1e} against the equation")


def _extension() -> Iterator[Row]:
    from prefgrpo.ops.backend import extension

    built = extension()
    if built is None:
        yield Row("prefgrpo._C", None, "not built; `pip install -e .` with a C++17 compiler builds it")
        return
    cuda = f"CUDA for {built.cuda_archs}" if built.cuda_archs else "no CUDA"
    yield Row("prefgrpo._C", True, f"CPU ({built.isa()}), {cuda}; {built.__file__}")


def _ops() -> Iterator[Row]:
    """Each backend's affine step and log-prob against the reference on the device it serves."""
    from prefgrpo.ops import affine_step
    from prefgrpo.ops.backend import BACKENDS, backend_of, missing, use_backend

    for name in BACKENDS:
        if (reason := missing(name)) is not None:
            yield Row(name, None, reason)
            continue
        device = _device() if name in ("cuda", "triton") else torch.device("cpu")
        x, v, eps, coef, index = _inputs(device)
        try:
            with use_backend(name):
                if (serves := backend_of(device, x.dtype)) != name:
                    raise RuntimeError(f"{device} tensors go to '{serves}'")
                got = affine_step(x, v, coef, index, noise=eps)
            with use_backend("torch"):
                want = affine_step(x, v, coef, index, noise=eps)
        except Exception as error:  # noqa: BLE001 - a compiler or driver may fail in any way; the row says how
            yield Row(name, False, _why(error))
            continue
        dx, dl = (float((g - w).abs().max()) for g, w in zip(got, want, strict=True))
        yield Row(
            name, dx < 1e-6 and dl < 1e-5, f"ran on {device}; largest difference in x' {dx:.1e}, log-prob {dl:.1e}"
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = ", ".join(f"{d} → {backend_of(d)}" for d in dict.fromkeys(("cpu", _device().type)))
    yield Row("chosen", None, "; ".join([chosen, *(str(w.message) for w in said)]))


def _attention(hub: bool) -> Iterator[Row]:
    """Each attention backend of diffusers by one call on this device."""
    try:
        from diffusers.models import attention_dispatch as dispatch
    except ImportError as error:
        yield Row("diffusers", None, _why(error))
        return
    names = [backend.value for backend in dispatch.AttentionBackendName]
    skipped = [] if hub else [name for name in names if "_hub" in name]
    rows = [_probe(dispatch, name) for name in names if name not in skipped and name not in OTHER_DEVICES]
    yield from (row for row in rows if row.detail != ABSENT)
    yield Row(ABSENT, None, ", ".join(row.name for row in rows if row.detail == ABSENT))
    if skipped:
        yield Row("from the hub", None, f"{', '.join(skipped)}: not tried, they download a kernel; --hub tries them")


def _probe(dispatch: object, name: str) -> Row:
    """Forward and backward of one backend on [1, 32, 2, 64], against fp32 attention written out."""
    device = _device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 32, 2, 64, generator=generator).to(device, dtype).requires_grad_() for _ in range(3))
    stage = "forward"
    try:
        with dispatch.attention_backend(name):  # type: ignore[attr-defined]
            out = dispatch.dispatch_attention_fn(q, k, v)  # type: ignore[attr-defined]
        error = float((out.detach().float() - _plain_attention(q, k, v)).abs().max())
        stage = "backward"
        out.float().sum().backward()
    except Exception as failure:  # noqa: BLE001 - third-party kernels fail in any way; the row says how
        missing = "missing package" in str(failure)
        if stage == "forward":
            return Row(name, None if missing else False, ABSENT if missing else _why(failure))
        return Row(name, False, f"forward runs, backward does not ({_why(failure)}): evaluation only")
    exact = error < (2e-2 if dtype is torch.bfloat16 else 1e-4)
    return Row(
        name, exact, f"forward and backward run; largest error {error:.1e} in {str(dtype).removeprefix('torch.')}"
    )


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
        return (torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v).transpose(1, 2)
