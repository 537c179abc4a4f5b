"""How often a judge agrees with people (`prefgrpo judge check --pairs FILE`), to choose one before a run pays for it.

The file has the columns prompt, image_a, image_b (paths relative to the file), and choice: a, b or tie; or it has pairs
in another format of docs/pairs.md. Every pair is asked in both orders. Intervals are Wilson's at 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.answer import Answer
from prefgrpo.data.pair_rows import Unjudged, media_rows, verdicts_of
from prefgrpo.data.prompts import parse
from prefgrpo.data.stored import StoredMedia
from prefgrpo.data.tables import DataError
from prefgrpo.judge.client import Judge
from prefgrpo.judge.template import PairTemplates

AT_ONCE = 32
"""Pairs that are asked at the same time."""
HumanPair = tuple[str, tuple[StoredMedia, ...], float]
"""(prompt, two images, probability that people prefer the first: 1, 0, or ½ for a tie)."""


def read_pairs(file: Path) -> list[HumanPair]:
    """The pairs of a file. Raises DataError with the line of the first row that cannot be used."""
    pairs: list[HumanPair] = []
    for line, row in media_rows(file):
        try:
            verdicts, rest = verdicts_of(row, file.parent)
            prompt, _, _ = parse(rest, file.parent)
        except Unjudged:
            continue
        except ValueError as error:
            raise DataError(f"{file}, line {line}: {error}") from error
        if len(verdicts.samples) != 2:
            raise DataError(f"{file}, line {line}: expected two images, got {len(verdicts.samples)}")
        pairs.append((prompt, verdicts.samples, float(verdicts.wins[0, 1])))
    if not pairs:
        raise DataError(f"{file}: expected at least one pair, got none")
    return pairs


def ask(judge: Judge, templates: PairTemplates, pair: HumanPair) -> list[Answer]:
    """Answers on (a, b) and (b, a)."""
    prompt, images, _ = pair
    try:
        a, b = [image.read() for image in images]
    except DataError as error:
        return [Answer(None, str(error))] * 2
    return judge.ask_all(templates.about(a, b), {"prompt": prompt}, [(a, b), (b, a)])


def agreement(judge: Judge, templates: PairTemplates, pairs: Sequence[HumanPair]) -> list[str]:
    """Lines: accuracy, order inconsistency and ties over the pairs with two verdicts, and what is left out."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = list(pool.map(lambda pair: ask(judge, templates, pair), pairs))
    reasons = [answer.reason for answers in asked for answer in answers if answer.value is None]
    p_a = np.array([[one.value, other.value] for one, other in asked], np.float64)  # None: NaN
    p_a[:, 1] = 1 - p_a[:, 1]
    judged = ~np.isnan(p_a).any(1)
    winner = np.sign(p_a[judged] - 0.5)  # 1: a, -1: b, 0: a tie
    chosen = np.sign(np.array([first for _, _, first in pairs]) - 0.5)[judged]
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
