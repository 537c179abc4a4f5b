"""A few judged groups of a training step, stored for the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from prefgrpo.data.atomic import save_images
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.render import stills

MOST = 3
"""Groups stored per step."""


def save_groups(file: Path, samples: Mapping[int, Mapping[int, Sample]], scores: StepScores) -> None:
    """Store images, wins, counts, win rates, prompts and sources (side by side, as the model saw them) of judged groups
    of one image size; nothing without judged groups. samples: group → member → sample."""

    def shapes(sample: Sample) -> list[tuple[int, ...]]:
        return [media.pixels.shape for media in (sample.media, *sample.source)]

    judged = [
        ([members[m] for m in sorted(members)], group)
        for groups in scores.groups.values()
        for members, group in zip(samples.values(), groups, strict=True)
        if group.wins is not None
    ]
    alike = [(members, group) for members, group in judged if shapes(members[0]) == shapes(judged[0][0][0])][:MOST]
    if not alike:
        return
    sources = [np.concatenate([s.pixels for s in m[0].source], axis=1) for m, _ in alike if m[0].source]
    save_images(
        file,
        images=np.stack([stills(np.stack([s.media.pixels for s in members])) for members, _ in alike]),
        wins=np.stack([np.asarray(group.wins) for _, group in alike]),
        counts=np.stack([np.asarray(group.counts) for _, group in alike]),
        rates=np.array([[np.nan if s.value is None else s.value for s in group.scores] for _, group in alike]),
        prompts=np.array([members[0].prompt for members, _ in alike]),
        **({"sources": np.stack(sources)} if sources else {}),
    )
