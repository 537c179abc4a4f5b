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

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

STATE = "state.safetensors"
META = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint or run folder that cannot be used; the message says which and what to do."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash_310(file)


def _hash_facts(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _hash_310(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Replace a small text file in one step."""
    temporary = _beside(path)
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
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


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], export: Callable[[Path], None], keep: int
) -> Path:
    """Write `folder/step_NNNNNN`; `export(path)` adds the diffusers-format weights. Old ones beyond `keep` go.

    One that exists stays as it is: the state after a step is a function of the run and the step.
    """
    final = folder / f"step_{step:06d}"
    if final.exists():
        return final

    def write(inside: Path) -> None:
        save_file({k: t.detach().contiguous().cpu() for k, t in tensors.items()}, inside / STATE)
        export(inside)
        files = [p for p in sorted(inside.rglob("*")) if p.is_file()]
        listing = {str(p.relative_to(inside)): {"bytes": p.stat().st_size, "sha256": _hash(p)} for p in files}
        facts = {"step": step, **meta, "files": listing}
        (inside / META).write_text(json.dumps(facts | {"sha256": _hash_facts(facts)}, indent=1), encoding="utf-8")

    write_folder(final, write)
    for old in list_steps(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [p for p in folder.glob("step_*") if p.is_dir() and re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, or None."""
    steps = list_steps(folder)
    return steps[-1] if steps else None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, meta) of a checkpoint folder. Raises CheckpointError if anything in it is missing or damaged."""
    others = [p.name for p in list_steps(path.parent) if p != path]
    advice = f"remove that folder to resume from {others[-1]}" if others else "remove that folder and start again"
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        listing, own = meta["files"], meta.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint ({META}: {error!r}); {advice}") from error
    if own != _hash_facts(meta):
        raise CheckpointError(f"{path} is damaged: the content of {META} does not match its hash; {advice}")
    for name, facts in listing.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != facts["bytes"]:
            found = "it is missing" if size is None else f"it has {size}"
            raise CheckpointError(f"{path} is damaged: {name} should have {facts['bytes']} bytes, {found}; {advice}")
        if _hash(file) != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: the content of {name} does not match its hash; {advice}")
    try:
        return load_file(path / STATE), meta
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {STATE}: {error}; {advice}") from error


def claim(folder: Path, resume: bool) -> int:
    """Make the run folder ours until the returned descriptor is closed or the process ends.

    Raises CheckpointError, with nothing touched, if it holds something and `resume` is off, if it is no run's folder,
    or if another process is using it.
    """
    _check_content(folder, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made or written: {error}; choose another --output") from error
    _check_content(folder, resume)  # once more: a run may have come between
    for leftover in (*folder.glob(".*.*"), *folder.glob("checkpoints/.*.*")):
        if re.fullmatch(r"\..+\.\d+", leftover.name):  # what a killed process was writing
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return handle


def _check_content(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the run, choose another --name")
    held = sorted(p.name for p in folder.iterdir() if p.name[:1] != ".") if folder.is_dir() else []
    if held and not resume:
        shown = ", ".join(held[:4]) + (" …" if len(held) > 4 else "")
        raise CheckpointError(
            f"{folder} holds another run ({shown}); nothing was touched. Continue it with --resume, "
            f"or choose another --name"
        )
    if held and not (folder / "config.yaml").is_file():
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
