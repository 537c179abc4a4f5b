"""Answers kept on disk, so that a resumed step does not ask the judge again.

One folder per run, in it one append-only JSONL file per process; a process reads all of them and writes its own. A
line is handed to the system whole when its answer comes, so a process that is killed loses nothing that it had.
Invariant: an entry is found only by a question that is the same to the byte; what failed is never kept; a disk that
fails costs the cache and no answer.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from prefgrpo.judge.verdict import Answer, JudgeError

MOST_BYTES = 32 << 20
"""Largest file, about 200 000 soft verdicts; one that grows beyond is rewritten with its newer half."""
_RAW_CHARACTERS = 500


class AnswerCache:
    """Answers by key, in memory and in a folder; safe to use from any thread."""

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        """Reads what is there; the folder is made when the first answer comes. JudgeError if it cannot be used."""
        self.folder, self.most_bytes = Path(folder), most_bytes
        self._lock = threading.Lock()
        self._others: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._file: IO[bytes] | None = None
        self._broken = False
        try:
            for path in self._readable():
                self._others.update(_entries(path.read_bytes()))
            if self.path.exists():
                self._own = _entries(self.path.read_bytes())
                self._file = self._rewritten()
        except OSError as error:
            raise JudgeError(f"the judge's cache {folder} cannot be used ({error}); choose another folder") from error

    @property
    def path(self) -> Path:
        """This process's file."""
        return self.folder / f"rank{os.environ.get('RANK', '0')}.jsonl"

    def _readable(self) -> list[Path]:
        """Files of other processes, as many as fit into four times `most_bytes`: they serve a resume on other ranks."""
        chosen, size = [], 0
        for path in sorted(self.folder.glob("*.jsonl")):
            if path != self.path and size + path.stat().st_size <= 4 * self.most_bytes:
                size += path.stat().st_size
                chosen.append(path)
        return chosen

    def __len__(self) -> int:
        return len(self._own.keys() | self._others.keys())

    def get(self, key: str) -> Answer | None:
        """The answer that is kept under `key`."""
        with self._lock:
            line = self._own.get(key) or self._others.get(key)
        if line is None:
            return None
        kept = json.loads(line)
        return Answer(kept["value"], raw=kept["raw"], parts=kept["parts"], cached=True)

    def put(self, key: str, answer: Answer) -> None:
        """Keep an answer, unless something is missing from it."""
        if answer.reason:
            return
        kept = {"key": key, "value": answer.value, "parts": answer.parts, "raw": answer.raw[:_RAW_CHARACTERS]}
        line = json.dumps(kept, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if key in self._own or self._broken:
                return
            self._own[key] = line
            try:
                self._write(line)
            except OSError as error:
                self._broken = True
                warnings.warn(f"answers are no longer kept in {self.path}: {error}", stacklevel=2)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._appended()
        self._file.write(line)
        if self._file.tell() > self.most_bytes:
            self._file.close()
            self._file = self._rewritten()

    def _appended(self) -> IO[bytes]:
        return self.path.open("ab", buffering=0)  # unbuffered: a line is in the system's hands when `write` returns

    def _rewritten(self) -> IO[bytes]:
        """The file with whole lines only, and, if it is too large, the newer half of them; open to append."""
        if sum(map(len, self._own.values())) > self.most_bytes:
            kept, size = [], 0
            for key, line in reversed(self._own.items()):
                size += len(line)
                if size > self.most_bytes // 2:
                    break
                kept.append((key, line))
            self._own = dict(reversed(kept))
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(b"".join(self._own.values()))
        fresh.replace(self.path)
        return self._appended()


def _entries(content: bytes) -> dict[str, bytes]:
    """Whole lines by key; a torn line, as a killed process leaves it, is left out."""
    found = {}
    for line in content.splitlines(keepends=True):
        try:
            kept = json.loads(line)
            if line.endswith(b"\n") and {"key", "value", "parts", "raw"} <= kept.keys():
                found[str(kept["key"])] = line
        except (ValueError, AttributeError):
            continue
    return found


_caches: WeakValueDictionary[tuple[int, Path], AnswerCache] = WeakValueDictionary()
_lock = threading.Lock()


def shared_cache(folder: str) -> AnswerCache:
    """This process's cache in `folder`, one for all its clients."""
    key = (os.getpid(), Path(folder).resolve())
    with _lock:
        found = _caches.get(key)
        if found is None:
            found = _caches[key] = AnswerCache(folder)
        return found
