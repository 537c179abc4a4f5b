"""`prefgrpo score --rewards SPEC --images DIR --prompts FILE`: score a folder of images or clips.

Files are scored in fixed units of whole groups, unit k by rank k mod world size. Invariant: the JSON is byte-identical
for any number of processes with the same number of CPU threads (except that a judge that batches requests dynamically
may change the last digits).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tqdm import tqdm

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError, read_yaml
from prefgrpo.config.rewards import entries
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import Generated, find
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, read_prompts
from prefgrpo.data.stored import CLIPS, StoredMedia, read_media
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.run.errors import entry_errors, refuse
from prefgrpo.run.rewards import Rewards

REASONS = 3
"""Reasons for missing scores that the table shows per reward."""
Groups = list[list[int]]
"""File indices of each group."""
Unit = tuple[int, Groups]
"""Groups of equal size that are scored together: (index of the first one, their files)."""


def main(argv: Sequence[str]) -> int:
    """`prefgrpo score --rewards SPEC --images DIR --prompts FILE …`: all arguments are named, none positional."""
    return tyro.cli(score, args=list(argv), prog="prefgrpo score")


@attention_of_a_run()
def score(rewards: str, images: Path, prompts: Path, out: Path | None = None, batch: int = 0) -> int:
    """Score a folder of images or clips (also under torchrun).

    Args:
        rewards: Rewards and weights: '["clip","aesthetic"]', "clip:0.7,pickscore:0.3", or a YAML file with the sections
            `rewards` and `judge` of a recipe.
        images: Folder of the files: named as by `prefgrpo generate`, by a `file` column, or in the prompts' order.
        prompts: Prompts: txt, csv, jsonl or parquet.
        out: JSON file to write; none: a table only.
        batch: Files read and scored together (whole groups); 0: 32 images or 4 clips.
    """
    if out:
        _check_writable(out)
    config = _config(rewards)
    refuse(entry_errors(config, "--rewards", config.rewards))
    files = find(images, read_prompts(prompts, unique=False))
    kinds = sorted({"video" if g.file.suffix.lower() in CLIPS else "image" for g in files})
    if "video" in kinds and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(["score: reading clips needs imageio-ffmpeg: pip install -e '.[video]' in the checkout"])
    world = parallel.join()
    made = Rewards(config, world, kinds)
    built = made.build("--rewards", config.rewards, list({g.prompt.id: g.prompt for g in files}.values()))
    for size in sorted({len(group) for group in _groups(files)}):
        try:
            Scorer(built, size)
        except ValueError as error:
            raise ConfigError([f"--rewards: {error}"]) from error
    scores = score_files(built, files, batch or (4 if "video" in kinds else 32), config, world)
    made.close()
    if not world.main:
        return 0
    result = summary(images, {entry.name: entry.weight for entry in config.rewards}, files, scores)
    print(table(result))
    if out:
        write_atomic(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"{len(files)} files; all scores are in {out}")
    return int(any(row["mean"] is None for row in result["rewards"].values()))


def _config(rewards: str) -> Config:
    """A configuration with these rewards and, from a recipe, its judge. Raises ConfigError."""
    recipe: dict[str, Any] = {"rewards": rewards}
    if Path(rewards).suffix in (".yaml", ".yml"):
        recipe = read_yaml(rewards)
    try:
        listed = entries(recipe.get("rewards", ()))
    except ValueError as error:
        raise ConfigError([f"--rewards: {error}"]) from error
    if not listed:
        raise ConfigError([f"--rewards: expected for example clip:0.7,pickscore:0.3, got none in {rewards!r}"])
    return Config(rewards=listed, judge=section(JudgeConfig, recipe.get("judge", {}), "judge"))


def _groups(files: Sequence[Generated]) -> Groups:
    """File indices of each (prompt, sources), in order of first appearance."""
    groups: dict[tuple[str, tuple[str | StoredMedia, ...]], list[int]] = {}
    for k, g in enumerate(files):
        groups.setdefault((g.prompt.text, g.prompt.source), []).append(k)
    return list(groups.values())


def _units(groups: Groups, batch: int) -> list[Unit]:
    """Units of consecutive groups of equal size, with about `batch` files each."""
    units: list[Unit] = []
    first = 0
    for size, same in groupby(groups, key=len):
        run = list(same)
        each = max(1, batch // size)
        units += [(first + start, run[start : start + each]) for start in range(0, len(run), each)]
        first += len(run)
    return units


def score_files(
    rewards: Mapping[str, Reward], files: Sequence[Generated], batch: int, config: Config, world: World
) -> list[dict[str, Answer]]:
    """Scores of every file by reward, in the files' order, on every rank; files of one prompt form a group."""
    mine = _units(_groups(files), batch)[world.dp_index :: world.dp_size] if world.is_dp_leader else []
    scored: list[tuple[int, dict[str, Answer]]] = []
    total = sum(len(group) for _, groups in mine for group in groups)
    with tqdm(total=total, unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for first, groups in mine:
            scorer = Scorer(rewards, len(groups[0]), config.judge.deadline_s, config.seed)
            scorer.begin(0, range(first, first + len(groups)))
            scored += _score_unit(first, groups, files, scorer)
            bar.update(sum(map(len, groups)))
    by_file = dict(world.gather_items(scored))
    return [by_file[k] for k in range(len(files))]


def _score_unit(
    first: int, groups: Groups, files: Sequence[Generated], scorer: Scorer
) -> list[tuple[int, dict[str, Answer]]]:
    """(file index, its scores) per file; an unreadable file is missing for every reward, with the error as reason."""
    members = [(i, m, k) for i, group in enumerate(groups) for m, k in enumerate(group)]
    unread: dict[int, Answer] = {}
    for i, m, k in members:
        prompt = files[k].prompt
        try:
            source = tuple(Media(np.asarray(image)) for image in prompt.images())
            sample = Sample(prompt.text, read_media(files[k].file), source, prompt.meta)
        except DataError as error:
            unread[k] = Answer(None, str(error))
        else:
            scorer.add(first + i, m, sample)
    results = scorer.finish().scores
    return [(k, {n: unread.get(k, scored[i][m]) for n, scored in results.items()}) for i, m, k in members]


def summary(
    folder: Path, weights: Mapping[str, float], files: Sequence[Generated], scores: Sequence[Mapping[str, Answer]]
) -> dict[str, Any]:
    """Contents of the JSON file: means per reward, the weighted total, and every file's values or reasons."""
    rows: list[dict[str, Any]] = []
    trained = {name: weight for name, weight in weights.items() if weight}
    for generated, of_file in zip(files, scores, strict=True):
        cells = {name: score.row() for name, score in of_file.items()}
        values = [(weight, cells[name]["value"]) for name, weight in trained.items()]
        complete = values and all(value is not None for _, value in values)
        file = generated.file.relative_to(folder) if generated.file.is_relative_to(folder) else generated.file
        rows.append(
            {"file": str(file), "index": generated.prompt.id, "prompt": generated.prompt.text, "scores": cells}
            | {"total": math.fsum(weight * value for weight, value in values) if complete else None}
        )
    means = {name: _mean([row["scores"][name]["value"] for row in rows]) for name in weights}
    return {
        "rewards": {name: {"weight": weight} | means[name] for name, weight in weights.items()},
        "total": _mean([row["total"] for row in rows]),
        "files": rows,
    }


def _mean(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean of the values that exist, and the number of missing ones."""
    there = [value for value in values if value is not None]
    return {"mean": math.fsum(there) / len(there) if there else None, "missing": len(values) - len(there)}


def table(result: Mapping[str, Any]) -> str:
    """One line per reward, followed by the most common reasons for missing scores."""
    lines = [f"{'reward':<44} {'weight':>8} {'mean':>12} {'missing':>8}"]
    for name, row in [*result["rewards"].items(), ("total", {"weight": None, **result["total"]})]:
        weight, mean = ("" if row[k] is None else f"{row[k]:.6g}" for k in ("weight", "mean"))
        lines.append(f"{name:<44} {weight:>8} {mean:>12} {row['missing']:>8}")
        reasons = Counter(f["scores"][name].get("reason") for f in result["files"] if name in f["scores"])
        lines += [f"  {count} × {reason}" for reason, count in reasons.most_common(REASONS + 1) if reason]
    return "\n".join(lines)


def _check_writable(file: Path) -> None:
    """Create the file's folder. Raises ConfigError, before anything is scored, if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out {file}: {error.strerror}"]) from error
    if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
        raise ConfigError([f"--out {file}: expected a file in a folder that can be written"])
