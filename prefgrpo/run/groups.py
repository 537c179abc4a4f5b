"""A few groups of a training step: the judged ones stored for the report, any for trackers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import save_images
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.render import stills
from prefgrpo.rollout.source_images import as_arrays
from prefgrpo.run.log import Log
from prefgrpo.run.pairs import store
from prefgrpo.run.trackers import PAIRS, Pictures
from prefgrpo.run.writer import Writer

MOST = 3
"""Groups per step."""
SIDE = 256
"""Shorter side in pixels at which trackers show an image, or a little more."""


def is_shown(config: Config, step: int) -> bool:
    """Whether groups of a step are shown: of the first, the last, and those with an evaluation."""
    return step in (1, config.train.steps) or step % (config.eval.every or 50) == 0


def show_groups(config: Config, step: int, scores: StepScores, log: Log) -> None:
    """On rank 0, store a few judged groups for the report, and send some to the trackers: of the first and the last
    step, and of those with an evaluation. With the tracker `pairs`, every rank also stores all judged ones."""
    if PAIRS in config.trackers:
        store(log.folder, step, scores, log.writer)
    if log.active and scores.samples and is_shown(config, step):
        save_groups(log.folder.group(step), scores, log.writer)
        log.show(step, partial(pictures, scores))


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


def save_groups(file: Path, scores: StepScores, writer: Writer) -> None:
    """Store images, wins, counts, win rates, prompts and sources (as the model saw them) of judged groups, on the
    writer's thread; nothing without judged groups."""
    judged = [
        ([members[m] for m in sorted(members)], (*scores.games[name][k], scores.values[name][k]))
        for name in scores.games
        for k, members in enumerate(scores.samples.values())
    ][:MOST]
    if not judged:
        return
    save = partial(
        save_images,
        file,
        images=np.stack([np.stack([stills(s.media.pixels) for s in members]) for members, _ in judged]),
        wins=np.stack([wins for _, (wins, _, _) in judged]),
        counts=np.stack([counts for _, (_, counts, _) in judged]),
        rates=np.stack([rates for _, (_, _, rates) in judged]),
        prompts=np.array([members[0].prompt for members, _ in judged]),
        **as_arrays([members[0].source for members, _ in judged]),
    )
    writer.put(save, pictures=True)
