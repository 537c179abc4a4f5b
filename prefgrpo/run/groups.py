"""A run's judged groups: a few that the report and trackers show, and pairs to train on, which the tracker `pairs`
writes and `data.pairs: RUN` reads.

With the tracker, RUN/pairs has every judged group: its images as lossless WebP, and a table GROUP.jsonl with a row per
judging reward, in the format of `data.pair_rows`. Without it, a run keeps only the few groups of its report.
Invariant: a group's files depend only on its number, so a run that repeats steps replaces theirs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.config.recipe import read_yaml
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import save_images, write_atomic
from prefgrpo.data.pairs import PairGroup, read_pairs
from prefgrpo.data.prompts import Prompt
from prefgrpo.data.stored import Shape, StoredMedia
from prefgrpo.data.tables import DataError
from prefgrpo.data.writer import Writer
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.render import stills
from prefgrpo.rollout.source_images import as_arrays
from prefgrpo.run.folder import RunFolder, run_of
from prefgrpo.run.log import PAIRS, Log, Pictures

MOST_GROUPS = 3
"""Groups of a step that are shown."""
SIDE = 256
"""Shorter side in pixels at which trackers show an image of a group, or a little more."""


def open_pairs(path: str, world: World) -> list[PairGroup]:
    """The groups of `data.pairs`: rank 0 reads and decodes everything once, and sends the list to the others. Raises
    DataError on all ranks."""
    groups = world.on_main(partial(read, path), DataError)
    return world.all_gather_object(groups)[0] or []


def read(path: str) -> list[PairGroup]:
    """The groups of a table, or of a run's folder. Raises DataError."""
    run = run_of(Path(path)) if Path(path).is_dir() else None
    if run is None:
        return read_pairs(path)
    tables = run.all_pair_tables()
    groups = [group for table in tables for group in read_pairs(table)] if tables else list(_of_report(run))
    if not groups:
        raise DataError(f"data.pairs: {run.root} has no judged groups; runs with `trackers: [pairs]` keep theirs")
    return [replace(group, prompt=replace(group.prompt, id=k)) for k, group in enumerate(groups)]


def _of_report(run: RunFolder) -> Iterator[PairGroup]:
    """The groups that a run stored for its report. Raises DataError if they are frames of clips."""
    width = read_yaml(run.config).get("rollout", {}).get("width")
    unjudged = 0
    for file in run.all_groups():
        with np.load(file, allow_pickle=False) as arrays:
            shape = arrays["images"].shape
            tables = {name: arrays[name] for name in ("prompts", "wins", "counts")}
            sources = arrays["source_counts"] if "source_counts" in arrays else np.zeros(shape[0], np.int64)
        if width and shape[3] != width:
            raise DataError(f"data.pairs: {file} holds only a few frames of every clip; expected images")
        first = np.concatenate([[0], np.cumsum(sources)])
        for k, (text, sums, counts) in enumerate(zip(*tables.values(), strict=True)):
            if not counts.any():
                unjudged += 1
                continue
            with np.errstate(invalid="ignore"):
                wins = sums / counts
            inside = tuple(StoredMedia(str(file), ("sources", n)) for n in range(first[k], first[k + 1]))
            samples = tuple(StoredMedia(str(file), ("images", k, m)) for m in range(shape[1]))
            shapes = (Shape(shape[2], shape[3]),) * shape[1]
            prompt = Prompt(0, str(text), {}, inside, k + 1)
            where = f"{file}, group {k + 1}"
            yield PairGroup(prompt, samples, shapes, wins, counts.astype(np.float64), where=where)
    if unjudged:
        warnings.warn(f"{run.root}: left out {unjudged} groups without a verdict", stacklevel=2)


def store(folder: RunFolder, step: int, scores: StepScores, writer: Writer) -> None:
    """Write the judged groups of this process in a step, on the writer's thread."""
    writer.put(partial(_store, folder, step, scores), pictures=True)


def _store(folder: RunFolder, step: int, scores: StepScores) -> None:
    folder.pairs.mkdir(exist_ok=True)
    for k, (group, members) in enumerate(scores.samples.items()):
        samples = [members[m] for m in sorted(members)]
        files = [folder.pair_image(group, str(m)) for m in range(len(samples))]
        sources = [folder.pair_image(group, f"source_{n}") for n in range(len(samples[0].source))]
        shown = {"samples": [file.name for file in files]}
        if sources:
            shown["source_image"] = [file.name for file in sources]
        judged = {name: of_groups[k] for name, of_groups in scores.comparisons.items() if of_groups[k, 1].any()}
        rows = [_row(step, name, comparisons, samples[0]) | shown for name, comparisons in judged.items()]
        if rows:
            media = [*(sample.media for sample in samples), *samples[0].source]
            for file, image in zip([*files, *sources], media, strict=True):
                write_atomic(file, image.webp)
            write_atomic(folder.pair_table(group), "".join(json.dumps(row) + "\n" for row in rows))


def _row(step: int, reward: str, comparisons: Any, sample: Sample) -> dict[str, Any]:
    """Verdicts and prompt of a group. comparisons: [2, n, n] sums and numbers of verdicts; sample: one of the group."""
    sums, counts = comparisons
    wins = (sums / np.maximum(counts, 1)).astype(object)
    wins[counts == 0] = None
    own = {name: value for name, value in sample.meta.items() if isinstance(value, (str, int, float, bool))}
    row = own | {"prompt": sample.prompt, "wins": wins.tolist(), "counts": counts.tolist()}
    return row | {"reward": reward, "step": step}


# ---- what a run shows -----------------------------------------------------------------------------------------------


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
