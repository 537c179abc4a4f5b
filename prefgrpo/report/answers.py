"""The judge's answers on single pairs: those of the newest step, and those whose two orders contradict each other most.

A pair's contradiction is the distance between the two orders' probabilities that its second image is better: 0 if they
agree, 1 if each order is certain of another winner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

from markupsafe import Markup

from prefgrpo.report.media import picture, still
from prefgrpo.report.run import Answer, Images, Run

ROWS, IMAGE_PX, MAX_CHARS = 15, 128, 600


@dataclass(frozen=True)
class Pair:
    """Two images that a judge compared; the answers count them as 0 and 1."""

    step: int
    where: str
    prompt: str
    names: tuple[str, str]
    images: tuple[Images, Images]
    answers: list[Answer]

    @property
    def contradiction(self) -> float:
        """Distance between the answers of one judge in the two orders; 0 with only one of them."""
        found = [0.0]
        for a, b in combinations(self.answers, 2):
            if a.judge == b.judge and a.first != b.first and not math.isnan(a.p_first + b.p_first):
                found.append(abs(_second_wins(a) - _second_wins(b)))
        return max(found)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(shown first, verdict, text) of every answer."""
        out = []
        for answer in self.answers:
            p = _second_wins(answer)
            winner = "neither" if p == 0.5 else self.names[int(p > 0.5)]
            verdict = "no verdict" if math.isnan(p) else f"{winner} ({max(p, 1 - p):.3f})"
            text = "\n".join(part for part in (answer.reason, answer.raw) if part) or "–"
            cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
            out.append((self.names[answer.first], verdict, cut))
        return out

    @property
    def pictures(self) -> list[tuple[str, Markup]]:
        """(name, <img>) of both images."""
        both = zip(self.names, self.images, strict=True)
        return [(name, picture(still(image), f"{self.prompt}: {name}", IMAGE_PX)) for name, image in both]


def _second_wins(answer: Answer) -> float:
    """P(image 1 is better), NaN without a verdict."""
    return answer.p_first if answer.first == 1 else 1.0 - answer.p_first


def tables(run: Run) -> list[tuple[str, list[Pair]]]:
    """(title, pairs): of the newest step with answers, evenly chosen, and the most contradictory ones; ROWS each."""
    pairs = _pairs(run)
    newest = max((pair.step for pair in pairs), default=0)
    recent = [pair for pair in pairs if pair.step == newest]
    recent = recent[:: -(-len(recent) // ROWS) or 1]
    worst = sorted((p for p in pairs if p.contradiction > 0), key=lambda p: -p.contradiction)[:ROWS]
    found = [(f"Newest verdicts (step {newest})", recent), ("Verdicts that contradict each other most", worst)]
    return [(title, some) for title, some in found if some]


def _pairs(run: Run) -> list[Pair]:
    """Every pair with single answers: of the kept groups (judge.log), and of the last evaluations."""
    out = []
    for group in run.groups:
        for i, j in combinations(range(len(group.rates)), 2):
            own = [a for a in group.answers if {a.first, a.second} == {i, j}]
            numbered = [replace(a, first=int(a.first == j), second=int(a.first == i)) for a in own]
            if own:
                images = (group.images[i], group.images[j])
                names = (f"image {i + 1}", f"image {j + 1}")
                out.append(Pair(group.step, f"training step {group.step}", group.prompt, names, images, numbered))
    for name, last in run.images.items():
        shown = zip(last.prompts, last.before, last.after, last.kept, strict=True)
        for prompt, before, after, outcome in shown:
            if outcome.answers:
                where = f"{name}, after step {last.step}"
                out.append(Pair(last.step, where, prompt, ("before", "after"), (before, after), outcome.answers))
    return out
