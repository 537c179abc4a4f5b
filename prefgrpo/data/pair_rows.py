"""One row of a table of preferences → its images or clips and who beats whom, by the names of its columns.

Columns of ours, of `prefgrpo judge check --pairs`, and of the published tables Pick-a-Pic (v1, v2) and HPD (v2, v3), as
their data cards and loaders name them: yuvalkirstain/pickapic_v2, ymhao/HPDv2, MizzenAI/HPDv3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.prompts import existing
from prefgrpo.data.stored import StoredMedia
from prefgrpo.data.tables import Rows, rows

Row = dict[str, Any]
Floats = NDArray[np.float64]
CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Value of the column `choice` → probability that image_a beats image_b."""
LISTS = ("samples", "image_path", "file_path", "image")
"""Columns with the images or clips of a group; `images` is read as `image` (`tables`)."""
PROBABILITY = "probability"
"""Optional column: probability that the first image of a pair beats the second one."""
WEIGHT = "weight"


class Unjudged(ValueError):
    """A row that states that nobody judged it."""


@dataclass(frozen=True, eq=False)
class Verdicts:
    """What a row says; the fields are those of `PairGroup`."""

    samples: tuple[StoredMedia, ...]
    wins: Floats
    counts: Floats
    weight: float


def verdicts_of(row: Row, folder: Path) -> tuple[Verdicts, Row]:
    """(the verdicts of a row, its other columns). Raises ValueError for a row that cannot be used, Unjudged for one
    that nobody judged."""
    rest = dict(row)
    columns = next((columns for columns in READERS if all(name in row for name in columns)), None)
    lists = next((name for name in LISTS if name in row and not isinstance(row[name], str)), None)
    verdicts = next((name for name in MATRICES if name in row), None)
    if columns is not None:
        values = [rest.pop(name) for name in columns]
        names = values[:2]
        wins = _pair(READERS[columns](rest, values))
        counts = np.where(np.isnan(wins), 0.0, 1.0)
    elif lists is not None and verdicts is not None:
        names = rest.pop(lists)
        if not isinstance(names, (list, tuple)) or len(names) < 2:
            raise ValueError(f"{lists}: expected a list of at least two images or clips, got {names!r:.60}")
        wins, counts = MATRICES[verdicts](rest, rest.pop(verdicts), len(names))
    else:
        expected = "; ".join([*(", ".join(columns) for columns in READERS), f"samples with {' or '.join(MATRICES)}"])
        raise ValueError(f"no pair: expected the columns {expected}; got {', '.join(row)}")
    weight = _number(WEIGHT, rest.pop(WEIGHT, 1.0))
    if not 0 < weight < math.inf:
        raise ValueError(f"{WEIGHT}: expected a number above 0, got {weight:g}")
    return Verdicts(tuple(place(name, folder) for name in names), wins, counts, weight), rest


def media_rows(file: Path) -> Rows:
    """The rows of a table, with StoredMedia in place of the images inside a parquet table."""
    for number, row in rows(file):
        if file.suffix.lower() == ".parquet":
            row = {name: _embedded(value, str(file), name, number - 1) for name, value in row.items()}
        yield number, row


def _embedded(value: Any, file: str, column: str, row: int, *within: int) -> Any:
    """A cell of a parquet table with StoredMedia in place of bytes, and of structs {bytes, path} as Hugging Face's
    `datasets` writes images."""
    if isinstance(value, list):
        return [_embedded(item, file, column, row, *within, k) for k, item in enumerate(value)]
    if isinstance(value, dict) and "bytes" in value:
        value = value.get("path") if value["bytes"] is None else value["bytes"]
    return StoredMedia(file, (column, row, *within)) if isinstance(value, bytes) else value


def place(name: Any, folder: Path) -> StoredMedia:
    """Location of an image or clip. Raises ValueError if it names no file."""
    if isinstance(name, StoredMedia):
        return name
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"expected the path of an image or clip, or the bytes of an image in parquet, got {name!r:.60}"
        )
    file = existing(name, folder)
    if file is None:
        raise ValueError(f"file not found: {name}")
    return StoredMedia(file)


def _pair(first: float) -> Floats:
    """Win matrix [2, 2] from the probability that the first beats the second."""
    return np.array([[np.nan, first], [1.0 - first, np.nan]])


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r:.60}") from None


def _probability(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name}: expected 0 … 1, got {number:g}")
    return number


# ---- pairs: (columns of the two images, …) → probability that the first wins --------------------------------------


def _chosen(rest: Row, values: Sequence[Any]) -> float:
    """The first one wins, with certainty unless the row has a probability."""
    return _probability(PROBABILITY, rest.pop(PROBABILITY, 1.0))


def _labels(rest: Row, values: Sequence[Any]) -> float:
    """Pick-a-Pic: label_0 and label_1 are 1 and 0, or ½ each for a tie."""
    if any(str(rest.get(column)).lower() == "false" for column in ("has_label", "are_different")):
        raise Unjudged
    first = _probability("label_0", values[2])
    second = _probability("label_1", values[3])
    if abs(first + second - 1) > 1e-6:
        raise ValueError(f"label_0 and label_1: expected 1 and 0, 0 and 1, or .5 and .5, got {first:g} and {second:g}")
    return first


def _choice(rest: Row, values: Sequence[Any]) -> float:
    """A person's choice of a, b or tie."""
    choice = str(values[2]).strip().lower()
    if choice not in CHOICES:
        raise ValueError(f"choice: expected one of {', '.join(CHOICES)}, got {values[2]!r}")
    return CHOICES[choice]


READERS: dict[tuple[str, ...], Callable[[Row, Sequence[Any]], float]] = {
    ("chosen", "rejected"): _chosen,
    ("jpg_0", "jpg_1", "label_0", "label_1"): _labels,
    ("path1", "path2"): _chosen,  # HPD v3: path1 is the preferred one
    ("image_a", "image_b", "choice"): _choice,
}
"""Columns of a pair → what reads them."""


# ---- groups: (a column of verdicts, n) → wins and counts [n, n] ----------------------------------------------------


def _matrix(rest: Row, value: Any, size: int) -> tuple[Floats, Floats]:
    """Probabilities that row beats column, null where nobody judged; one of a pair of mirrored entries is enough.
    `counts`: numbers of verdicts; else 1 each."""
    given = _square("wins", value, size)
    off = given[~np.isnan(given)]
    if ((off < 0) | (off > 1)).any():
        raise ValueError("wins: expected probabilities from 0 to 1, or null; sums of verdicts are to be divided")
    wins = np.where(np.isnan(given), 1 - given.T, given)
    np.fill_diagonal(wins, np.nan)
    if (np.abs(wins + wins.T - 1) > 1e-4).any():
        raise ValueError("wins: expected that entries (i, j) and (j, i) sum to 1")
    counts = np.where(np.isnan(wins), 0.0, 1.0)
    if "counts" in rest:
        counts = np.where(np.isnan(wins), 0.0, _square("counts", rest.pop("counts"), size))
        if not (counts == counts.T).all() or (counts < 0).any() or ((counts == 0) & ~np.isnan(wins)).any():
            raise ValueError("counts: expected a symmetric matrix of numbers above 0 where wins has probabilities")
    return _some(wins, counts)


def _square(name: str, value: Any, size: int) -> Floats:
    """[n, n] fp64, NaN for null."""
    rows = value if isinstance(value, list) else []
    if len(rows) != size or any(not isinstance(row, list) or len(row) != size for row in rows):
        raise ValueError(f"{name}: expected a list of {size} lists of {size} numbers, as there are {size} samples")
    return np.array([[_entry(name, x) for x in row] for row in rows], np.float64)


def _entry(name: str, value: Any) -> float:
    return math.nan if value is None else _number(name, value)


def _rank(rest: Row, value: Any, size: int) -> tuple[Floats, Floats]:
    """HPD v2 (test): averaged ranks, of which the lowest is the best; equal ones are ties. With raw_annotations the
    shares of people who ranked row before column, and their number."""
    raw = rest.pop("raw_annotations", None) or []
    each = [person.get("rank") if isinstance(person, dict) else None for person in raw] or [value]
    rankings = [_values("rank", one, size) for one in each]
    before = [np.sign(ranks[None, :] - ranks[:, None]) / 2 + 0.5 for ranks in rankings]
    wins = np.mean(before, axis=0)
    np.fill_diagonal(wins, np.nan)
    return _some(wins, np.where(np.isnan(wins), 0.0, float(len(rankings))))


def _preferred(rest: Row, value: Any, size: int) -> tuple[Floats, Floats]:
    """HPD v2 (train): 1 for preferred images, 0 for others, between which nothing is known."""
    marks = _values("human_preference", value, size)
    better = np.sign(marks[:, None] - marks[None, :])
    wins = np.where(better == 0, np.nan, (better + 1) / 2)
    return _some(wins, np.abs(better))


def _values(name: str, value: Any, size: int) -> Floats:
    if not isinstance(value, (list, tuple)) or len(value) != size:
        raise ValueError(f"{name}: expected a list of {size} numbers, as there are {size} samples, got {value!r:.60}")
    return np.array([_number(name, one) for one in value], np.float64)


def _some(wins: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """(wins, counts), unless nothing is judged."""
    if np.isnan(wins).all():
        raise ValueError("no image is preferred to another one: expected at least one judged pair")
    return wins, counts


MATRICES: dict[str, Callable[[Row, Any, int], tuple[Floats, Floats]]] = {
    "wins": _matrix, "rank": _rank, "human_preference": _preferred,
}  # fmt: skip
"""Column with the verdicts on a list of images → what reads it."""
