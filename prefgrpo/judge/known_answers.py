"""Questions with known answers: which image is a plain colour, beside another colour or noise; 8 pairs in both orders.

They find a judge that ignores the images or mixes them up. By guessing, 7 or 8 of 8 pairs are right in 1 of 28 cases.
"""

from __future__ import annotations

import numpy as np

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.pairs import Pair, PairJudge
from prefgrpo.judge.template import Template

_TIE = 0.001
"""A verdict this close to ½ is a tie."""
_MIN_RIGHT_SHARE = 0.8
COLOURS = {"yellow": (240, 220, 40), "white": (255, 255, 255), "black": (0, 0, 0), "red": (220, 30, 30)}
COLOURS |= {"green": (40, 160, 60), "blue": (30, 60, 220), "grey": (128, 128, 128)}
_PROBES = {"yellow": ("blue", "red", "noise"), "white": ("black", "green"), "black": ("red", "green", "noise")}
"""Requested colour → alternatives. Neither the lighter nor the darker image is always right."""


def plain(colour: str, height: int = 64, width: int = 64, frames: int = 1) -> Media:
    """An image, or clip, of one of COLOURS."""
    image = np.full((height, width, 3), COLOURS[colour], np.uint8)
    return Media(np.stack([image] * frames) if frames > 1 else image)


def is_pairwise(template: Template) -> bool:
    """Whether the template asks which of two media is better; templates with Yes/No labels do not."""
    return [label.strip().casefold() for label in template.labels or ()] != ["yes", "no"]


def ask_known_answers(judge: PairJudge, template: Template, clips: bool) -> tuple[str, str]:
    """(result in words, what is wrong with the judge or ''). clips: show clips of two frames."""
    frames = 2 if clips or template.name.endswith("_video") else 1
    noise = np.random.default_rng(0).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    media = {name: plain(name, frames=frames) for name in COLOURS}
    media["noise"] = Media(noise if frames > 1 else noise[0])
    verdicts: list[Answer] = []  # alternately with the correct image first and second
    for colour, others in _PROBES.items():
        task = f"Make the whole picture plain {colour}" if template.takes_source else f"a plain {colour} picture"
        pairs: list[Pair] = [pair for k in range(len(others)) for pair in ((0, k + 1), (k + 1, 0))]
        verdicts += judge.judge_group(task, [media[name] for name in (colour, *others)], pairs, [plain("grey")])
    p = np.array([v.value for v in verdicts], np.float64)  # None: NaN
    reasons = [v.reason for v in verdicts if v.value is None]
    lead = p[::2] - p[1::2]  # so that a position bias cancels
    right = int((lead > _TIE).sum())
    result = f"{right} of {len(lead)} pairs right"
    if len(reasons) < len(p):
        result += f", mean P(first) over both orders {np.nanmean(p):.3f}"
    if right >= _MIN_RIGHT_SHARE * len(lead):
        return result, ""
    if len(reasons) > (1 - _MIN_RIGHT_SHARE) * len(p):
        return result, f"gave no verdict on {len(reasons)} plain images: {reasons[0]}"
    if np.nanmax(p) - np.nanmin(p) <= _TIE:
        return result, f"always answers the same ({result})"
    if (lead < -_TIE).sum() >= _MIN_RIGHT_SHARE * len(lead):
        return result, f"prefers the wrong image ({result}); are the template's labels, or its images, swapped?"
    return result, f"does not see the images, or mixes them up ({result})"
