"""Reads prompts files and selects the prompts of each training step.

The file extension gives the format: .txt, .csv, .tsv, .jsonl, .parquet. Edits have source images; (prompt, sources) is
one group. Invariant: the prompts of step k depend only on (seed, k), whatever the world size, also after a resume.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from prefgrpo.config.recipe import UserError
from prefgrpo.config.schema import Config
from prefgrpo.data.media import UNREADABLE, rgb

TEXT = ("instruction", "prompt", "prompt_en", "prompt_zh", "caption", "text")
"""Names of prompt columns; the first one present in a file is used."""
SOURCE = ("source_image", "image")
"""Columns with the path of an edit's source image, or a list of paths: absolute, or relative to the file's folder or
its images/ subfolder."""


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

    def size(self) -> tuple[int, int] | None:
        """(height, width) from the columns of these names; None without them. Raises DataError for invalid values."""
        values = [str(self.meta.get(key) or "") for key in ("height", "width")]
        if not any(values):
            return None
        if not all(value.isdecimal() and int(value) for value in values):
            raise DataError(f"{self}: expected whole numbers above 0 for both height and width, got {values}")
        return int(values[0]), int(values[1])

    def images(self) -> tuple[Image.Image, ...]:
        """The source images as RGB, in order. Raises DataError for a file that is not an image."""
        return tuple(_open(path) for path in self.source)


def _open(path: str) -> Image.Image:
    """An image file as RGB."""
    try:
        with Image.open(path) as image:
            return rgb(image)
    except UNREADABLE as error:
        raise DataError(f"source image {path} cannot be read: {error}") from error


def _decode_error(path: str) -> str:
    """Why an image file cannot be decoded completely; empty if it can."""
    try:
        with Image.open(path) as image:
            image.draft("L", (1, 1))  # decodes a JPEG at the smallest scale, which is enough for the check
            image.load()
    except UNREADABLE as error:
        return str(error) or type(error).__name__
    return ""


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hex digest of texts and sources in order; with the seed, it determines the prompts of every step."""
    rows = "".join("\0".join((p.text, *(p.source or ("",)))) + "\n" for p in prompts)
    return hashlib.sha256(rows.encode("utf-8", "surrogatepass")).hexdigest()


class DataError(UserError, ValueError):
    """A prompts file that cannot be used; the message says what is wrong, where, and what to do."""


def read_prompts(path: str | Path, *, unique: bool = True) -> list[Prompt]:
    """Prompts of a file, one per line or row, skipping blank lines; `unique` keeps only the first of equal prompts, and
    warns of the others if their columns differ.

    Raises DataError for a missing or empty file, or one that lists all invalid lines with their numbers: no prompt,
    or a source image that is missing or not an image.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"prompts file not found: {file}; expected a txt, csv, tsv, jsonl or parquet file")
    if file.suffix.lower() not in READERS:
        raise DataError(f"{file}: expected a file that ends in {', '.join(filter(None, READERS))}")
    prompts: dict[Any, Prompt] = {}
    bad: dict[int, str] = {}
    repeated = list[str]()
    for number, row in READERS[file.suffix.lower()](file):
        try:
            text, sources, meta = _parse_row(row, file.parent)
        except ValueError as error:
            bad[number] = str(error)
        else:
            key = (text, sources) if unique else number
            first = prompts.setdefault(key, Prompt(len(prompts), text, meta, sources, number))
            repeated += [] if first.meta == meta else [str(number)]
    _raise_if_invalid(file, bad | _unreadable_sources(prompts.values()))
    if not prompts:
        raise DataError(f"{file} contains no prompt, only blank lines; expected one prompt per line")
    if repeated:
        lines = ", ".join(repeated[:5]) + ", …" * (len(repeated) > 5)
        warnings.warn(f"{file}: left out lines with an earlier prompt but other columns: {lines}", stacklevel=2)
    return list(prompts.values())


def _parse_row(row: dict[str, Any] | str, folder: Path) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """(prompt, source files, other columns) of a row. Raises ValueError for an invalid row."""
    if isinstance(row, str):
        raise ValueError(row)
    text = next((k for k in TEXT if isinstance(row.get(k), str) and row[k].strip()), None)
    if text is None:
        raise ValueError(f"no prompt (expected one of {', '.join(TEXT)})")
    if not row[text].isascii():
        row[text].encode()  # a lone surrogate raises a ValueError
    source = next((k for k in SOURCE if _is_source(k, row.get(k))), None)
    named = [] if source is None else [row[source]] if isinstance(row[source], str) else row[source]
    places = {name: _find_source(folder, name) for name in named}
    if absent := [name for name, place in places.items() if not place]:
        raise ValueError(f"source image not found: {', '.join(absent)}")
    return row[text].strip(), tuple(places[n] for n in named), {k: v for k, v in row.items() if k not in (text, source)}


def _is_source(key: str, value: Any) -> bool:
    """Whether a column's value is a path or a list of paths. Raises ValueError if it should be one but is not."""
    several = value if isinstance(value, list) else [value] if value else []
    if all(isinstance(one, str) and one for one in several):
        return bool(several)
    if key == SOURCE[0] or isinstance(value, list):
        raise ValueError(f"{key}: expected a path or a list of paths, got {str(value)[:60]}")
    return False


def _find_source(folder: Path, source: str) -> str:
    """The path of a source file; empty if it does not exist."""
    return next((str(p) for p in (folder / source, folder / "images" / source) if p.is_file()), "")


def _unreadable_sources(prompts: Iterable[Prompt]) -> dict[int, str]:
    """Line → problem for source files that are not images; each file is read once."""
    lines = {path: p.line for p in reversed(list(prompts)) for path in p.source}
    with ThreadPoolExecutor() as pool:
        problems = pool.map(_decode_error, lines)
        return {n: f"source image {path}: {why}" for (path, n), why in zip(lines.items(), problems, strict=True) if why}


def _raise_if_invalid(file: Path, bad: dict[int, str]) -> None:
    """Raise DataError if any lines are invalid."""
    if not bad:
        return
    numbers = sorted(bad)
    if set(bad.values()) == {NOT_UTF8}:
        shown = ", ".join(map(str, numbers[:10])) + (" …" if len(bad) > 10 else "")
        raise DataError(f"{file}: {len(bad)} line(s) are not valid UTF-8 (line {shown}); re-save the file as UTF-8")
    shown = "\n".join(f"  line {n}: {bad[n]}" for n in numbers[:10]) + ("\n  …" if len(bad) > 10 else "")
    raise DataError(f"{file}: {len(bad)} line(s) cannot be used; correct or remove them\n{shown}")


NOT_UTF8 = "not valid UTF-8"


Rows = Iterator[tuple[int, dict[str, Any] | str]]
"""(line or row number, its columns, or why they cannot be read)."""


def _lines(file: Path) -> Iterator[tuple[int, str | None]]:
    """(number, text) of every non-blank line, with text None if it is not UTF-8; lines end at line breaks, not at
    Unicode separators."""
    for number, raw in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            yield number, None
        else:
            if text:
                yield number, text


def _text(file: Path) -> Rows:
    """One prompt per line."""
    for number, text in _lines(file):
        yield number, NOT_UTF8 if text is None else {"prompt": text}


def _jsonl(file: Path) -> Rows:
    """One JSON object per line."""
    for number, text in _lines(file):
        try:
            row = NOT_UTF8 if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {error}"
        else:
            known = text is None or isinstance(row, dict)
            yield number, row if known else f"expected an object, got {type(row).__name__}"


def _csv(file: Path) -> Rows:
    """Values separated by commas, semicolons or tabs, with a header that contains a prompt column."""
    try:
        content = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        yield from ((number, NOT_UTF8) for number, text in _lines(file) if text is None)
        return
    csv.field_size_limit(1 << 24)  # a prompt may be longer than the default of 128 KiB
    first = content.splitlines()[:1]
    separator = next((s for s in ",;\t" if set(next(csv.reader(first, delimiter=s), ())) & set(TEXT)), ",")
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield number, f"{error} (is a quote not closed?)"
            continue
        if header is None:
            header = cells
        elif len(cells) > len(header):
            yield number, f"{len(cells)} cells, but {len(header)} columns; a cell with {separator!r} needs quotes"
        elif any(cells):
            yield number, dict(zip(header, cells))
    if not set(header or ()) & set(TEXT):
        raise DataError(f"{file}: no prompt column; expected one of {', '.join(TEXT)}, got {header}")
    if twice := sorted({name for name in header or () if name and (header or []).count(name) > 1}):
        raise DataError(f"{file}: column {', '.join(twice)} appears twice; give each column its own name")


def _parquet(file: Path) -> Rows:
    """A table with a prompt column (needs pyarrow)."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs pyarrow (pip install pyarrow)") from error
    try:
        yield from enumerate(pyarrow.parquet.read_table(file).to_pylist(), start=1)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from ValueError
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".txt": _text, "": _text, ".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet,
}  # fmt: skip
"""File extension → reader."""


FEWEST_TO_SPLIT, MOST_HELD_OUT = 20, 64


def prompt_sets(config: Config) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(training prompts, evaluation set (dev, test) → prompts). Raises DataError like `read_prompts`.

    Without evaluation files, dev is a share of data.prompts that is never trained on. It depends only on the seed and
    the file, so all ranks, a resumed run and `prefgrpo preprocess` agree.
    """
    prompts, e = read_prompts(config.data.prompts), config.eval
    files = {name: file for name, file in (("dev", e.prompts), ("test", e.final_prompts)) if file}
    count = min(round(e.holdout * len(prompts)), e.max_prompts or MOST_HELD_OUT)
    if files or not (e.every and count) or len(prompts) < FEWEST_TO_SPLIT:
        return prompts, {name: read_prompts(file) for name, file in files.items()}
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
