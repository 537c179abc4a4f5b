"""`prefgrpo score --reward-spec SPEC --images DIR --prompts FILE`: what a folder of images or clips is worth.

Files are scored in fixed units of whole groups, unit k by rank k mod world size, and every process computes with the
same number of threads. Invariant: the JSON does not depend on the number of processes, byte for byte (a judge that
batches requests as they come may answer in other last digits).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from prefgrpo.config.recipe import read_yaml
from prefgrpo.config.schema import Config, ConfigError, RewardConfig
from prefgrpo.data.file_names import CLIPS, Generated, find, read_media
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, read_prompts
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, load_class, parse_reward_spec
from prefgrpo.rewards.base import Reward, Sample, Score
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rewards.wire import score_row
from prefgrpo.run.judging import misfits, reward_options

STDOUT = "-"
Groups = list[list[int]]
"""Numbers of files, group by group."""


def main(argv: Sequence[str]) -> int:
    """`prefgrpo score --reward-spec SPEC --images DIR --prompts FILE …`: all by name, nothing by place."""
    return tyro.cli(score, args=list(argv), prog="prefgrpo score")


@dataclass(frozen=True)
class Unit:
    """Groups of one size that are scored together."""

    first: int
    """Number of the first group."""
    groups: Groups
    """Numbers of each group's files."""


def score(
    reward_spec: str,
    images: Path,
    prompts: Path,
    options: tuple[Path, ...] = (),
    out: Path | None = None,
    source: Path | None = None,
    batch: int = 0,
    threads: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    seed: int = 0,
    deadline_s: float = 0.0,
) -> int:
    """Score a folder of images or clips (also under torchrun).

    Args:
        reward_spec: Rewards and weights: '["clip","aesthetic"]', "clip:0.7,pickscore:0.3".
        images: Folder of the files: named as by `prefgrpo generate`, by a `file` column, or in the prompts' order.
        prompts: Prompts: txt, csv, jsonl or parquet.
        options: YAML files of options per reward, as reward.options of a recipe: {clip: {model: …}}.
        out: JSON file to write, - for standard output (and the table on standard error); none: a table only.
        source: Folder of the source images of edits, one per prompt; none: the prompts' source_image column.
        batch: Files that are read and scored together (whole groups); 0: 32 images or 4 clips.
        threads: CPU threads per process; the last bits of a score may depend on it.
        device: auto, cpu or cuda: where rewards compute whose options do not say it.
        seed: Seed of pair plans.
        deadline_s: Longest wait for a judge or a reward server, per batch, in seconds; 0: ten requests' time.
    """
    if batch < 0 or threads < 1 or not deadline_s >= 0:
        message = "expected batch of at least 0, threads of at least 1 and deadline-s of at least 0"
        raise ConfigError([f"{message}, got {batch}, {threads} and {deadline_s}"])
    if out and str(out) != STDOUT:
        _check_writable(out)
    weights = parse_reward_spec(reward_spec)
    found = find(images, read_prompts(prompts, unique=False))
    found = _with_sources(found, source) if source else found
    clips = any(_is_clip(g) for g in found)
    if clips and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(["score: reading clips needs imageio-ffmpeg: pip install 'prefgrpo[video]'"])
    _check_inputs({name: load_class(name) for name in weights}, found)  # before anything is loaded
    batch = batch or (4 if clips else 32)
    world = parallel.start(device)
    torch.set_num_threads(threads)
    try:
        given = _read_options(options)
        given = _with_device(given, weights, device) if device != "auto" else given
        config = Config(reward=RewardConfig(spec=reward_spec, options=given), seed=seed)
        rewards = build(weights, reward_options(config, weights, config.reward.options, None, world))
        _check_inputs(rewards, found)
        _check_sizes(rewards, found)
        scores = _score(rewards, found, batch, seed, deadline_s, world)
        for reward in rewards.values():
            reward.close()
    finally:
        parallel.stop()
    if not world.main:
        return 0
    result = summary(images, weights, found, scores)
    piped = str(out) == STDOUT
    print(table(result), file=sys.stderr if piped else sys.stdout)
    if piped:
        print(text_of(result), end="")
    elif out:
        write(out, result)
        print(f"{len(found)} files; every score is in {out}")
    return 1 if any(row["mean"] is None for row in result["rewards"].values()) else 0


def _read_options(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Options per reward of all files. Raises ConfigError for a value that is no mapping."""
    merged: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, own in read_yaml(file).items():
            if not isinstance(own, dict):
                raise ConfigError([f"{file}: {name}: expected options of a reward, e.g. {{model: …}}, got {own!r}"])
            merged[name] = merged.get(name, {}) | own
    return merged


def _with_device(options: dict[str, dict[str, Any]], names: Iterable[str], device: str) -> dict[str, dict[str, Any]]:
    """The options of these rewards with the device, where they take one and name none."""
    takes = [n for n in names if "device" in signature(load_class(n)).parameters and "url" not in options.get(n, {})]
    return options | {name: {"device": device} | options.get(name, {}) for name in takes}


def _with_sources(found: Sequence[Generated], folder: Path) -> list[Generated]:
    """The files with their prompts' source images out of a folder."""
    prompts = list({g.prompt.id: g.prompt for g in found}.values())
    sources: dict[int, tuple[str, ...]] = {}
    for g in find(folder, [replace(p, meta={}) for p in prompts]):
        sources[g.prompt.id] = (*sources.get(g.prompt.id, ()), str(g.file))
    return [replace(g, prompt=replace(g.prompt, source=sources[g.prompt.id])) for g in found]


def _is_clip(generated: Generated) -> bool:
    return generated.file.suffix.lower() in CLIPS


def _check_inputs(rewards: Mapping[str, Any], found: Sequence[Generated]) -> None:
    """Raise ConfigError for rewards, or classes of rewards, that do not take these files."""
    prompts = list({g.prompt.id: g.prompt for g in found}.values())
    kinds = sorted({"video" if _is_clip(g) else "image" for g in found})
    if mistakes := [m for k in kinds for m in misfits(k, "--reward-spec:", "the folder holds", rewards, prompts)]:
        raise ConfigError(list(dict.fromkeys(mistakes)))


def _check_sizes(rewards: Mapping[str, Reward], found: Sequence[Generated]) -> None:
    """Raise ConfigError for rewards that do not take groups of these sizes."""
    for size in sorted({len(group) for group in _groups(found)}):
        try:
            Scorer(rewards, size)
        except ValueError as error:
            raise ConfigError([f"--reward-spec: {error}"]) from error


def _groups(found: Sequence[Generated]) -> Groups:
    """The files of each (prompt, sources), in order of first appearance."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for k, g in enumerate(found):
        groups.setdefault((g.prompt.text, g.prompt.source), []).append(k)
    return list(groups.values())


def _units(groups: Groups, batch: int) -> list[Unit]:
    """Consecutive groups of one size, about `batch` files together."""
    units: list[Unit] = []
    first = 0
    for size, same in groupby(groups, key=len):
        run, each = list(same), max(1, batch // size)
        units += [Unit(first + start, run[start : start + each]) for start in range(0, len(run), each)]
        first += len(run)
    return units


def _score(
    rewards: Mapping[str, Reward],
    found: Sequence[Generated],
    batch: int,
    seed: int,
    deadline_s: float,
    world: World,
) -> list[dict[str, Score]]:
    """Scores of every file by reward, in the files' order, on every rank."""
    mine = _units(_groups(found), batch)[world.rank :: world.size]
    scored: list[tuple[int, dict[str, Score]]] = []
    total = sum(len(group) for unit in mine for group in unit.groups)
    with tqdm(total=total, unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for unit in mine:
            scores = _unit(unit, found, Scorer(rewards, len(unit.groups[0]), deadline_s or None, seed))
            scored += scores
            bar.update(len(scores))
    by_file = dict(world.gather_items(scored))
    return [by_file[k] for k in range(len(found))]


def _unit(unit: Unit, found: Sequence[Generated], scorer: Scorer) -> list[tuple[int, dict[str, Score]]]:
    """(number of the file, its scores); a file that cannot be read is missing under every reward, with that reason."""
    places = [(unit.first + i, m, k) for i, group in enumerate(unit.groups) for m, k in enumerate(group)]
    scorer.begin(0, range(unit.first, unit.first + len(unit.groups)))
    unread: dict[int, Score] = {}
    for number, member, k in places:
        try:
            sample = _sample(found[k])
        except DataError as error:
            unread[k] = Score(None, str(error))
            continue
        scorer.add(number, member, sample)
    results = scorer.finish().groups
    return [
        (k, {name: unread.get(k, groups[number - unit.first].scores[member]) for name, groups in results.items()})
        for number, member, k in places
    ]


def _sample(generated: Generated) -> Sample:
    prompt = generated.prompt
    source = tuple(Media(np.asarray(image)) for image in prompt.images())
    return Sample(prompt.text, read_media(generated.file), source, prompt.meta)


def summary(
    folder: Path, weights: Mapping[str, float], found: Sequence[Generated], scores: Sequence[Mapping[str, Score]]
) -> dict[str, Any]:
    """What the JSON file holds: means per reward, the weighted total, and every file's values or reasons."""
    rows, values, totals = [], {name: list[float]() for name in weights}, []
    for generated, given in zip(found, scores, strict=True):
        told = {name: score_row(score) for name, score in given.items()}
        here = {name: row["value"] for name, row in told.items() if row["value"] is not None}
        for name, value in here.items():
            values[name].append(value)
        summed = {name: weight for name, weight in weights.items() if weight}
        whole = summed and summed.keys() <= here.keys()
        total = math.fsum(weight * here[name] for name, weight in summed.items()) if whole else None
        totals += [] if total is None else [total]
        file = generated.file.relative_to(folder) if generated.file.is_relative_to(folder) else generated.file
        rows.append(
            {"file": str(file), "index": generated.prompt.id, "prompt": generated.prompt.text, "scores": told}
            | {"total": total}
        )
    return {
        "rewards": {n: {"weight": w, **_mean(values[n], len(rows))} for n, w in weights.items()},
        "total": _mean(totals, len(rows)),
        "files": rows,
    }


def _mean(values: Sequence[float], count: int) -> dict[str, Any]:
    """Mean of what is there, and how many are missing."""
    return {"mean": math.fsum(values) / len(values) if values else None, "missing": count - len(values)}


def table(result: Mapping[str, Any]) -> str:
    """One line per reward, with the commonest reason where something is missing."""
    lines = [f"{'reward':<44} {'weight':>8} {'mean':>12} {'missing':>8}"]
    for name, row in [*result["rewards"].items(), ("total", {"weight": None, **result["total"]})]:
        weight, mean = ("" if row[k] is None else f"{row[k]:.6g}" for k in ("weight", "mean"))
        lines.append(f"{name:<44} {weight:>8} {mean:>12} {row['missing']:>8}")
        told = [f["scores"][name]["reason"] for f in result["files"] if f["scores"].get(name, {}).get("reason")]
        if told:
            reason, count = Counter(told).most_common(1)[0]
            lines.append(f"  {count} × {reason}")
    return "\n".join(lines)


def text_of(result: Mapping[str, Any]) -> str:
    """The JSON; a lone surrogate of a prompt, which no file can hold, as its escape."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Write the JSON file, whole or not at all."""
    part = file.with_name(f".{os.getpid()}{file.name}")
    part.write_text(text_of(result), encoding="utf-8")
    part.replace(file)


def _check_writable(file: Path) -> None:
    """Make its folder. Raises ConfigError, before anything is scored, where the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out {file}: {error.strerror}"]) from error
    if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
        raise ConfigError([f"--out {file}: expected a file in a folder that can be written; - is standard output"])
