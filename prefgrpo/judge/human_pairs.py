"""How often a judge agrees with people (`prefgrpo judge check --pairs FILE`), to choose one before a run pays for it.

The file (.csv, .tsv, .jsonl, .json) has the columns prompt, image_a, image_b (paths relative to the file), and choice:
a, b or tie. Every pair is asked in both orders. Intervals are Wilson's at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.data.media import UNREADABLE, Media, rgb
from prefgrpo.data.tables import DataError, rows
from prefgrpo.judge.verdict import PairJudge, Verdict

COLUMNS = ("prompt", "image_a", "image_b", "choice")
CHOICES = ("a", "b", "tie")
AT_ONCE = 32
"""Pairs that are asked at the same time."""
HumanPair = tuple[str, tuple[Path, Path], str]
"""(prompt, images, one of CHOICES)."""


def read_pairs(file: Path) -> list[HumanPair]:
    """The pairs of a file. Raises DataError with the line of the first row that is incomplete."""
    pairs = []
    for line, row in rows(file):
        where = f"{file}, line {line}"
        if missing := [column for column in COLUMNS if not str(row.get(column, "")).strip()]:
            raise DataError(f"{where}: expected the columns {', '.join(COLUMNS)}, {', '.join(missing)} is missing")
        choice = str(row["choice"]).strip().lower()
        if choice not in CHOICES:
            raise DataError(f"{where}: expected a choice of {', '.join(CHOICES)}, got {row['choice']!r}")
        images = (file.parent / str(row["image_a"]), file.parent / str(row["image_b"]))
        if absent := [str(path) for path in images if not path.is_file()]:
            raise DataError(f"{where}: expected an image file, got {absent[0]}")
        pairs.append((str(row["prompt"]), images, choice))
    if not pairs:
        raise DataError(f"{file}: expected at least one pair, got none")
    return pairs


def ask(judge: PairJudge, pair: HumanPair) -> list[Verdict]:
    """Verdicts on (a, b) and (b, a)."""
    prompt, images, _ = pair
    try:
        media = [Media(np.asarray(rgb(Image.open(path)))) for path in images]
    except UNREADABLE as error:
        return [Verdict(None, f"{images[0]} or {images[1].name}: {error}")] * 2
    return judge.judge_group(prompt, media, [(0, 1), (1, 0)])


def agreement(judge: PairJudge, pairs: Sequence[HumanPair]) -> list[str]:
    """Lines: accuracy, order inconsistency and ties over the pairs with two verdicts, and what is left out."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = list(pool.map(lambda pair: ask(judge, pair), pairs))
    reasons = [verdict.reason for verdicts in asked for verdict in verdicts if verdict.first is None]
    p_a = np.array([[one.first, other.first] for one, other in asked], np.float64)  # None: NaN
    p_a[:, 1] = 1 - p_a[:, 1]
    judged = ~np.isnan(p_a).any(1)
    winner = np.sign(p_a[judged] - 0.5)  # 1: a, -1: b, 0: a tie
    chosen = np.array([{"a": 1, "b": -1, "tie": 0}[choice] for _, _, choice in pairs])[judged]
    right = np.where(winner == 0, 0.5, winner == chosen[:, None]).mean(1)[chosen != 0]
    lines = [
        f"pairs: {judged.sum()} of {len(pairs)} have verdicts in both orders; {len(right)} that people decided count",
        f"accuracy: {_share(right)} (a tie counts ½; guessing gives 0.500)",
        f"order inconsistency: {_share(winner[:, 0] != winner[:, 1])} of the pairs have another winner when the images "
        "are swapped",
        f"ties: {_share(winner == 0)} of the verdicts",
    ]
    if reasons:
        lines.append(f"WARNING: {len(reasons)} of {2 * len(pairs)} questions have no verdict, the first: {reasons[0]}")
    return lines


def _share(values: NDArray[Any]) -> str:
    """0.714 [0.648, 0.772]: the mean of values in 0 … 1 and its interval."""
    n = values.size
    if not n:
        return "–"
    z = 1.959964
    mean = float(values.mean())
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{mean:.3f} [{centre - half:.3f}, {centre + half:.3f}]"
