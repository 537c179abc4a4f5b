"""Experiment trackers beside metrics.jsonl (TensorBoard, Weights & Biases), and the groups of samples that a run shows.

Each tracker gets the metrics, a few training groups with their rewards, and evaluation images beside the initial
policy's (frames for clips). WANDB_MODE=offline and its other variables set the destination; the project is
WANDB_PROJECT, by default prefgrpo. `run.pairs` is the tracker `pairs`. Invariant: the run's other files never depend on
trackers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.config.loading import to_dict
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import save_images, write_atomic
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.render import stills
from prefgrpo.rollout.source_images import as_arrays
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log, Pictures, Tracker
from prefgrpo.run.pairs import store
from prefgrpo.run.writer import Writer

PAIRS = "pairs"
"""The tracker that stores judged groups."""
MOST_GROUPS = 3
"""Groups of a step that are shown."""
SIDE = 256
"""Shorter side in pixels at which trackers show an image of a group, or a little more."""


def open_trackers(config: Config, folder: RunFolder, start: int) -> list[Tracker]:
    """The trackers of a run that starts or resumes after step `start`."""
    return [
        TensorBoard(folder, start) if name == "tensorboard" else WandB(config, folder, start > 0)
        for name in config.trackers
        if name != PAIRS
    ]


class TensorBoard:
    """TensorBoard events in the run folder."""

    def __init__(self, folder: RunFolder, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=start + 1 if start else 0)

    def log(self, step: int, numbers: Mapping[str, float], pictures: Pictures) -> None:
        """Scalars, and images with their captions as texts of the same names."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
        for name, (caption, pixels) in pictures.items():
            self._writer.add_image(name, pixels, step, dataformats="HWC")
            self._writer.add_text(name, caption, step)

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


class WandB:
    """Weights & Biases."""

    def __init__(self, config: Config, folder: RunFolder, resumed: bool) -> None:
        self._module: Any = import_module("wandb")
        if not (resumed and folder.wandb_id.is_file()):
            write_atomic(folder.wandb_id, uuid.uuid4().hex)
        self._run = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "prefgrpo"),
            name=config.name,
            config=to_dict(config),
            resume="allow" if resumed else "never",
            id=folder.wandb_id.read_text().strip(),
            dir=str(folder.root),
        )

    def log(self, step: int, numbers: Mapping[str, float], pictures: Pictures) -> None:
        """Scalars, and images with their captions; steps that a resumed run repeats are ignored."""
        image = self._module.Image
        shown = {name: image(pixels, caption=caption) for name, (caption, pixels) in pictures.items()}
        self._run.log({**numbers, **shown}, step=step)

    def close(self) -> None:
        """Finish the run, sending pending data."""
        self._run.finish()


# ---- groups of samples ----------------------------------------------------------------------------------------------


def is_shown(config: Config, step: int) -> bool:
    """Whether groups of a step are shown: the first step, the last, and those with an evaluation."""
    return step in (1, config.train.steps) or step % (config.eval.every or 50) == 0


def show_groups(config: Config, step: int, scores: StepScores, log: Log) -> None:
    """On rank 0, store a few judged groups for the report, and send some to the trackers, at the first and the last
    step and at those with an evaluation. With the tracker `pairs`, every rank also stores all judged ones."""
    if PAIRS in config.trackers:
        store(log.folder, step, scores, log.writer)
    if log.active and scores.samples and is_shown(config, step):
        save_groups(log.folder.group(step), scores, log.writer)
        log.show(step, partial(group_pictures, scores))


def group_pictures(scores: StepScores) -> Pictures:
    """The images of a few groups side by side (the frames of clips below each other), with their prompt and the value
    of every reward, from left to right."""
    out: Pictures = {}
    for k, members in enumerate(list(scores.samples.values())[:MOST_GROUPS]):
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
        ([members[m] for m in sorted(members)], (*scores.comparisons[name][k], scores.values[name][k]))
        for name in scores.comparisons
        for k, members in enumerate(scores.samples.values())
    ][:MOST_GROUPS]
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
