"""Checkpoints of a run, written by torch.distributed.checkpoint (DCP) while training goes on, and read on any mesh.

A checkpoint is a folder `step_NNNNNN`: `.metadata` and one `.distcp` file per process hold the trained weights, AdamW's
state, the EMA and the old policy, as plain tensors or shards; `lora` is the LoRA as diffusers loads it; `state.json`
holds the step, the number of updates and the size of every file that a run goes on from. Noise and prompt order are
functions of (seed, step), so there is no generator state to save.
Invariant: a folder with the final name is complete, because rank 0 renames it into place after every process has
written its files; it is never replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from prefgrpo.config.recipe import UserError
from prefgrpo.data.atomic import sync, temporary_path, write_folder
from prefgrpo.parallel.shard import is_sharded
from prefgrpo.parallel.world import World
from prefgrpo.run.folder import PRODUCTS, STATE, RunFolder

MOST_SECONDS = 30 * 60.0
"""A step that ends later than this after the last checkpoint is followed by one, whatever checkpoint.every is: steps of
long clips take half an hour."""
PARTIAL = "partial"
"""Ending of the hidden folder in which a checkpoint is written; every process derives the same name."""
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint or run folder that cannot be used; the message says which and what to do."""


# ---- writing --------------------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of a run. At most one is being written at a time; every rank calls every method."""

    def __init__(self, run: RunFolder, world: World, keep: int, by_time: bool = True) -> None:
        """keep: number of newest checkpoints to keep. by_time: also save every MOST_SECONDS; False if results depend
        on when a run saves, as with rollout.staleness, which generates no samples ahead across a checkpoint."""
        self.run = run
        self.keep = keep
        self.world = world
        self._group: dist.ProcessGroup | None = None
        """For the writing threads, whose messages must not mix with those of the step."""
        self._writing: tuple[Path, Future[Any]] | None = None
        """The checkpoint that is being written."""
        self.last = -1
        """Steps done in the newest checkpoint that this run has read, written or begun to write."""
        self._by_time = by_time
        self._began = time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether more than MOST_SECONDS have passed since the last save, or the start, by this process's clock."""
        return self._by_time and time.monotonic() - self._began > MOST_SECONDS

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], lora: Callable[[Path], None] | None = None
    ) -> None:
        """Copy the tensors, then write them in another thread; waits for the previous save first.

        Plain tensors must be equal on all ranks; rank 0 writes them, as DCP would plan them once for every rank. Every
        replica has all sharded ones, and writes its share of them. An existing checkpoint is left unchanged, because
        the state after a step is a function of the run and the step. lora: writes the LoRA into a folder; called once,
        on rank 0. Raises CheckpointError, on all ranks, if that or the previous save failed.
        """
        self.finished(wait=True)
        self.last = step
        self._began = time.monotonic()
        final = self.run.checkpoint(step)
        if self.world.any(self.world.main and final.exists()):
            return
        if self.world.size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self.world.patience)
        if lora is not None:
            self.world.on_main(partial(_write_lora, final, lora), CheckpointError)
        writer = _Writer(self.run, step, meta, self.keep)
        alone = self.world.size == 1
        future: Any = async_save(self._own(tensors), storage_writer=writer, process_group=self._group, no_dist=alone)
        self._writing = final, future  # a Future, as the writer copies the tensors before it returns

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, or shards of them, that this process writes; sharded ones are divided evenly among replicas."""
        loads = [0] * self.world.layout.replicate
        own = {}
        for name, tensor in tensors.items():
            mine = self.world.main
            if is_sharded(tensor):
                replica = loads.index(min(loads))
                loads[replica] += tensor.nbytes
                mine = replica == self.world.replica
            if mine:
                own[name] = tensor
        return own

    def finished(self, wait: bool = False) -> Path | None:
        """The folder of a save that has succeeded since the last call; wait: for the save in flight, if there is one.

        Raises CheckpointError, on all ranks and with the same message, if a process could not write its part.
        """
        failed = self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None
        wait = self.world.any(wait or failed)
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        path, future = self._writing
        self._writing = None
        try:
            future.result()
        except CheckpointException as error:
            if self.world.main:
                shutil.rmtree(_partial(path), ignore_errors=True)
            raise CheckpointError(f"the checkpoint {path.name} cannot be written: {_causes(error)}") from error
        return path

    def close(self) -> None:
        """Let the save in flight end, successfully or not: the process must not exit in the middle of it."""
        if self._writing is not None:
            self._writing[1].exception()


def _write_lora(final: Path, lora: Callable[[Path], None]) -> None:
    """Write the LoRA of a checkpoint. Raises CheckpointError."""
    try:
        write_folder(_partial(final) / PRODUCTS[0], lora)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(_partial(final), ignore_errors=True)
        raise CheckpointError(f"the checkpoint {final.name} cannot be written: process 0: {error}") from error


def _causes(error: CheckpointException) -> str:
    return "; ".join(
        f"process {rank}: {str(cause) or repr(cause)}" for rank, (cause, _) in sorted(error.failures.items())
    )


class _Writer(FileSystemWriter):
    """Writes a checkpoint into a hidden folder; rank 0 completes and renames it when all processes have written.

    DCP passes an exception in any of its methods to all processes.
    """

    def __init__(self, run: RunFolder, step: int, meta: dict[str, Any], keep: int) -> None:
        super().__init__(_partial(run.checkpoint(step)))
        self._run = run
        self._step = step
        self._meta = meta
        self._keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file, if there is something to write."""
        if plan.items:
            return super().write_data(plan, planner)
        nothing = torch.futures.Future[list[WriteResult]]()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write `.metadata` and state.json, rename the folder, and remove checkpoints beyond `keep`."""
        super().finish(metadata, results)
        folder = Path(self.path)
        final = self._run.checkpoint(self._step)
        sizes = {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file()}
        facts = {"step": self._step, "written": time.time(), **self._meta, "files": sizes}
        (folder / STATE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        sync(folder / STATE)
        sync(folder)
        os.replace(folder, final)
        sync(final.parent)
        for old in self._run.all_checkpoints()[: -self._keep]:
            os.replace(old, temporary_path(old))  # under this name, `claim` removes what remains of it
            shutil.rmtree(temporary_path(old), ignore_errors=True)  # on NFS, a file that another process reads remains


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.{PARTIAL}")


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: Path, tensors: dict[str, Tensor], world: World) -> dict[str, Any]:
    """Read these entries of a checkpoint in place, whatever mesh wrote it; returns its meta. Every rank calls it.

    Raises CheckpointError, on all ranks, if a file is missing or its size differs from when it was saved, or if
    the checkpoint has other names or shapes.
    """

    def check() -> dict[str, Any]:
        meta = read_meta(path)
        _check_names(path, tensors)
        return meta

    checked = world.on_main(check, CheckpointError)  # the others would ask the file system for the same sizes
    meta: dict[str, Any] = world.all_gather_object(checked)[0] or {}
    try:
        load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=world.size == 1)
    except CheckpointException as error:
        raise CheckpointError(f"{path} is damaged: {_causes(error)}; {_advice(path)}") from error
    return meta


def _check_names(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the checkpoint has all these tensors, in these shapes."""
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # what unpickling raises
        raise CheckpointError(f"{path} is damaged: .metadata: {error!r}; {_advice(path)}") from error
    wrong = [n for n, t in tensors.items() if n not in stored or getattr(stored[n], "size", None) != t.shape]
    if wrong:
        raise CheckpointError(
            f"the weights in {path} do not fit this configuration: {len(wrong)} of {len(tensors)} tensors are missing "
            f"or have another shape, the first: {wrong[0]}; resume with the same model and LoRA rank, or choose "
            "another name"
        )


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a checkpoint. Raises CheckpointError if it is not complete."""
    try:
        meta: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({STATE}: {error!r}); {_advice(path)}") from error
    for name, size in sizes.items():
        file = path / name
        length = file.stat().st_size if file.is_file() else None
        if length != size:
            has = "it is missing" if length is None else f"it has {length}"
            raise CheckpointError(f"{path} is damaged: {name} should have {size} bytes, {has}; {_advice(path)}")
    return meta


def _advice(path: Path) -> str:
    return f"remove {path} to use the one before, or {path.parent} to start again"


# ---- one process per run folder -------------------------------------------------------------------------------------


def claim(run: RunFolder, resume: bool) -> int:
    """Create and lock the run folder until the returned descriptor is closed or the process ends.

    Raises CheckpointError, with nothing changed, if the folder is not empty and `resume` is off, if it is not a run's
    folder, or if another process is using it.
    """
    _check_content(run, resume)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CheckpointError(f"{run.root} cannot be created or written: {error}; choose another --output") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise CheckpointError(
            f"{run.root} is in use by another process; wait for it, or choose another name"
        ) from error
    except OSError as error:
        print(f"{run.root} cannot be locked ({error}); do not start a second run in it")
    _check_content(run, resume)  # again: another run may have started in between
    for leftover in (p for folder in (run.root, run.checkpoints, run.eval, run.groups) for p in folder.glob(".*.*")):
        if re.fullmatch(rf"\..+\.(\d+|{PARTIAL})", leftover.name):  # what a killed process was writing
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()
    return handle


def _check_content(run: RunFolder, resume: bool) -> None:
    folder = run.root
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the run, choose another name")
    content = sorted(p.name for p in folder.iterdir() if p.name[:1] != ".") if folder.is_dir() else []
    if content and not resume:
        listed = ", ".join(content[:4]) + (" …" if len(content) > 4 else "")
        raise CheckpointError(
            f"{folder} contains another run ({listed}); nothing was changed. Resume it (--resume, or resume=True in "
            f"Python), or choose another name"
        )
    if content and not run.config.is_file():
        raise CheckpointError(f"{folder} is not a run of prefgrpo (no config.yaml in it); choose another name")
