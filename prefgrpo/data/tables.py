"""Reads a file of prompts as rows; the file's ending gives the format.

Invariant: a row that cannot be read is not left out, but given as the reason why.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
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
NOT_UTF8 = "not valid UTF-8"
INVISIBLE = re.compile(r"^[\s\ufeff\u200b-\u200f\u2060]+|[\s\ufeff\u200b-\u200f\u2060]+$")
"""Spaces, byte-order marks and zero-width characters at the ends of a text."""

Rows = Iterator[tuple[int, dict[str, Any] | str]]
"""(line or row number, its columns, or why they cannot be read)."""


def clean(text: str) -> str:
    """A text without white space and invisible characters at its ends."""
    return INVISIBLE.sub("", text)


def column_name(name: str) -> str:
    """The name by which a column is known: 'Prompt', ' prompt ' and 'prompts' are 'prompt'."""
    plain = clean(name).lower()
    return next((known for known in (*TEXT, *SOURCE, NEGATIVE) if plain in (known, f"{known}s")), clean(name))


def rows(file: Path) -> Rows:
    """The rows of a file that are not blank. Raises DataError for an unknown ending or a file that is no such table."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: expected a file that ends in {', '.join(filter(None, READERS))}")
    for number, row in reader(file):
        yield number, row if isinstance(row, str) else {column_name(name): value for name, value in row.items()}


def _lines(file: Path) -> Iterator[tuple[int, str | None]]:
    """(number, text) of every line that is not blank, with text None if it is not UTF-8.

    Lines end at line breaks, not at Unicode separators. A byte-order mark may start any line, as after `cat a b > c`.
    """
    for number, raw in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            text = clean(raw.decode())
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
        if text is None:
            yield number, NOT_UTF8
            continue
        try:
            yield number, _object(json.loads(text))
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {error}"


def _json(file: Path) -> Rows:
    """A list of objects, or of prompts."""
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a list of prompts or of objects, got {type(content).__name__}")
    for number, item in enumerate(content, start=1):
        yield number, {"prompt": item} if isinstance(item, str) else _object(item)


def _object(value: Any) -> dict[str, Any] | str:
    """A row, or why the value is none."""
    return value if isinstance(value, dict) else f"expected an object, got {type(value).__name__}"


def _csv(file: Path) -> Rows:
    """Values separated by commas, semicolons or tabs, with a header that contains a prompt column."""
    try:
        content = file.read_bytes().decode("utf-8-sig").replace("\n\ufeff", "\n")
    except UnicodeDecodeError:
        yield from ((number, NOT_UTF8) for number, text in _lines(file) if text is None)
        return
    csv.field_size_limit(1 << 24)  # a prompt may be longer than the default of 128 KiB
    first = content.splitlines()[:1]
    names = {s: set(map(column_name, next(csv.reader(first, delimiter=s), []))) for s in ",;\t"}
    separator = next((s for s in names if names[s] & set(TEXT)), ",")
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield number, f"{error} (is a quote not closed?)"
            continue
        if not any(map(clean, cells)):
            continue
        if not header:
            header = [column_name(name) for name in cells]
            _check_header(file, header)
        elif [column_name(cell) for cell in cells] == header:
            yield number, "the header again (are two files joined?)"
        elif len(cells) > len(header):
            yield number, f"{len(cells)} cells, but {len(header)} columns; a cell with {separator!r} needs quotes"
        else:
            yield number, dict(zip(header, cells))


def _check_header(file: Path, header: list[str]) -> None:
    """Raise DataError without a prompt column, or for two columns of one name."""
    if not set(header) & set(TEXT):
        raise DataError(f"{file}: no prompt column; expected one of {', '.join(TEXT)}, got {header}")
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
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
    ".txt": _text, "": _text, ".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet,
}  # fmt: skip
"""File ending → reader."""
