"""A folder of encoded texts and source images: named groups of tensors in safetensors files of about 256 MB.

Any number of processes may read and write it. Files are written atomically, so a killed process loses only what it had
not yet written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prefgrpo.data.atomic import write_atomic

SHARD_BYTES = 256 * 2**20
"""A process writes a file when it holds this many bytes of new entries, and at the end."""
logger = logging.getLogger(__name__)


def nbytes(entries: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensors in entries.values() for tensor in tensors.values())


class EmbeddingCache:
    """The entries of a folder: key → tensors by name. Keys have no dots."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new: dict[str, Mapping[str, Tensor]] = {}
        """Entries that are not on disk yet."""
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    self._file_of |= {name.partition(".")[0]: path for name in file.keys()}  # noqa: SIM118  (no mapping)
            except (OSError, SafetensorError) as error:
                message = "embedding cache: %s is damaged (%s); its entries are encoded again, so it can be deleted"
                logger.warning(message, path, error)

    def __contains__(self, key: str) -> bool:
        return key in self._new or key in self._file_of

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors under a key; None if there are none."""
        if key in self._new:
            return dict(self._new[key])
        if key not in self._file_of:
            return None
        with safe_open(self._file_of[key], "pt") as file:
            names = [name for name in file.keys() if name.startswith(f"{key}.")]  # noqa: SIM118  (no mapping)
            return {name.partition(".")[2]: file.get_tensor(name).clone() for name in names}

    def add(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Add an entry, and write a file if it is full."""
        self._new[key] = tensors
        if nbytes(self._new) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all new entries; the same set of keys gives the same file name, whichever process writes it."""
        if not self._new:
            return
        path = self._folder / f"{hashlib.sha256(''.join(sorted(self._new)).encode()).hexdigest()[:32]}.safetensors"
        named = {f"{key}.{name}": tensor for key, tensors in self._new.items() for name, tensor in tensors.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(named))
        self._file_of |= dict.fromkeys(self._new, path)
        self._new = {}
