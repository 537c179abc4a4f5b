"""Items of the page's viewer: images that belong together, with the verdicts of judges and independent checks.

An item is {id, prompt, where, media: [[label, element id], …], orders: [[judge, which of the last two was shown first,
P(first) or null, reason, answer], …], mean: P(first of the two) or null, wins: {who: 1, ½ or 0}, kinds}; its id is its
address on the page. Kinds: `flips` if the two orders give different winners, `missing` if an order has no verdict,
`differs` if the judge and an independent check disagree on the winner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from prefgrpo.report.curves import readable
from prefgrpo.report.run import Answer, EvalImages, Group, Outcome

Item = dict[str, Any]
KINDS = {"flips": "the two orders disagree", "differs": "judge and check disagree", "missing": "no verdict"}


def pair_id(name: str, step: int, k: int) -> str:
    """Address of the k-th pair of an evaluation."""
    return f"{name}-{step}-{k + 1}"


def pairs(images: EvalImages, name: str) -> list[Item]:
    """An item for every (before, after) pair of an evaluation."""
    labels = [*(["source"] if images.sources is not None else []), "before", f"after {images.step} steps"]
    out = []
    for k, (prompt, outcome) in enumerate(zip(images.prompts, images.kept, strict=True)):
        ident, where = pair_id(name, images.step, k), f"{name}, after {images.step} steps, image {k + 1}"
        media = [[label, f"{ident}-{n}"] for n, label in enumerate(labels)]
        out.append(_item(ident, prompt, where, media, outcome))
    return out


def group_pairs(group: Group, ident: str) -> list[Item]:
    """An item for every judged pair of a group."""
    out = []
    for i, j in combinations(range(len(group.rates)), 2):
        own = [a for a in group.answers if {a.first, a.second} == {i, j}]
        count = float(group.counts[i, j])
        mean = float(group.wins[i, j]) / count if count > 0 else math.nan
        if own or not math.isnan(mean):
            media = [["source", f"{ident}-source"]] if group.source is not None else []
            media += [[f"image {k + 1}", f"{ident}-{k}"] for k in (i, j)]
            where = f"training, step {group.step}, images {i + 1} and {j + 1}"
            numbered = [replace(a, first=int(a.first == j), second=int(a.first == i)) for a in own]
            out.append(_item(f"{ident}-{i}-{j}", group.prompt, where, media, Outcome(0, {}, numbered), mean))
    return out


def _item(
    ident: str, prompt: str, where: str, media: list[list[str]], outcome: Outcome, mean: float = math.nan
) -> Item:
    answers, wins = outcome.answers or [], {who: win for who, win in outcome.wins.items() if not math.isnan(win)}
    orders = [[a.judge, a.first, None if math.isnan(a.p_first) else a.p_first, a.reason, a.raw] for a in answers]
    names = Counter(map(readable, outcome.wins))
    shown = {who if names[readable(who)] > 1 else readable(who): win for who, win in wins.items()}
    item = {"id": ident, "prompt": prompt, "where": where, "media": media, "orders": orders, "wins": shown}
    return item | {"mean": None if math.isnan(mean) else round(mean, 4), "kinds": _kinds(answers, wins)}


def _kinds(answers: Sequence[Answer], wins: dict[str, float]) -> list[str]:
    for_second = {np.sign((a.p_first - 0.5) * (2 * a.first - 1)) for a in answers if not math.isnan(a.p_first)}
    own = {who.startswith("judge"): np.sign(win - 0.5) for who, win in wins.items() if win != 0.5}
    found = {
        "flips": {-1.0, 1.0} <= for_second,
        "differs": len(set(own.values())) > 1,
        "missing": any(math.isnan(a.p_first) for a in answers),
    }
    return [kind for kind, is_so in found.items() if is_so]
