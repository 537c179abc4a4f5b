"""Experiment trackers in addition to metrics.jsonl: TensorBoard, Weights & Biases and Trackio.

Each receives the metrics, and what the run stores for its report: evaluation images or clips next to those from before
training, the judge's answers as a table, and groups of training images sorted by win rate. The libraries' own
environment variables set the destination (WANDB_MODE=offline, TRACKIO_SPACE_ID, …); the project is WANDB_PROJECT or
TRACKIO_PROJECT, by default prefgrpo. Invariant: trackers only read; the run's files never depend on them.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.config.loading import to_dict
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.run.run_folder import RunFolder

FRAME_MS = 125
"""Milliseconds per frame in a GIF."""


class MediaItem(NamedTuple):
    """An image uint8 [H, W, 3] or a clip [F, H, W, 3] with its caption."""

    caption: str
    pixels: NDArray[np.uint8]


class Table(NamedTuple):
    """A table of text and numbers with named columns."""

    columns: list[str]
    rows: list[list[Any]]


def config_errors(config: Config) -> list[str]:
    """Errors for configured trackers whose libraries are not installed."""
    # a ./wandb folder left by a run is a spec without origin
    lacking = [name for name in config.trackers if getattr(find_spec(name), "origin", None) is None]
    hint = "run `pip install {0}`, or remove it from trackers"
    return [f"trackers: {name} is not installed; {hint.format(name)}" for name in lacking]


def open_trackers(config: Config, folder: RunFolder, start: int) -> list[Tracker]:
    """The trackers of a run that starts or resumes after step `start`."""
    found: list[Tracker] = [TensorBoard(folder, start)] if config.tensorboard else []
    return found + [Service(name, config, folder, start > 0) for name in config.trackers]


class TensorBoard:
    """TensorBoard events in the run folder; clips are logged as animated GIFs."""

    def __init__(self, folder: RunFolder, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=start + 1 if start else 0)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Scalars."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def show(self, step: int, name: str, images: Sequence[MediaItem], table: Table | None) -> None:
        """Images, numbered; captions and the table as text."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for k, (_, pixels) in enumerate(images):
            height, width = pixels.shape[-3:-1]
            encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode(pixels))
            summary = Summary(value=[Summary.Value(tag=f"{name}/{k + 1}", image=encoded)])
            self._writer._get_file_writer().add_summary(summary, step)  # add_video needs moviepy
        captions = [f"{k + 1}. {_escaped(caption)}" for k, (caption, _) in enumerate(images)]
        self._writer.add_text(f"{name}/captions", "\n".join(captions), step)
        if table is not None:
            lines = [table.columns, ["---"] * len(table.columns), *table.rows]
            text = "\n".join("|" + "|".join(_escaped(str(cell)) for cell in line) + "|" for line in lines)
            self._writer.add_text(f"{name}/verdicts", text, step)

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


class Service:
    """Weights & Biases, or Trackio, which has the same API."""

    def __init__(self, name: str, config: Config, folder: RunFolder, resumed: bool) -> None:
        self._module: Any = import_module(name)
        options: dict[str, Any] = {"resume": "allow" if resumed else "never"}
        if name == "wandb":
            if not (resumed and folder.wandb_id.is_file()):
                write_atomic(folder.wandb_id, uuid.uuid4().hex)
            options |= {"id": folder.wandb_id.read_text().strip(), "dir": str(folder.root)}
        project = os.environ.get(f"{name.upper()}_PROJECT", "prefgrpo")
        self._run = self._module.init(project=project, name=config.name, config=to_dict(config), **options)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Scalars; Weights & Biases ignores steps that a resumed run repeats."""
        self._run.log(dict(numbers), step=step)

    def show(self, step: int, name: str, images: Sequence[MediaItem], table: Table | None) -> None:
        """Images, or clips as GIFs, with captions, and the table."""
        with tempfile.TemporaryDirectory() as place:
            media = [self._media(Path(place) / f"{k}.gif", shown) for k, shown in enumerate(images)]
            values: dict[str, Any] = {f"{name}/{k + 1}": one for k, one in enumerate(media)}
            if self._module.__name__ == "wandb":
                values = {f"{name}/images": media}  # a gallery; Trackio has none
            if table is not None:
                values[f"{name}/verdicts"] = self._module.Table(columns=table.columns, data=table.rows)
            self._run.log(values, step=step)

    def _media(self, file: Path, shown: MediaItem) -> Any:
        if shown.pixels.ndim == 3:
            return self._module.Image(shown.pixels, caption=shown.caption)
        file.write_bytes(encode(shown.pixels))
        return self._module.Video(str(file), caption=shown.caption, format="gif")

    def close(self) -> None:
        """Finish the run, sending pending data."""
        self._run.finish()


Tracker = TensorBoard | Service


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """An image as PNG, a clip as a looping GIF."""
    frames = [Image.fromarray(frame) for frame in (pixels if pixels.ndim == 4 else [pixels])]
    file = io.BytesIO()
    if pixels.ndim == 4:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    else:
        frames[0].save(file, "PNG")
    return file.getvalue()


def _escaped(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- what a run stores for its report --------------------------------------------------------------------------------


def stored_media(
    folder: RunFolder, kind: str, step: int, name: Any
) -> tuple[str, list[MediaItem], Table | None] | None:
    """(name, images or clips, table) stored for a row of metrics: of the evaluation set `name`, or of the training
    step; None if the run stored none."""
    if kind == "eval" and folder.report_images(name, step).is_file():
        return (f"eval/{name}", *_evaluation(folder, name, step))
    if kind == "train" and folder.group(step).is_file():
        with np.load(folder.group(step), allow_pickle=False) as file:
            groups = zip(file["prompts"], file["images"], file["rates"], strict=True)
            return "train/groups", [_group(str(prompt), images, rates) for prompt, images, rates in groups], None
    return None


def _evaluation(folder: RunFolder, name: str, step: int) -> tuple[list[MediaItem], Table | None]:
    """Stored images, each as a row of (source, for edits), before and after training; and the judge's answers."""
    prompts = json.loads(folder.prompts(name).read_text(encoding="utf-8"))
    with np.load(folder.report_images(name, step), allow_pickle=False) as file:
        parts = [file["before"], file["now"]]
    if folder.sources(name).is_file():
        with np.load(folder.sources(name), allow_pickle=False) as file:
            parts.insert(0, np.stack([_like(source, parts[0]) for source in file["sources"]]))
    images = [MediaItem(prompt, np.concatenate(row, axis=-2)) for prompt, *row in zip(prompts, *parts, strict=True)]
    outcomes = json.loads(folder.outcomes(name, step).read_text(encoding="utf-8"))
    outcomes = [row for row in outcomes if "answers" in row]
    who = sorted({name for row in outcomes for name in row["wins"]})
    rows = [
        [prompt, *(row["wins"].get(name) for name in who), *(own[key] for key in ANSWER)]
        for prompt, row in zip(prompts, outcomes, strict=True)
        for own in row["answers"] or [dict.fromkeys(ANSWER)]
    ]
    return images, Table(["prompt", *(f"win by {name}" for name in who), *ANSWER.values()], rows) if rows else None


ANSWER = {"judge": "judge", "first": "shown first", "p_first": "P(first)", "reason": "no verdict because",
          "raw": "answer"}  # fmt: skip


def _like(source: NDArray[np.uint8], media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A source image resized to images [n, H, W, 3], or repeated for the frames of clips [n, F, H, W, 3]."""
    height, width = media.shape[-3:-1]
    sized = np.asarray(Image.fromarray(source).resize((width, height)))
    return sized if media.ndim == 4 else np.broadcast_to(sized, media.shape[1:])


def _group(prompt: str, images: NDArray[np.uint8], rates: NDArray[np.float64]) -> MediaItem:
    """The images of a group side by side, best first."""
    order = np.argsort(-np.nan_to_num(rates, nan=-1.0), kind="stable")
    listed = ", ".join("missing" if np.isnan(rate) else f"{rate:.2f}" for rate in rates[order])
    return MediaItem(f"{prompt} (win rates {listed})", np.concatenate(images[order], axis=-2))
