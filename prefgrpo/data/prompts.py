"""Prompts: read from a file, divided into training and evaluation, and selected for each training step.

Edits have source images; (prompt, sources) is one group. Invariant: the prompts of step k depend only on (seed, k),
whatever the world size, also after a resume.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from prefgrpo.config.schema import Config
from prefgrpo.data.media import UNREADABLE, rgb
from prefgrpo.data.tables import NEGATIVE, SOURCE, TEXT, DataError, rows

__all__ = ["DataError", "Prompt", "fingerprint", "prompt_sets", "read_prompts", "step_prompts"]

FEWEST_TO_SPLIT = 20
FEWEST_HELD_OUT = 32
"""With a margin above `run.comparison.MIN_PROMPTS`, below which no result is conclusive."""
MOST_HELD_OUT = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt; its position in the file is its group id."""

    id: int
    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    source: tuple[str, ...] = ()
    """Paths of the source images (editing)."""
    line: int = 0
    """Line (or row) number in the file."""

    def __str__(self) -> str:
        return f"line {self.line}, {self.text[:60]!r}"

    @property
    def negative(self) -> str | None:
        """Its own negative prompt, from the column `negative_prompt`; None without one."""
        value = self.meta.get(NEGATIVE)
        return (value.strip() or None) if isinstance(value, str) else None

    def images(self) -> tuple[Image.Image, ...]:
        """The source images as RGB, in order. Raises DataError for a file that is not an image."""
        return tuple(read_source(path) for path in self.source)


def read_source(path: str) -> Image.Image:
    """An image file as RGB. Raises DataError if it is none."""
    try:
        with Image.open(path) as image:
            return rgb(image)
    except UNREADABLE as error:
        raise DataError(f"source image {path} cannot be read: {error}") from error


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hex digest of texts (with negative ones) and contents of sources in order; with the seed, it determines the
    prompts of every step."""
    sources = {path: file_digest(path) for path in dict.fromkeys(path for p in prompts for path in p.source)}
    rows = ((p.text, *([sources[path] for path in p.source] or [""]), *filter(None, [p.negative])) for p in prompts)
    content = "".join("\0".join(row) + "\n" for row in rows)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def file_digest(path: str | Path) -> str:
    """Hex digest of a file's size and content; of more than 256 KiB, of 16 parts of 16 KiB, evenly spaced."""
    size = Path(path).stat().st_size
    parts = 16 if size > 2**18 else 1
    found = hashlib.sha256(str(size).encode())
    with Path(path).open("rb") as file:
        for k in range(parts):
            file.seek((size - 2**14) * k // max(parts - 1, 1) if parts > 1 else 0)
            found.update(file.read(2**14 if parts > 1 else size))
    return found.hexdigest()


def read_prompts(path: str | Path, *, unique: bool = True, decode: bool = True) -> list[Prompt]:
    """Prompts of a file, one per line or row, skipping blank lines; `unique` keeps only the first of equal prompts, and
    warns of the others if their columns differ.

    decode: read every source image, to find what is none. Raises DataError for a missing, unreadable or empty file, or
    one that lists all lines without a prompt, or with a source image that is missing or not an image.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"prompts file not found: {file}; expected a txt, csv, tsv, json, jsonl or parquet file")
    prompts: dict[Any, Prompt] = {}
    bad: dict[int, str] = {}
    repeated: list[str] = []
    for number, row in rows(file):
        try:
            text, sources, meta = _parse(row, file.parent)
        except ValueError as error:
            bad[number] = str(error)
            continue
        group = (text, sources) if unique else number
        first = prompts.setdefault(group, Prompt(len(prompts), text, meta, sources, number))
        if first.meta != meta:
            repeated.append(str(number))
    bad |= _unreadable_sources(prompts.values()) if decode else {}
    if bad := dict(sorted(bad.items())):
        listed = [f"  line {number}: {reason}" for number, reason in bad.items()]
        lines = "\n".join(listed[:10]) + "\n  …" * (len(listed) > 10)
        raise DataError(f"{file}: {len(bad)} line(s) cannot be used; correct or remove them\n{lines}")
    if not prompts:
        raise DataError(f"{file} contains no prompt, only blank lines; expected one prompt per line")
    if repeated:
        lines = ", ".join(repeated[:5]) + ", …" * (len(repeated) > 5)
        warnings.warn(f"{file}: left out lines with an earlier prompt but other columns: {lines}", stacklevel=2)
    return list(prompts.values())


def _parse(row: dict[str, Any], folder: Path) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """(prompt, source files, other columns) of a row. Raises ValueError for an invalid row."""
    column = next((c for c in TEXT if isinstance(row.get(c), str) and row[c]), None)
    if column is None:
        raise ValueError(f"no prompt (expected one of the columns {', '.join(TEXT)}, got {', '.join(row)})")
    text = row[column]
    if "\0" in text:
        raise ValueError("the prompt contains a NUL character; remove it")
    if not isinstance(row.get(NEGATIVE, ""), str):
        raise ValueError(f"{NEGATIVE}: expected text, got {row[NEGATIVE]!r:.60}")
    named = {c: _sources(c, row[c], folder) for c in SOURCE if c in row}
    source = next((c for c, files in named.items() if files), "")
    meta = {name: value for name, value in row.items() if name not in (column, source)}
    return text, named.get(source, ()), meta


def _sources(column: str, value: Any, folder: Path) -> tuple[str, ...]:
    """The files that a column names; none if it holds something else. Raises ValueError if they do not exist."""
    names = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(name, str) and name for name in names):
        if column == SOURCE[0] or isinstance(value, list):
            raise ValueError(f"{column}: expected a path or a list of paths, got {str(value)[:60]}")
        return ()
    places = {name: [p for p in (folder / name, folder / "images" / name) if p.is_file()] for name in names}
    if absent := [name for name, files in places.items() if not files]:
        raise ValueError(f"source image not found: {', '.join(absent)}")
    return tuple(str(places[name][0]) for name in names)


def _unreadable_sources(prompts: Iterable[Prompt]) -> dict[int, str]:
    """Line → problem for source files that are not images; each file is read once."""
    lines = {path: p.line for p in reversed(list(prompts)) for path in p.source}
    with ThreadPoolExecutor() as pool:
        problems = pool.map(_decode_error, lines)
        return {n: f"source image {path}: {why}" for (path, n), why in zip(lines.items(), problems, strict=True) if why}


def _decode_error(path: str) -> str:
    """Why an image file cannot be decoded completely; empty if it can."""
    try:
        with Image.open(path) as image:
            image.draft("L", (1, 1))  # decodes a JPEG at the smallest scale, which is enough for the check
            image.load()
    except UNREADABLE as error:
        return str(error) or type(error).__name__
    return ""


def prompt_sets(config: Config, decode: bool = True) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(training prompts, evaluation set (dev, test) → prompts). `decode`, and DataError, as of `read_prompts`.

    Without evaluation files, dev is a share of data.prompts that is never trained on. It depends only on the seed and
    the file, so all ranks, a resumed run and `prefgrpo preprocess` agree.
    """
    prompts = read_prompts(config.data.prompts, decode=decode)
    e = config.eval
    files = {name: file for name, file in (("dev", e.file), ("test", e.final_prompts)) if file}
    share = 0.0 if isinstance(e.prompts, str) else e.prompts
    count = max(round(share * len(prompts)), min(FEWEST_HELD_OUT, len(prompts) // 4)) if share else 0
    count = min(count, e.max_prompts or MOST_HELD_OUT)
    if files or not (e.every and count) or len(prompts) < FEWEST_TO_SPLIT:
        return prompts, {name: read_prompts(file, decode=decode) for name, file in files.items()}
    generator = torch.Generator().manual_seed((config.seed * 1_000_003 - 1) % 2**63)  # −1: epochs count from 0
    held = set(torch.randperm(len(prompts), generator=generator)[:count].tolist())
    return [p for k, p in enumerate(prompts) if k not in held], {"dev": [prompts[k] for k in sorted(held)]}


def step_prompts(total: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of training step `step`: consecutive slices of one seeded permutation per epoch."""
    indices: list[int] = []
    position = step * per_step
    while len(indices) < per_step:
        epoch, start = divmod(position + len(indices), total)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(total, generator=generator)
        indices += order[start : start + per_step - len(indices)].tolist()
    return indices
