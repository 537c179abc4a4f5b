"""Output of a run: metrics.jsonl, trackers (TensorBoard, Weights & Biases), a progress bar and a line per step.

metrics.jsonl has one JSON object per line, with `kind` 'train' or 'eval'. Timings have keys that start with 'time/', so
that everything else can be compared bit for bit between runs. Invariant: a resumed run never changes earlier lines, and
drops the lines of steps that it repeats; no other file of a run depends on trackers.

Each tracker gets the metrics, a few training groups with their rewards, and evaluation images beside the initial
policy's (frames for clips). WANDB_MODE=offline and its other variables set the destination; the project is
WANDB_PROJECT, by default prefgrpo.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from prefgrpo.config.loading import to_dict
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.writer import Writer
from prefgrpo.rollout.render import stills
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.measures import rewards_of_step
from prefgrpo.update.metrics import BY_STEP

REASONS_SHOWN = 3
"""Reasons for missing rewards that a step prints, most frequent first; a run prints ten times as many."""

PAIRS = "pairs"
"""The tracker that stores judged groups (`run.groups`)."""
LONGEST = 512
"""Maximum pixels of the longer side of an evaluation's images in trackers, which encode them as PNG."""
IN_LINE = {
    "pairs/accuracy": "{:.0%} of the pairs ranked rightly",
    "judge/requests": "judged {:.0f}",
    "judge/tie_rate": "{:.0%} ties",
    "judge/order_inconsistency": "{:.0%} flip when swapped",
    "policy/clip_fraction": "clipped {:.0%}",
}
"""Metric → how a step's line shows it."""
IN_LINE_IF_ABOVE_0 = {
    "judge/failures": "{:.0f} comparisons failed",
    "reward/missing": "missing {:.0%}",
    "policy/error": "error {:.1e}",
    "policy/drift": "drift {:.1e}",
    "policy/kl": "kl {:.1e}",
    "grad_norm": "grad {:.1e}",
}
SPEED = {"time/images_per_s": "{:.3g} images/s", "time/clips_per_s": "{:.3g} clips/s", "time/mfu": "MFU {:.0%}"}
"""Timed metric → how a step's line shows it."""
Pictures = dict[str, tuple[str, NDArray[np.uint8]]]
"""Name → (caption, picture [H, W, 3])."""


class Tracker(Protocol):
    """Receiver of a run's metrics and pictures (`trackers` of a recipe)."""

    def log(self, step: int, numbers: Mapping[str, float], pictures: Pictures) -> None:
        """Take the numbers and pictures of a step."""

    def close(self) -> None:
        """Send what is pending."""


def read_metrics(file: Path, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """All rows of a run's metrics.jsonl; lines that are not rows are skipped.

    damaged: receives the numbers of the skipped lines, except for an incomplete last line, as a killed run leaves it.
    """
    rows: list[dict[str, Any]] = []
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            row = None
        if isinstance(row, dict) and row.get("kind") in ("train", "eval") and type(row.get("step")) is int:
            rows.append(row)
        elif damaged is not None and line.strip() and number < len(lines):
            damaged.append(number)
    return rows


@dataclass
class Clock:
    """Measures the seconds per phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.perf_counter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        begin = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - begin


class Log:
    """The output of rank 0; on other ranks every method does nothing."""

    def __init__(
        self,
        folder: RunFolder,
        total: int,
        start: int,
        *,
        trackers: Sequence[Tracker] = (),
        writer: Writer | None = None,
        active: bool,
    ) -> None:
        """writer: calls the trackers in its thread."""
        self.active = active
        self.folder = folder
        self.trackers = trackers
        self.writer = writer or Writer()
        self.win_rate: float | None = None
        """Win rate in the last evaluation."""
        self._said: set[str] = set()
        """Kinds of lines that are printed once."""
        if not active:
            return
        rows = [r for r in read_metrics(folder.metrics) if r["step"] <= start] if start else []
        self.have = {(r["kind"], r["step"], r.get("set")) for r in rows}
        write_atomic(folder.metrics, "".join(json.dumps(r) + "\n" for r in rows))
        self.file = folder.metrics.open("a", encoding="utf-8")
        self.steps = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, disable=None, smoothing=0.1)
        self.total = total
        self.start = start
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        if self.active:
            _write(text)

    def once(self, text: str, kind: str) -> None:
        """Print a line, unless one of this kind was printed before."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def missing(self, where: str, reasons: Counter[str]) -> None:
        """Print the most frequent reasons for missing rewards that the run has not printed yet."""
        for reason, count in reasons.most_common(REASONS_SHOWN):
            if len(self._said) < 10 * REASONS_SHOWN:
                self.once(f"missing in {where}: {count} × {reason}", kind=reason)

    def row(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one row, unless a resumed run already has it; non-finite numbers are written as null. Metrics of
        single denoising steps, which may differ between training steps, go to the trackers only."""
        if not self.active or (kind, step, values.get("set")) in self.have:
            return
        if step == self.start:  # the evaluation before the first step does not count towards the time left
            self.began = time.monotonic()
            self.steps.unpause()
        clean = finite(dict(values))
        kept = {key: value for key, value in clean.items() if not key.startswith(BY_STEP)}
        self.file.write(json.dumps({"kind": kind, "step": step, **kept}) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        numbers = {f"{kind}/{key}": value for key, value in clean.items() if isinstance(value, (int, float))}
        pictures = partial(evaluation_pictures, self.folder, values["set"], step) if kind == "eval" else dict
        if self.trackers:
            self.writer.put(partial(self._track, step, numbers, pictures))

    def _track(self, step: int, numbers: Mapping[str, float], pictures: Callable[[], Pictures]) -> None:
        shown = pictures()
        for tracker in self.trackers:
            tracker.log(step, numbers, shown)

    def show(self, step: int, pictures: Callable[[], Pictures]) -> None:
        """Send images to the trackers, if there are any."""
        if self.trackers:
            shown = pictures()
            self.writer.put(partial(self._track, step, {}, lambda: shown), pictures=True)

    def step(self, step: int, values: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Print the summary line of a finished step; the remaining time extrapolates from all steps and evaluations."""
        if self.active:
            self.steps.update(1)
            left = (time.monotonic() - self.began) / (step - self.start) * (self.total - step)
            _write(step_line(step, self.total, values, seconds, left, self.win_rate))

    def bar(self, name: str, unit: str, total: int) -> tqdm:
        """A progress bar for a part of a step, below the bar of the steps; only on a terminal, removed when done."""
        hidden = None if self.active and total else True
        return tqdm(total=total, desc=name, unit=unit, leave=False, position=1, dynamic_ncols=True, disable=hidden)

    def close(self) -> None:
        """Wait for the writer, then flush and close all outputs."""
        self.writer.close()
        if self.active:
            self.steps.close()
            self.file.close()
            for tracker in self.trackers:
                tracker.close()


def step_line(
    step: int,
    total: int,
    values: Mapping[str, float],
    seconds: Mapping[str, float],
    left_s: float = 0.0,
    win_rate: float | None = None,
) -> str:
    """The summary line of a step: progress, last evaluation's win rate, rewards, judge, update, times."""
    parts = [f"step {step:>{len(str(total))}}/{total} ({step / total:.0%}, {tqdm.format_interval(left_s)} left)"]
    if win_rate is not None:
        parts.append(f"held-out win rate {win_rate:.3f}")
    for name, key in rewards_of_step(values).items():
        spread = values.get(f"{key}_std", 0.0)
        parts.append(f"{name} {values[key]:.3f}" + f"±{spread:.3f}" * (spread > 0))
    parts += [text.format(values[key]) for key, text in IN_LINE.items() if key in values]
    if "policy/ratio_max" in values:
        parts.append(f"|Δratio| ≤ {max(1 - values['policy/ratio_min'], values['policy/ratio_max'] - 1):.1e}")
    parts += [text.format(values[key]) for key, text in IN_LINE_IF_ABOVE_0.items() if values.get(key)]
    if values.get("updates_skipped"):
        parts.append(f"{values['updates_skipped']:.0f} of {values['updates']:.0f} updates skipped: gradient not finite")
    if not values.get("samples_trained", 1.0):
        parts.append("nothing to train on: no group's rewards differ")
    phases = " ".join(f"{name} {s:.2f}" for name, s in seconds.items())
    speed = [text.format(values[key]) for key, text in SPEED.items() if key in values]
    return " · ".join([*parts, f"{sum(seconds.values()):.2f} s ({phases})", *speed])


def evaluation_pictures(folder: RunFolder, name: str, step: int) -> Pictures:
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


def _write(text: str) -> None:
    """Print a line above the bar and flush, so that it also appears at once in a redirected log file."""
    tqdm.write(text)
    sys.stdout.flush()


def finite(value: Any) -> Any:
    """The value with None in place of NaN and ±inf, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- trackers -------------------------------------------------------------------------------------------------------


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
