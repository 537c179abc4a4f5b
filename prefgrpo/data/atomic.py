"""Atomic writes: everything is written under a hidden temporary name in the same folder, then renamed.

Invariant: under its final name, a file or folder is either the old one or the complete new one, even after a crash.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; text is written as UTF-8."""
    temporary = temporary_path(path)
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(temporary)
    os.replace(temporary, path)


def save_images(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays (npz, no pickle) atomically; uncompressed, because zlib is slow and saves little of noisy pixels."""
    temporary = temporary_path(path)
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(temporary, path)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Write a folder atomically: `write` fills a hidden folder next to it, which is renamed to `final`, replacing an
    existing one, after everything in it is on disk."""
    temporary = temporary_path(final)
    old = temporary_path(final.with_name(f"{final.name}.old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    mode = temporary.stat().st_mode & 0o666  # by the umask; safetensors 0.8 writes files readable only by the owner
    for path in (*temporary.rglob("*"), temporary):
        if path.is_file():
            path.chmod(mode)
        sync(path)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def temporary_path(path: Path) -> Path:
    """Temporary name under which this process writes `path`; in run folders, `checkpoint.claim` removes what killed
    processes left.

    The host is part of the name because in containers the processes of all machines have the same few ids.
    """
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
