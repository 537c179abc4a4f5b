"""A folder of named tensor groups in safetensors shards, which any number of processes fill and read.

A shard is named by the keys in it and appears whole or not at all, so a process that is killed loses what it had not
written and nothing else. index.json only saves reading every shard's header; what it does not know, or knows wrongly,
is read from the shards. Invariant: a key holds what was written under it, bit for bit (a checksum in the header tells),
or is not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

logger = logging.getLogger(__name__)
ENDING = ".safetensors"


class Shards:
    """The folder's content: key (without dots) → {name: tensor}."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._where: dict[str, str] = {}
        self._told: set[str] = set()
        self.scan()

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def scan(self) -> None:
        """Learn of the shards that are there now."""
        found = {f.name: f.stat().st_size for f in self.folder.glob(f"*{ENDING}")}
        gone = {name for name, size in self._sizes.items() if found.get(name) != size}
        self._where = {key: name for key, name in self._where.items() if name not in gone}
        new = {name: size for name, size in found.items() if name in gone or name not in self._sizes}
        self._sizes = found
        known = self._index() if new else {}
        for name, size in new.items():
            listed = known.get(name)
            keys = listed[1] if listed and listed[0] == size else self._keys(name)
            self._where.update(dict.fromkeys(keys, name))

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors under a key, None without it or where its shard is damaged (which is said once)."""
        if key not in self._where:
            return None
        name = self._where[key]
        try:
            with safe_open(self.folder / name, "pt") as file:
                own = [k for k in file.keys() if k.startswith(f"{key}.")]  # noqa: SIM118  (no mapping)
                found = {k.partition(".")[2]: file.get_tensor(k).clone() for k in own}
                written = (file.metadata() or {}).get(key, "")
            if not found or written not in ("", _checksum(found)):
                raise ValueError(f"it holds under {key[:8]}… what was not written there")
            return found
        except (OSError, ValueError, SafetensorError) as error:
            self._tell(name, error)
            self._where = {k: n for k, n in self._where.items() if n != name}
            return None

    def write(self, content: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add a shard; equal sets of keys make the same file, whoever writes it."""
        if not content:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()[:32] + ENDING
        part = self.folder / f".{name}.{os.getpid()}.partial"
        tensors = {f"{key}.{k}": v for key in sorted(content) for k, v in content[key].items()}
        part.write_bytes(save(tensors, {key: _checksum(content[key]) for key in sorted(content)}))
        os.replace(part, self.folder / name)
        self._sizes[name] = (self.folder / name).stat().st_size
        self._where.update(dict.fromkeys(content, name))

    def save_index(self) -> None:
        """Write index.json: shard → its bytes and keys."""
        self.scan()
        shards: dict[str, list[str]] = {}
        for key, name in sorted(self._where.items()):
            shards.setdefault(name, []).append(key)
        content = {name: {"bytes": self._sizes[name], "keys": keys} for name, keys in sorted(shards.items())}
        part = self.folder / f".index.{os.getpid()}.partial"
        part.write_text(json.dumps(content))
        os.replace(part, self.folder / "index.json")

    def _index(self) -> dict[str, tuple[int, list[str]]]:
        """Shard → its bytes and keys; empty if index.json cannot be used."""
        try:
            content = json.loads((self.folder / "index.json").read_text())
            return {name: (int(one["bytes"]), list(one["keys"])) for name, one in content.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _keys(self, name: str) -> set[str]:
        """The keys in a shard, from its header; none if it is damaged."""
        try:
            with safe_open(self.folder / name, "pt") as file:
                return {k.partition(".")[0] for k in file.keys()}  # noqa: SIM118  (no mapping)
        except (OSError, SafetensorError) as error:
            self._tell(name, error)
            return set()

    def _tell(self, name: str, error: Exception) -> None:
        if name not in self._told:
            told = "embedding cache: %s is damaged (%s); remove it, what it held is encoded again"
            logger.warning(told, self.folder / name, error)
            self._told.add(name)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes, hex."""
    value = 0
    for name, tensor in sorted(tensors.items()):
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return f"{value:08x}"
