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
from prefgrpo.data.stored import StoredMedia, file_digest
from prefgrpo.data.tables import NEGATIVE, SOURCE, TEXT, DataError, refusal, rows

__all__ = ["DataError", "Prompt", "fingerprint", "prompt_sets", "read_prompts", "step_prompts"]

FEWEST_TO_SPLIT = 20
FEWEST_HELD_OUT = 32
"""With a margin above `run.measures.MIN_PROMPTS`, below which no result is conclusive."""
MOST_HELD_OUT = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt; its position in the file is its group id."""

    id: int
    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    source: tuple[str | StoredMedia, ...] = ()
    """Paths of the source images (editing), or their locations in a table of pairs or in a run."""
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


def read_source(path: str | StoredMedia) -> Image.Image:
    """An image file as RGB. Raises DataError if it is not an image."""
    try:
        return place_of(path).image()
    except DataError as error:
        raise DataError(f"source image {error}") from error


def place_of(source: str | StoredMedia) -> StoredMedia:
    """Location of a source image."""
    return StoredMedia(source) if isinstance(source, str) else source


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hex digest of texts (with negative ones) and contents of sources in order; with the seed, it determines the
    prompts of every step."""
    places = {path: place_of(path) for p in prompts for path in p.source}
    files = {file: file_digest(file) for file in dict.fromkeys(place.file for place in places.values())}
    sources = {path: "\0".join(map(str, (files[place.file], *place.part))) for path, place in places.items()}
    rows = ((p.text, *([sources[path] for path in p.source] or [""]), *filter(None, [p.negative])) for p in prompts)
    content = "".join("\0".join(row) + "\n" for row in rows)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def read_prompts(path: str | Path, *, unique: bool = True, decode: bool = True) -> list[Prompt]:
    """Prompts of a file, one per line or row, skipping blank lines; `unique` keeps only the first of equal prompts, and
    warns of the others if their columns differ.

    decode: read every source image, to find broken ones. Raises DataError for a missing, unreadable or empty file, or
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
            text, sources, meta = parse(row, file.parent)
        except ValueError as error:
            bad[number] = str(error)
            continue
        group = (text, sources) if unique else number
        first = prompts.setdefault(group, Prompt(len(prompts), text, meta, sources, number))
        if first.meta != meta:
            repeated.append(str(number))
    bad |= _unreadable_sources(prompts.values()) if decode else {}
    if bad:
        raise DataError(refusal(file, bad))
    if not prompts:
        raise DataError(f"{file} contains no prompt, only blank lines; expected one prompt per line")
    if repeated:
        lines = ", ".join(repeated[:5]) + ", …" * (len(repeated) > 5)
        warnings.warn(f"{file}: left out lines with an earlier prompt but other columns: {lines}", stacklevel=2)
    return list(prompts.values())


def parse(row: dict[str, Any], folder: Path) -> tuple[str, tuple[str | StoredMedia, ...], dict[str, Any]]:
    """(prompt, source images, other columns) of a row. Raises ValueError for an invalid row."""
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


def _sources(column: str, value: Any, folder: Path) -> tuple[str | StoredMedia, ...]:
    """The images that a column names; none if it holds something else. Raises ValueError if they do not exist."""
    names = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(name, (str, StoredMedia)) and name for name in names):
        if column == SOURCE[0] or isinstance(value, list):
            raise ValueError(f"{column}: expected a path or a list of paths, got {str(value)[:60]}")
        return ()
    places = [existing(name, folder) if isinstance(name, str) else name for name in names]
    if absent := [name for name, place in zip(names, places, strict=True) if place is None]:
        raise ValueError(f"source image not found: {', '.join(absent)}")
    return tuple(place for place in places if place is not None)


def existing(name: str, folder: Path) -> str | None:
    """The file of this path, absolute or relative to the folder or its images/ subfolder; None if there is none."""
    return next((str(path) for path in (folder / name, folder / "images" / name) if path.is_file()), None)


def _unreadable_sources(prompts: Iterable[Prompt]) -> dict[int, str]:
    """Line → problem for source files that are not images; each file is read once."""
    lines = {path: p.line for p in reversed(list(prompts)) for path in p.source}
    with ThreadPoolExecutor() as pool:
        problems = pool.map(_decode_error, lines)
        return {n: f"source image {why}" for (path, n), why in zip(lines.items(), problems, strict=True) if why}


def _decode_error(path: str | StoredMedia) -> str:
    """Why an image file cannot be decoded completely; empty if it can."""
    try:
        place_of(path).shape(decode=True)
    except DataError as error:
        return str(error)
    return ""


def prompt_sets(config: Config, decode: bool = True) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(training prompts, evaluation set (dev, test) → prompts). `decode`, and DataError, as of `read_prompts`.

    Without evaluation files, dev is a share of data.prompts that is never trained on. It depends only on the seed and
    the file, so all ranks, a resumed run and `prefgrpo preprocess` agree.
    """
    prompts = read_prompts(config.data.prompts, decode=decode)
    sets = prompt_files(config, decode)
    held = held_out(config, len(prompts))
    if not held:
        return prompts, sets
    return [p for k, p in enumerate(prompts) if k not in held], {"dev": [prompts[k] for k in sorted(held)]}


def prompt_files(config: Config, decode: bool = True) -> dict[str, list[Prompt]]:
    """Prompts of the evaluation sets that are files."""
    files = {"dev": config.eval.file, "test": config.eval.final_prompts}
    return {name: read_prompts(file, decode=decode) for name, file in files.items() if file}


def held_out(config: Config, total: int) -> set[int]:
    """Which of `total` prompts are held out (`eval.prompts`), by their positions."""
    e = config.eval
    share = 0.0 if isinstance(e.prompts, str) else e.prompts
    count = max(round(share * total), min(FEWEST_HELD_OUT, total // 4)) if share else 0
    count = min(count, e.max_prompts or MOST_HELD_OUT)
    if e.file or e.final_prompts or not e.every or total < FEWEST_TO_SPLIT:
        return set()
    generator = torch.Generator().manual_seed((config.seed * 1_000_003 - 1) % 2**63)  # −1: epochs count from 0
    return set(torch.randperm(total, generator=generator)[:count].tolist())


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
