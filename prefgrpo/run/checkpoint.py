"""Checkpoints and the run folder: written atomically (`data.atomic`), checked for completeness before use.

A checkpoint is a folder `step_NNNNNN` with `state.safetensors` (trained weights, AdamW moments, EMA), `state.json`
(step, optimiser counters, the size of every file) and `lora/` or `pipeline/` in diffusers format. Sharded weights, with
their moments and EMA, are in `parts/` instead (torch.distributed.checkpoint): every process writes its own files, and
any number of processes can read them. Noise and prompt order are functions of (seed, step), so there is no
generator state to save. Invariant: a folder with the final name is complete, because it is renamed into place after
everything in it is on disk, and it is never replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException as PartsError
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from prefgrpo.config.recipe import UserError
from prefgrpo.data.atomic import temporary_path, write_folder
from prefgrpo.parallel.shard import is_sharded, shard_like
from prefgrpo.parallel.world import World
from prefgrpo.run.run_folder import RunFolder

STATE, META, PARTS = "state.safetensors", "state.json", "parts"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint or run folder that cannot be used; the message says which and what to do."""


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save(
    run: RunFolder,
    step: int,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    export: Callable[[Path], None],
    keep: int,
    world: World,
) -> None:
    """Write the checkpoint of a step; `export(path)` adds the diffusers-format weights. Keeps the newest `keep` ones.

    Every rank calls it: rank 0 writes, and every rank its shards. An existing checkpoint is left unchanged, because the
    state after a step is a function of the run and the step. Raises CheckpointError on all ranks if any cannot write.
    """
    final = run.checkpoint(step)
    if world.any(world.main and final.exists()):
        return
    parts = {key: t.detach() for key, t in tensors.items() if is_sharded(t)}
    problem = None
    began = False

    def write(inside: Path) -> None:
        nonlocal began
        began = True
        if parts:
            _save_parts(inside, parts, world)
        whole = {k: t.detach().contiguous().cpu() for k, t in tensors.items() if k not in parts}
        save_file(whole, inside / STATE)
        export(inside)
        sizes = {str(p.relative_to(inside)): p.stat().st_size for p in sorted(inside.rglob("*")) if p.is_file()}
        facts = {"step": step, **meta, "files": sizes}
        (inside / META).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    try:
        if world.main:
            write_folder(final, write)
            for old in run.all_checkpoints()[:-keep]:
                os.replace(old, temporary_path(old))  # under this name, `claim` removes it if we are killed here
                shutil.rmtree(temporary_path(old))
        elif parts:
            _save_parts(None, parts, world)
    except (OSError, SafetensorError) as error:
        problem = f"the checkpoint cannot be written: {error}"
        if world.main and parts and not began:
            world.all_gather_object(CheckpointError(problem))  # the others wait for the folder
    except CheckpointError as error:
        problem = str(error)
    except PartsError as error:
        causes = (f"process {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        problem = f"the checkpoint cannot be written: {'; '.join(causes)}"
    if first := next((text for text in world.all_gather_object(problem) if text), None):
        shutil.rmtree(temporary_path(final), ignore_errors=True)
        raise CheckpointError(first)


def _save_parts(inside: Path | None, parts: dict[str, Tensor], world: World) -> None:
    """Write sharded tensors into rank 0's folder `inside`; every rank calls it and writes its own files.

    Raises the CheckpointError that rank 0 sends instead of a folder.
    """
    folder: Path | CheckpointError = next(place for place in world.all_gather_object(inside) if place is not None)
    if isinstance(folder, CheckpointError):
        raise folder
    save_parts(parts, checkpoint_id=folder / PARTS)


def read(
    path: Path, world: World, templates: Callable[[Collection[str]], dict[str, Tensor]] = lambda names: {}
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, meta) of a checkpoint folder; every rank calls it. Sharded tensors are read into those returned by
    `templates(names)`. Raises CheckpointError, on all ranks, if a file is missing or has another size than when saved.
    """
    problem = None
    try:
        meta = read_meta(path)
        tensors = load_file(path / STATE)
    except CheckpointError as error:
        problem = error
    except SafetensorError as error:
        problem = CheckpointError(f"{path} is damaged: {STATE}: {error}")
    if first := next((p for p in world.all_gather_object(problem) if p is not None), None):
        raise first
    if (path / PARTS).is_dir():
        names = FileSystemReader(path / PARTS).read_metadata().state_dict_metadata
        parts = templates(names.keys())
        load_parts(parts, checkpoint_id=path / PARTS)
        tensors |= parts
    return tensors, meta


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a checkpoint. Raises CheckpointError if it is not complete."""
    advice = f"remove {path} to use the one before, or {path.parent} to start again"
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({META}: {error!r}); {advice}") from error
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            has = "it is missing" if found is None else f"it has {found}"
            raise CheckpointError(f"{path} is damaged: {name} should have {size} bytes, {has}; {advice}")
    return meta


def load_into(parameters: dict[str, Tensor], tensors: dict[str, Tensor], prefix: str) -> None:
    """Copy the tensors `prefix + name` into parameters, in place. Raises CheckpointError if names or shapes differ."""
    wanted = {f"{prefix}{n}": p for n, p in parameters.items()}
    stored = {k: t for k, t in tensors.items() if k.startswith(prefix)}
    if wanted.keys() != stored.keys() or any(wanted[k].shape != stored[k].shape for k in wanted):
        raise CheckpointError(
            f"the checkpoint's weights do not fit this configuration ({len(stored)} stored, {len(wanted)} expected "
            f"under '{prefix}'); resume with the same model and LoRA rank, or choose another name"
        )
    with torch.no_grad():
        for key, p in wanted.items():
            p.copy_(shard_like(stored[key], p))


# ---- one process per run folder -------------------------------------------------------------------------------------


def claim(run: RunFolder, resume: bool) -> int:
    """Create and lock the run folder until the returned descriptor is closed or the process ends.

    Raises CheckpointError, with nothing changed, if the folder is not empty and `resume` is off, if it is not a run's
    folder, or if another process is using it.
    """
    _check_content(run, resume)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        handle = lock(run.root)
    except OSError as error:
        raise CheckpointError(f"{run.root} cannot be created or written: {error}; choose another --output") from error
    _check_content(run, resume)  # again: another run may have started in between
    for leftover in (p for folder in (run.root, run.checkpoints, run.eval, run.groups) for p in folder.glob(".*.*")):
        if re.fullmatch(r"\..+\.\d+", leftover.name):  # what a killed process was writing
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return handle


def _check_content(run: RunFolder, resume: bool) -> None:
    folder = run.root
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the run, choose another name")
    content = sorted(p.name for p in folder.iterdir() if p.name[:1] != ".") if folder.is_dir() else []
    if content and not resume:
        shown = ", ".join(content[:4]) + (" …" if len(content) > 4 else "")
        raise CheckpointError(
            f"{folder} contains another run ({shown}); nothing was changed. Resume it (--resume, or resume=True in "
            f"Python), or choose another name"
        )
    if content and not run.config.is_file():
        raise CheckpointError(f"{folder} is not a run of prefgrpo (no config.yaml in it); choose another name")


def lock(folder: Path) -> int:
    """Lock a run folder until the returned descriptor is closed or the process ends.

    Raises CheckpointError if another process holds the lock. If the file system has no locks, only prints a warning.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise CheckpointError(
            f"{folder} is in use by another process; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        print(f"{folder} cannot be locked ({error}); do not start a second run in it")
    return handle
