"""A folder of encoded texts and source images: named groups of tensors in safetensors files.

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

logger = logging.getLogger(__name__)


class Shards:
    """The entries of a folder: key → tensors by name. Keys have no dots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = {}
        self._opened: set[str] = set()
        self.scan()

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def scan(self) -> None:
        """Read the keys of files that are new."""
        for name in sorted({file.name for file in self.folder.glob("*.safetensors")} - self._opened):
            self._opened.add(name)
            try:
                with safe_open(self.folder / name, "pt") as file:
                    self._file_of.update({key.partition(".")[0]: name for key in file.keys()})  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                message = "embedding cache: %s is damaged (%s); its entries are encoded again, so it can be deleted"
                logger.warning(message, self.folder / name, error)

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors under a key; None if there are none."""
        if key not in self._file_of:
            self.scan()  # another process may have written it
        name = self._file_of.get(key)
        if name is None:
            return None
        with safe_open(self.folder / name, "pt") as file:
            names = [k for k in file.keys() if k.startswith(f"{key}.")]  # noqa: SIM118  (no mapping)
            return {k.partition(".")[2]: file.get_tensor(k).clone() for k in names}

    def write(self, content: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add a file; the same set of keys gives the same file name, whichever process writes it."""
        if not content:
            return
        name = hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()[:32] + ".safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / name, save({f"{key}.{k}": v for key in content for k, v in content[key].items()}))
        self._opened.add(name)
        self._file_of.update(dict.fromkeys(content, name))
