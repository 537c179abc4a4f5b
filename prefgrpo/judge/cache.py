"""Answers kept on disk, so that a resumed step does not ask the judge again.

One folder per run, in it one append-only JSONL file per process; a process reads all of them and writes its own.
Each line is written unbuffered when its answer comes, so a process that is killed loses no answer. Invariant: an entry
answers only a question that is the same to the byte; what failed is never kept; a disk that fails costs the cache and
no answer.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from pathlib import Path
from typing import IO

from prefgrpo.judge.verdict import Answer, JudgeError

MOST_BYTES = 32 << 20
"""Largest file, about 200 000 soft verdicts; one that grows beyond is rewritten with its newer half."""
_RAW_CHARACTERS = 500
"""Of an answer's text that is kept, unless the asker needs all of it."""


class AnswerCache:
    """Answers by key, in memory and in a folder; safe to use from any thread."""

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        """Reads what is there; the folder is made when the first answer comes. JudgeError if it cannot be used."""
        self.folder, self.most_bytes = Path(folder), most_bytes
        self.path = self.folder / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._broken = False
        try:
            self._lines = self._read()
        except OSError as error:
            raise JudgeError(f"the judge's cache {folder} cannot be used ({error}); choose another folder") from error

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, key: str) -> Answer | None:
        """The answer that is kept under `key`."""
        with self._lock:
            line = self._lines.get(key)
        if line is None:
            return None
        kept = json.loads(line)
        return Answer(kept["value"], raw=kept["raw"], parts=kept["parts"], cached=True)

    def put(self, key: str, answer: Answer, whole: bool = False) -> None:
        """Keep an answer, unless something is missing from it. whole: with all of its text."""
        if answer.reason:
            return
        raw = answer.raw if whole else answer.raw[:_RAW_CHARACTERS]
        kept = {"key": key, "value": answer.value, "parts": answer.parts, "raw": raw}
        line = json.dumps(kept, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if key in self._lines or self._broken:
                return
            self._lines[key] = line
            try:
                self._write(line)
            except OSError as error:
                self._broken = True
                warnings.warn(f"answers are no longer kept in {self.path}: {error}", stacklevel=2)

    def _read(self) -> dict[str, bytes]:
        """Lines by key of all ranks' files (as many as fit into four times `most_bytes`) and of this one's.

        A line that a killed process left torn is left out.
        """
        lines, size = {}, 0
        for path in [p for p in sorted(self.folder.glob("*.jsonl")) if p != self.path] + [self.path]:
            if path != self.path and (size := size + path.stat().st_size) > 4 * self.most_bytes:
                continue
            for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
                try:
                    kept = json.loads(line)
                    if line.endswith(b"\n") and {"key", "value", "parts", "raw"} <= kept.keys():
                        lines[str(kept["key"])] = line
                except (ValueError, AttributeError):
                    continue
        return lines

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._rewrite(self.most_bytes)  # without a torn line
            self._file = self.path.open("ab", buffering=0)  # unbuffered: written when `write` returns
        self._file.write(line)
        if self._file.tell() > self.most_bytes:
            self._file.close()
            self._rewrite(self.most_bytes // 2)
            self._lines = self._read()
            self._file = self.path.open("ab", buffering=0)

    def _rewrite(self, most_bytes: int) -> None:
        """Leave the newest whole lines of the file, as many as fit into `most_bytes`."""
        kept, size = [], 0
        for line in reversed(self.path.read_bytes().splitlines(keepends=True)):
            size += len(line)
            if size > most_bytes:
                break
            kept += [line] if line.endswith(b"\n") else []
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(b"".join(reversed(kept)))
        fresh.replace(self.path)


@functools.cache
def shared_cache(folder: str) -> AnswerCache:
    """This process's cache in `folder`, one for all its clients."""
    return AnswerCache(folder)
