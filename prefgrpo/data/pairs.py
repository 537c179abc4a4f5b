"""Preferences that people already have: groups of images or clips of one prompt, with the probability that one beats
another, read from a table (docs/pairs.md lists the formats, `pair_rows` reads their rows).

Invariant: every row becomes a group or is named with its line and the reason; nothing is left out silently.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.pair_rows import MATRICES, READERS, Unjudged, Verdicts, media_rows, verdicts_of
from prefgrpo.data.prompts import Prompt, parse, place_of
from prefgrpo.data.stored import Shape, StoredMedia
from prefgrpo.data.tables import DataError, refusal, rows

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PairGroup:
    """n ≥ 2 images or clips of one prompt, and who beats whom."""

    prompt: Prompt
    """Text, source images (`source`), the table's other columns (`meta`, with `negative`), and the line; its `id` is
    the group's position in the list."""
    samples: tuple[StoredMedia, ...]
    """The n images or clips, in the row's order; of `chosen` and `rejected`, the chosen one is 0."""
    shapes: tuple[Shape, ...]
    """Shapes of the samples; all are images, or all are clips."""
    wins: Floats
    """[n, n], probability that row beats column: 1, 0, ½ for a tie, NaN where nobody judged and on the diagonal;
    wins + winsᵀ = 1."""
    counts: Floats
    """[n, n], number of verdicts behind each probability, 0 where it is NaN; symmetric."""
    weight: float = 1.0
    """Weight of the group's loss."""
    where: str = ""
    """'FILE, line 12', for messages."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for groups of the same images for the same prompt, whoever judged them."""
        return (self.prompt.text, self.prompt.source, tuple(sorted(self.samples, key=str)))


def has_pairs(path: str | Path) -> bool:
    """Whether the first row of a table has the columns of a pair or of a group. Raises DataError."""
    row = next((row for _, row in rows(Path(path))), {})
    return any(all(name in row for name in columns) for columns in READERS) or any(name in row for name in MATRICES)


def read_pairs(path: str | Path, *, decode: bool = True) -> list[PairGroup]:
    """The groups of a table, in order; the same pair in two rows is two groups, because both are judgements.

    decode: read every image completely, to find broken ones. Rows that state that nobody judged them are left out with
    a warning. Raises DataError for a missing or empty file, or one that names every row that cannot be used,
    with its line and the reason.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} not found; expected a table of pairs, or the folder of a run")
    found: dict[int, tuple[Prompt, Verdicts]] = {}
    bad: dict[int, str] = {}
    unjudged: list[int] = []
    for number, row in media_rows(file):
        try:
            verdicts, rest = verdicts_of(row, file.parent)
            text, sources, meta = parse(rest, file.parent)
            found[number] = Prompt(len(found), text, meta, sources, number), verdicts
        except Unjudged:
            unjudged.append(number)
        except ValueError as error:
            bad[number] = str(error)
    media = [(number, m) for number, (p, v) in found.items() for m in (*v.samples, *map(place_of, p.source))]
    shapes = _shapes(media, decode, bad)
    groups: list[PairGroup] = []
    for number, (prompt, v) in found.items():
        if number in bad:
            continue
        of_samples = tuple(shapes[sample] for sample in v.samples)
        if why := _mistake(v.samples, of_samples, decode):
            bad[number] = why
        where = f"{file}, line {number}"
        groups.append(PairGroup(prompt, v.samples, of_samples, v.wins, v.counts, v.weight, where))
    if bad:
        raise DataError(refusal(file, bad))
    if not groups:
        raise DataError(f"{file}: expected at least one judged pair, got none of {len(unjudged)} rows")
    if unjudged:
        lines = ", ".join(map(str, unjudged[:5])) + ", …" * (len(unjudged) > 5)
        warnings.warn(
            f"{file}: left out {len(unjudged)} rows that nobody judged, by their columns: {lines}", stacklevel=2
        )
    return groups


def _shapes(wanted: Sequence[tuple[int, StoredMedia]], decode: bool, bad: dict[int, str]) -> dict[StoredMedia, Shape]:
    """The shapes of everything that (lines, places) name, each read once; what cannot be read is added to `bad`."""
    lines = {place: number for number, place in reversed(wanted)}

    def shape(place: StoredMedia) -> Shape | str:
        try:
            return place.shape(decode)
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        found = dict(zip(lines, pool.map(shape, lines), strict=True))
    for number, place in wanted:
        why = found[place]
        if isinstance(why, str):
            bad.setdefault(number, why)
    return {place: shape for place, shape in found.items() if isinstance(shape, Shape)}


def _mistake(samples: Sequence[StoredMedia], shapes: Sequence[Shape], decode: bool) -> str:
    """What is wrong with the images or clips of a row; decode: compare their contents too."""
    if len({shape.frames is None for shape in shapes}) > 1:
        return "expected images or clips, got both"
    contents = [sample.content() if decode else str(sample) for sample in samples]
    same = [k for k, content in enumerate(contents) if content in contents[:k]]
    return f"{samples[same[0]]} is the same as another image or clip of the row" if same else ""


def summary(groups: Sequence[PairGroup]) -> str:
    """One line: how many groups, judged pairs and ties there are, and how many groups occur more than once."""
    upper = [group.wins[np.triu_indices(len(group.samples), 1)] for group in groups]
    judged = np.concatenate(upper)
    judged = judged[~np.isnan(judged)]
    repeated = sum(count - 1 for count in Counter(group.identity for group in groups).values())
    prompts = len({(group.prompt.text, group.prompt.source) for group in groups})
    line = f"{len(groups)} groups of {prompts} prompts, {len(judged)} judged pairs, {int((judged == 0.5).sum())} ties"
    return line + (f"; {repeated} groups are repetitions, which all count" if repeated else "")
