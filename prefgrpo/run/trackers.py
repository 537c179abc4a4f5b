"""Experiment trackers in addition to metrics.jsonl: TensorBoard and Weights & Biases.

Each receives the metrics, groups of training images with their rewards, and evaluation images next to those from before
training; of clips, frames. WANDB_MODE=offline and its other variables set the destination; the project is
WANDB_PROJECT, by default prefgrpo. `run.pairs` is the tracker `pairs`. Invariant: the run's other files never depend on
trackers.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.config.loading import to_dict
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.rollout.render import stills
from prefgrpo.run.run_folder import RunFolder

PAIRS = "pairs"
"""The tracker that stores judged groups."""
LONGEST = 512
"""Most pixels of the longer side of an evaluation's images in trackers, which encode them as PNG."""
Pictures = dict[str, tuple[str, NDArray[np.uint8]]]
"""Name → (caption, picture [H, W, 3])."""


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


Tracker = TensorBoard | WandB


def evaluated(folder: RunFolder, name: str, step: int) -> Pictures:
    """The images that an evaluation of the set `name` stored, before training on the left, reduced to LONGEST."""
    if not folder.report_images(name, step).is_file():
        return {}
    prompts = json.loads(folder.prompts(name).read_text(encoding="utf-8"))
    with np.load(folder.report_images(name, step), allow_pickle=False) as file:
        before = file["before"]
        factor = -(-max(before.shape[-3:-1]) // LONGEST)
        pairs = [
            np.concatenate([np.asarray(Image.fromarray(stills(images)).reduce(factor)) for images in pair], axis=1)
            for pair in zip(before, file["now"], strict=True)
        ]
    return {f"images/{name}/{k}": shown for k, shown in enumerate(zip(prompts, pairs, strict=True), 1)}
