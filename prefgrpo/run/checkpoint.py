"""Checkpoints and the run folder: written whole or not at all, checked before they are used.

A checkpoint is a folder `step_NNNNNN` with `state.safetensors` (trained weights, AdamW moments, EMA), `state.json`
(step, optimiser counters, sizes and hashes) and `lora/` or `pipeline/` in diffusers format. Noise and prompt
order are functions of (seed, step), so there is no generator state to keep. Invariant: a folder with the final
name is complete, because it is renamed into place after everything in it is on disk, and it is never replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefgrpo.run.run_folder import RunFolder

STATE, META = "state.safetensors", "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint or run folder that cannot be used; the message says which and what to do."""


# ---- writing whole or not at all ------------------------------------------------------------------------------------


def write_atomic(path: Path, text: str) -> None:
    """Replace a small text file in one step."""
    temporary = _beside(path)
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)


def save_images(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays (npz, no pickle) in one step."""
    temporary = _beside(path)
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    os.replace(temporary, path)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Make a folder whole or not at all: `write` fills a hidden one beside it, which takes its name, and the place of
    one that was there, after everything in it is on disk. What a killed process left behind, `claim` removes."""
    temporary, old = _beside(final), _beside(final.with_name(f"{final.name}.old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    mode = temporary.stat().st_mode & 0o666  # what the umask leaves; safetensors 0.8 lets nobody else read its files
    for path in (*temporary.rglob("*"), temporary):
        if path.is_file():
            path.chmod(mode)
        _sync(path)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save(
    run: RunFolder,
    step: int,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    export: Callable[[Path], None],
    keep: int,
) -> None:
    """Write the checkpoint of a step; `export(path)` adds the diffusers-format weights. Old ones beyond `keep` go.

    One that exists stays as it is: the state after a step is a function of the run and the step.
    """
    if (final := run.checkpoint(step)).exists():
        return

    def write(inside: Path) -> None:
        save_file({k: t.detach().contiguous().cpu() for k, t in tensors.items()}, inside / STATE)
        export(inside)
        files = [p for p in sorted(inside.rglob("*")) if p.is_file()]
        listing = {str(p.relative_to(inside)): {"bytes": p.stat().st_size, "sha256": _hash(p)} for p in files}
        facts = {"step": step, **meta, "files": listing}
        (inside / META).write_text(json.dumps(facts | {"sha256": _hash_facts(facts)}, indent=1), encoding="utf-8")

    write_folder(final, write)
    for old in run.all_checkpoints()[:-keep]:
        shutil.rmtree(old)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, meta) of a checkpoint folder. Raises CheckpointError if anything in it is missing or damaged."""
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        listing, own = meta["files"], meta.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(path, f"is not a whole checkpoint ({META}: {error!r})") from error
    if own != _hash_facts(meta):
        raise _unusable(path, f"is damaged: the content of {META} does not match its hash")
    for name, facts in listing.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != facts["bytes"]:
            has = "it is missing" if size is None else f"it has {size}"
            raise _unusable(path, f"is damaged: {name} should have {facts['bytes']} bytes, {has}")
        if _hash(file) != facts["sha256"]:
            raise _unusable(path, f"is damaged: the content of {name} does not match its hash")
    try:
        return load_file(path / STATE), meta
    except SafetensorError as error:
        raise _unusable(path, f"is damaged: {STATE}: {error}") from error


def _unusable(path: Path, problem: str) -> CheckpointError:
    others = [p.name for p in RunFolder(path.parent.parent).all_checkpoints() if p != path]
    advice = f"remove that folder to resume from {others[-1]}" if others else "remove that folder and start again"
    return CheckpointError(f"{path} {problem}; {advice}")


def load_into(parameters: dict[str, Tensor], tensors: dict[str, Tensor], prefix: str) -> None:
    """Copy tensors `prefix + name` into parameters in place. Raises CheckpointError if names or shapes differ."""
    wanted = {f"{prefix}{n}": p for n, p in parameters.items()}
    stored = {k: t for k, t in tensors.items() if k.startswith(prefix)}
    if wanted.keys() != stored.keys() or any(wanted[k].shape != stored[k].shape for k in wanted):
        raise CheckpointError(
            f"the checkpoint's weights do not fit this configuration ({len(stored)} stored, {len(wanted)} expected "
            f"under '{prefix}'); resume with the same model and LoRA rank, or start a new --name"
        )
    with torch.no_grad():
        for key, p in wanted.items():
            p.copy_(stored[key])


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _hash_facts(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# ---- one process per run folder -------------------------------------------------------------------------------------


def claim(run: RunFolder, resume: bool) -> int:
    """Make the run folder ours until the returned descriptor is closed or the process ends.

    Raises CheckpointError, with nothing touched, if it holds something and `resume` is off, if it is no run's folder,
    or if another process is using it.
    """
    _check_content(run, resume)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        handle = lock(run.root)
    except OSError as error:
        raise CheckpointError(f"{run.root} cannot be made or written: {error}; choose another --output") from error
    _check_content(run, resume)  # once more: a run may have come between
    for leftover in (p for folder in (run.root, run.checkpoints, run.eval, run.groups) for p in folder.glob(".*.*")):
        if re.fullmatch(r"\..+\.\d+", leftover.name):  # what a killed process was writing
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return handle


def _check_content(run: RunFolder, resume: bool) -> None:
    folder = run.root
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the run, choose another --name")
    content = sorted(p.name for p in folder.iterdir() if p.name[:1] != ".") if folder.is_dir() else []
    if content and not resume:
        shown = ", ".join(content[:4]) + (" …" if len(content) > 4 else "")
        raise CheckpointError(
            f"{folder} holds another run ({shown}); nothing was touched. Continue it with --resume, "
            f"or choose another --name"
        )
    if content and not run.config.is_file():
        raise CheckpointError(f"{folder} is not a run of prefgrpo (no config.yaml in it); choose another --name")


def lock(folder: Path) -> int:
    """Hold a run folder until the returned descriptor is closed or the process ends.

    Raises CheckpointError if another process holds it. A file system without locks is let through.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise CheckpointError(
            f"{folder} is in use by another process; wait for it, or choose another --name"
        ) from error
    except OSError as error:
        print(f"{folder} cannot be locked ({error}); start no second run in it")
    return handle
