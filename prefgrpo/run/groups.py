"""A few groups of a training step: the judged ones stored for the report, any for trackers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from prefgrpo.data.atomic import save_images
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.render import stills
from prefgrpo.run.trackers import Pictures

MOST = 3
"""Groups per step."""
SIDE = 256
"""Shorter side in pixels at which trackers show an image, or a little more."""


def pictures(scores: StepScores) -> Pictures:
    """The images of a few groups side by side (the frames of clips below each other), with their prompt and the value
    of every reward, from left to right."""
    out: Pictures = {}
    for k, members in enumerate(list(scores.samples.values())[:MOST]):
        strips = [stills(members[m].media.pixels) for m in sorted(members)]
        factor = max(min(members[0].media.pixels.shape[-3:-1]) // SIDE, 1)
        small = [np.asarray(Image.fromarray(strip).reduce(factor)) for strip in strips]
        lines = [members[0].prompt]
        for name, values in scores.values.items():
            lines.append(f"{name} " + " ".join(f"{value:.3g}" for value in values[k]))
        axis = 0 if members[0].media.clip else 1
        out[f"samples/{k + 1}"] = "\n".join(lines), np.concatenate(small, axis=axis)
    return out


def save_groups(file: Path, scores: StepScores) -> None:
    """Store images, wins, counts, win rates, prompts and sources (side by side, as the model saw them) of judged groups
    of one image size; nothing without judged groups."""

    def shapes(sample: Sample) -> list[tuple[int, ...]]:
        return [media.pixels.shape for media in (sample.media, *sample.source)]

    judged = [
        ([members[m] for m in sorted(members)], (*scores.games[name][k], scores.values[name][k]))
        for name in scores.games
        for k, members in enumerate(scores.samples.values())
    ]
    alike = [(members, tables) for members, tables in judged if shapes(members[0]) == shapes(judged[0][0][0])][:MOST]
    if not alike:
        return
    sources = [np.concatenate([s.pixels for s in m[0].source], axis=1) for m, _ in alike if m[0].source]
    save_images(
        file,
        images=np.stack([np.stack([stills(s.media.pixels) for s in members]) for members, _ in alike]),
        wins=np.stack([wins for _, (wins, _, _) in alike]),
        counts=np.stack([counts for _, (_, counts, _) in alike]),
        rates=np.stack([rates for _, (_, _, rates) in alike]),
        prompts=np.array([members[0].prompt for members, _ in alike]),
        **({"sources": np.stack(sources)} if sources else {}),
    )
