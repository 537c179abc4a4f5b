"""`prefgrpo score --reward-spec SPEC --images DIR --prompts FILE`: score a folder of images or clips.

Files are scored in fixed units of whole groups, unit k by rank k mod world size, and every process uses the same number
of threads. Invariant: the JSON is byte-identical for any number of processes (except that a judge which batches
requests dynamically may change the last digits).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from prefgrpo.config.recipe import ConfigError, merge, read_yaml
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import CLIPS, Generated, find, read_media
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, read_prompts
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, check_name, load_class, parse_reward_spec
from prefgrpo.rewards.base import Reward, Sample, Score
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rewards.wire import score_row
from prefgrpo.run.judging import reward_options, unsupported

STDOUT = "-"
REASONS = 3
"""Reasons for missing scores that the table shows per reward."""
Groups = list[list[int]]
"""File indices of each group."""


def main(argv: Sequence[str]) -> int:
    """`prefgrpo score --reward-spec SPEC --images DIR --prompts FILE …`: all arguments are named, none positional."""
    return tyro.cli(score, args=list(argv), prog="prefgrpo score")


Unit = tuple[int, Groups]
"""Groups of equal size that are scored together: (index of the first one, their files)."""


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
        options: YAML files of options per reward, {clip: {model: …}}; their `judge` as in an entry of `rewards`.
        out: JSON file to write, - for standard output (and the table on standard error); none: a table only.
        source: Folder of the source images of edits, one per prompt; none: the prompts' source_image column.
        batch: Files read and scored together (whole groups); 0: 32 images or 4 clips.
        threads: CPU threads per process; the last bits of a score may depend on it.
        device: auto, cpu or cuda: default device of rewards that do not set their own.
        seed: Seed of pair plans.
        deadline_s: Longest wait for a judge or a reward server, per batch, in seconds; 0: ten times the request limit.
    """
    if batch < 0 or threads < 1 or not deadline_s >= 0:
        message = "expected batch of at least 0, threads of at least 1 and deadline-s of at least 0"
        raise ConfigError([f"{message}, got {batch}, {threads} and {deadline_s}"])
    piped = str(out) == STDOUT
    if out and not piped:
        _check_writable(out)
    weights = parse_reward_spec(reward_spec)
    files = find(images, read_prompts(prompts, unique=False))
    files = _with_sources(files, source) if source else files
    clips = any(_is_clip(g) for g in files)
    if clips and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(["score: reading clips needs imageio-ffmpeg: pip install 'prefgrpo[video]'"])
    _check_inputs({name: load_class(name) for name in weights}, files)  # before anything is loaded
    batch = batch or (4 if clips else 32)
    world = parallel.join(device)
    torch.set_num_threads(threads)
    own = _options(options, weights, device)
    for name in set(own) - set(weights):
        check_name(name)  # options of other rewards are allowed, misspelt names are not
    keywords = {}
    for name, weight in weights.items():
        judge = own.get(name, {}).pop("judge", {})
        entry = RewardEntry(name, weight, own.get(name, {}), judge)
        keywords[name] = reward_options(Config(seed=seed), entry, world)
    rewards = build(weights, keywords)
    _check_inputs(rewards, files)
    for size in sorted({len(group) for group in _groups(files)}):
        try:
            Scorer(rewards, size)
        except ValueError as error:
            raise ConfigError([f"--reward-spec: {error}"]) from error
    scores = score_files(rewards, files, batch, seed, deadline_s, world)
    for reward in rewards.values():
        reward.close()
    if not world.main:
        return 0
    result = summary(images, weights, files, scores)
    print(table(result), file=sys.stderr if piped else sys.stdout)
    if piped:
        print(_json(result), end="")
    elif out:
        write_atomic(out, _json(result))
        print(f"{len(files)} files; all scores are in {out}")
    return int(any(row["mean"] is None for row in result["rewards"].values()))


def _options(files: Sequence[Path], names: Iterable[str], device: str) -> dict[str, dict[str, Any]]:
    """Options per reward, merged from all files; `device` where a reward takes and lacks one. Raises ConfigError."""
    options: dict[str, dict[str, Any]] = {}
    for file in files:
        options = merge(options, read_yaml(file))
    if wrong := [name for name, own in options.items() if not isinstance(own, dict)]:
        expected = "expected options of a reward, e.g. {model: …}"
        raise ConfigError([f"--options: {name}: {expected}, got {options[name]!r}" for name in wrong])
    for name in names if device != "auto" else ():
        if "device" in signature(load_class(name)).parameters and "url" not in options.get(name, {}):
            options[name] = {"device": device} | options.get(name, {})
    return options


def _with_sources(files: Sequence[Generated], folder: Path) -> list[Generated]:
    """The files, with source images from a folder set in their prompts."""
    prompts = {g.prompt.id: replace(g.prompt, meta={}) for g in files}
    sources: dict[int, tuple[str, ...]] = {}
    for g in find(folder, list(prompts.values())):
        sources[g.prompt.id] = (*sources.get(g.prompt.id, ()), str(g.file))
    return [replace(g, prompt=replace(g.prompt, source=sources[g.prompt.id])) for g in files]


def _is_clip(generated: Generated) -> bool:
    return generated.file.suffix.lower() in CLIPS


def _check_inputs(rewards: Mapping[str, Any], files: Sequence[Generated]) -> None:
    """Raise ConfigError if rewards, or reward classes, cannot score these files."""
    prompts = list({g.prompt.id: g.prompt for g in files}.values())
    kinds = sorted({"video" if _is_clip(g) else "image" for g in files})
    if errors := [m for k in kinds for m in unsupported(k, "--reward-spec:", "the folder holds", rewards, prompts)]:
        raise ConfigError(list(dict.fromkeys(errors)))


def _groups(files: Sequence[Generated]) -> Groups:
    """File indices of each (prompt, sources), in order of first appearance."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for k, g in enumerate(files):
        groups.setdefault((g.prompt.text, g.prompt.source), []).append(k)
    return list(groups.values())


def _units(groups: Groups, batch: int) -> list[Unit]:
    """Units of consecutive groups of equal size, with about `batch` files each."""
    units: list[Unit] = []
    first = 0
    for size, same in groupby(groups, key=len):
        run, each = list(same), max(1, batch // size)
        units += [(first + start, run[start : start + each]) for start in range(0, len(run), each)]
        first += len(run)
    return units


def score_files(
    rewards: Mapping[str, Reward], files: Sequence[Generated], batch: int, seed: int, deadline_s: float, world: World
) -> list[dict[str, Score]]:
    """Scores of every file by reward, in the files' order, on every rank."""
    mine = _units(_groups(files), batch)[world.dp_index :: world.dp_size] if world.is_dp_leader else []
    scored: list[tuple[int, dict[str, Score]]] = []
    total = sum(len(group) for _, groups in mine for group in groups)
    with tqdm(total=total, unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for first, groups in mine:
            scorer = Scorer(rewards, len(groups[0]), deadline_s or None, seed)
            scorer.begin(0, range(first, first + len(groups)))
            scored += _score_unit(first, groups, files, scorer)
            bar.update(sum(map(len, groups)))
    by_file = dict(world.gather_items(scored))
    return [by_file[k] for k in range(len(files))]


def _score_unit(
    first: int, groups: Groups, files: Sequence[Generated], scorer: Scorer
) -> list[tuple[int, dict[str, Score]]]:
    """(file index, its scores) per file; an unreadable file is missing for every reward, with the error as reason."""
    members = [(i, m, k) for i, group in enumerate(groups) for m, k in enumerate(group)]
    unread: dict[int, Score] = {}
    for i, m, k in members:
        prompt = files[k].prompt
        try:
            source = tuple(Media(np.asarray(image)) for image in prompt.images())
            sample = Sample(prompt.text, read_media(files[k].file), source, prompt.meta)
        except DataError as error:
            unread[k] = Score(None, str(error))
        else:
            scorer.add(first + i, m, sample)
    results = scorer.finish().groups
    return [(k, {n: unread.get(k, scored[i].scores[m]) for n, scored in results.items()}) for i, m, k in members]


def summary(
    folder: Path, weights: Mapping[str, float], files: Sequence[Generated], scores: Sequence[Mapping[str, Score]]
) -> dict[str, Any]:
    """Contents of the JSON file: means per reward, the weighted total, and every file's values or reasons."""
    rows: list[dict[str, Any]] = []
    trained = {name: weight for name, weight in weights.items() if weight}
    for generated, given in zip(files, scores, strict=True):
        cells = {name: score_row(score) for name, score in given.items()}
        values = [(weight, cells[name]["value"]) for name, weight in trained.items()]
        whole = values and all(value is not None for _, value in values)
        file = generated.file.relative_to(folder) if generated.file.is_relative_to(folder) else generated.file
        rows.append(
            {"file": str(file), "index": generated.prompt.id, "prompt": generated.prompt.text, "scores": cells}
            | {"total": math.fsum(weight * value for weight, value in values) if whole else None}
        )
    means = {name: _mean([row["scores"][name]["value"] for row in rows]) for name in weights}
    return {
        "rewards": {name: {"weight": weight} | means[name] for name, weight in weights.items()},
        "total": _mean([row["total"] for row in rows]),
        "files": rows,
    }


def _mean(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean of the known values, and the number of missing ones."""
    there = [value for value in values if value is not None]
    return {"mean": math.fsum(there) / len(there) if there else None, "missing": len(values) - len(there)}


def table(result: Mapping[str, Any]) -> str:
    """One line per reward, followed by the most common reasons for missing scores."""
    lines = [f"{'reward':<44} {'weight':>8} {'mean':>12} {'missing':>8}"]
    for name, row in [*result["rewards"].items(), ("total", {"weight": None, **result["total"]})]:
        weight, mean = ("" if row[k] is None else f"{row[k]:.6g}" for k in ("weight", "mean"))
        lines.append(f"{name:<44} {weight:>8} {mean:>12} {row['missing']:>8}")
        reasons = Counter(f["scores"][name].get("reason") for f in result["files"] if name in f["scores"])
        why = [f"  {count} × {reason}" for reason, count in reasons.most_common() if reason]
        lines += why[:REASONS] + [f"  and {len(why) - REASONS} other reasons (--out has all)"] * (len(why) > REASONS)
    return "\n".join(lines)


def _json(result: Mapping[str, Any]) -> str:
    """The JSON text; lone surrogates in prompts, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def _check_writable(file: Path) -> None:
    """Create the file's folder. Raises ConfigError, before anything is scored, if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out {file}: {error.strerror}"]) from error
    if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
        raise ConfigError([f"--out {file}: expected a file in a folder that can be written; - is standard output"])
