"""Reads a file of prompts as rows; the file's ending gives the format."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefgrpo.config.recipe import UserError


class DataError(UserError, ValueError):
    """A prompts file that cannot be used; the message says what is wrong, where, and what to do."""


TEXT = ("instruction", "prompt", "prompt_en", "prompt_zh", "caption", "text")
"""Names of prompt columns, also in capitals or as a plural; the first one present in a file is used."""
SOURCE = ("source_image", "image")
"""Columns with the path of an edit's source image, or a list of paths: absolute, or relative to the file's folder or
its images/ subfolder."""
NEGATIVE = "negative_prompt"
"""Column of a prompt's own negative prompt."""
INVISIBLE = (
    "\u00ad\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
    "\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\ufeff"
)
"""Soft hyphen, byte-order mark, marks of direction and characters without width, which editors and web pages leave at
the edges of a text."""
AT_ONCE = 256
"""Rows of a parquet table, which may hold images, that are read together."""
LISTED = 10
"""Number of invalid rows whose reasons are printed; of further ones, only the row numbers."""
Rows = Iterator[tuple[int, dict[str, Any]]]
"""(line or row number, its columns)."""


def rows(file: Path) -> Rows:
    """The rows of a file that are not blank. Raises DataError for an unknown ending, or at an unreadable row."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: expected a file that ends in {', '.join(filter(None, READERS))}")
    try:
        for number, row in reader(file):
            yield number, {known_as(name): stripped(value) for name, value in row.items() if value is not None}
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{file}, line {line}: not valid UTF-8; re-save the file as UTF-8") from error


def refusal(file: Path | str, bad: Mapping[int, str]) -> str:
    """The message for invalid rows; bad: line → reason."""
    lines = sorted(bad)
    listed = [f"  line {number}: {bad[number]}" for number in lines[:LISTED]]
    others = [f"  and lines {', '.join(map(str, lines[LISTED:]))}"] if len(lines) > LISTED else []
    return "\n".join([f"{file}: {len(bad)} line(s) cannot be used; correct or remove them", *listed, *others])


def stripped(value: Any) -> Any:
    """A text without white space and INVISIBLE at its edges; anything else as it is."""
    if not isinstance(value, str):
        return value
    before = None
    while before != value:
        before = value
        value = value.strip().strip(INVISIBLE)
    return value


def known_as(name: str) -> str:
    """The name by which a column is known: 'Prompt', ' prompt ' and 'prompts' are 'prompt'."""
    name = stripped(name)
    plain = name.lower()
    return next((column for column in (*TEXT, *SOURCE, NEGATIVE) if plain in (column, f"{column}s")), name)


def _content(file: Path) -> str:
    """The text of a file, without INVISIBLE at the beginning of a line: files may have been concatenated."""
    return re.sub(f"(?m)^[{INVISIBLE}]+", "", file.read_bytes().decode())


def _text(file: Path) -> Rows:
    """One prompt per line."""
    for number, line in enumerate(_content(file).split("\n"), start=1):
        if text := stripped(line):
            yield number, {"prompt": text}


def _object(file: Path, number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{file}, line {number}: expected an object, got {type(value).__name__}")
    return value


def _jsonl(file: Path) -> Rows:
    """One JSON object per line."""
    for number, line in enumerate(_content(file).split("\n"), start=1):
        if text := stripped(line):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: not JSON: {error}") from error
            yield number, _object(file, number, value)


def _json(file: Path) -> Rows:
    """A list of objects, or of prompts."""
    text = stripped(_content(file))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a list of prompts or of objects, got {type(content).__name__}")
    for number, item in enumerate(content, start=1):
        yield number, {"prompt": item} if isinstance(item, str) else _object(file, number, item)


def _csv(file: Path) -> Rows:
    """Values separated by commas, semicolons or tabs, with a header; in a .tsv always by tabs."""
    content = _content(file)
    separator = max(",;\t", key=content.partition("\n")[0].count) if file.suffix.lower() == ".csv" else "\t"
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    try:
        header = [known_as(name).lower() for name in reader.fieldnames or ()]
        for row in reader:
            if None in row:
                advice = f"quote cells that contain {separator!r}"
                raise DataError(f"{file}, line {reader.line_num}: more cells than columns; {advice}")
            cells = [stripped(cell) for cell in row.values()]
            names = [known_as(cell or "").lower() for cell in cells]
            if names != header and sorted(names) == sorted(header):
                order = f"{', '.join(header)}, then {', '.join(names)}"
                raise DataError(f"{file}, line {reader.line_num}: a header again, in another order: {order}")
            if any(cells) and names != header:  # a repeated header: files were concatenated
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.reader.line_num}: {error} (is a quote not closed?)") from error


def _parquet(file: Path) -> Rows:
    """A table (needs pyarrow)."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs pyarrow (pip install pyarrow)") from error
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(AT_ONCE)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from ValueError
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".txt": _text, "": _text, ".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet,
}  # fmt: skip
"""File ending → reader."""
