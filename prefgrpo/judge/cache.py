"""On-disk cache of the judge's answers, so that a resumed step does not repeat requests.

Each run has one folder, with an append-only JSONL file per process; a process reads all files and writes its own.
Each line is written unbuffered as soon as its answer arrives, so a killed process loses none. Invariants: an entry
is reused only for a byte-identical question; failures are never cached; a disk error disables the cache but loses no
answer.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from prefgrpo.judge.verdict import Answer, JudgeError

MOST_BYTES = 32 << 20
"""Size limit per process (about 200 000 soft verdicts), over its current file and the previous one."""
NEWEST = 10_000
"""Number of own answers that a process keeps in memory: only a resumed run needs older ones, and it reads the files."""
_RAW_CHARACTERS = 500
"""How much of an answer's text is kept, unless the caller needs all of it."""


class AnswerCache:
    """Answers by key, in a folder. Those present at the start and the newest are also kept in memory. Thread-safe."""

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        """Read the existing files; the folder is created on the first `put`. JudgeError if it cannot be used."""
        self.folder, self.most_bytes = Path(folder), most_bytes
        self.path = self.folder / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self.old = self.path.with_suffix(".old.jsonl")
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._broken = False
        self._new: OrderedDict[str, bytes] = OrderedDict()
        try:
            self._lines = self._read()
        except OSError as error:
            raise JudgeError(f"the judge's cache {folder} cannot be used ({error}); choose another folder") from error

    def __len__(self) -> int:
        return len(self._lines) + len(self._new)

    def get(self, key: str) -> Answer | None:
        """The answer cached under `key`, or None."""
        with self._lock:
            line = self._new.get(key) or self._lines.get(key)
        if line is None:
            return None
        kept = json.loads(line)
        return Answer(kept["value"], raw=kept["raw"], parts=kept["parts"], cached=True)

    def put(self, key: str, answer: Answer, whole: bool = False) -> None:
        """Store an answer, unless it has a failure reason. whole: store its full text."""
        if answer.reason:
            return
        raw = answer.raw if whole else answer.raw[:_RAW_CHARACTERS]
        kept = {"key": key, "value": answer.value, "parts": answer.parts, "raw": raw}
        line = json.dumps(kept, separators=(",", ":")).encode()
        with self._lock:
            if key in self._lines or key in self._new or self._broken:
                return
            self._new[key] = line
            if len(self._new) > NEWEST:
                self._new.popitem(last=False)
            try:
                self._write(line)
            except OSError as error:
                self._broken = True
                warnings.warn(f"the judge's answers are no longer cached in {self.path}: {error}", stacklevel=2)

    def _read(self) -> dict[str, bytes]:
        """Lines by key from the other ranks' files (up to four times `most_bytes` in all) and from this rank's own.

        A line truncated by a killed process is skipped.
        """
        lines, size, own = {}, 0, [self.old, self.path]
        for path in [*sorted({*self.folder.glob("*.jsonl")} - {*own}), *own]:
            if path not in own and (size := size + path.stat().st_size) > 4 * self.most_bytes:
                continue
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    kept = json.loads(line)
                    if {"key", "value", "parts", "raw"} <= kept.keys():
                        lines[str(kept["key"])] = line
                except (ValueError, AttributeError):
                    continue
        return lines

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
            self._file = self.path.open("ab", buffering=0)  # unbuffered: written when `write` returns
            line = b"\n" * torn + line
        self._file.write(line + b"\n")
        if self._file.tell() > self.most_bytes // 2:
            self._file.close()
            self.path.replace(self.old)
            self._file = self.path.open("ab", buffering=0)


_open: WeakValueDictionary[str, AnswerCache] = WeakValueDictionary()


def shared_cache(folder: str) -> AnswerCache:
    """This process's cache for `folder`, shared by all its clients; reloaded once no client holds it any more."""
    if (cache := _open.get(folder)) is None:
        cache = _open[folder] = AnswerCache(folder)
    return cache
