"""What a run is made from: its own copies of what may be moved away, and fingerprints that tell a resume what changed.

The copies are in RUN/inputs: prompt files, templates that are files, and the LoRA that `train.lora_from` continues. A
file's fingerprint is its size with its content, or of a large one with parts of it; its name and time do not count, so
what was copied or moved is the same. Prompts and model make the run: another one is refused. The rest is told once.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefgrpo.config.loading import from_dict, to_dict
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic, write_folder
from prefgrpo.data.prompts import Prompt, fingerprint
from prefgrpo.data.stored import file_digest
from prefgrpo.models import family, lora_files
from prefgrpo.models.folder import components_of, locate
from prefgrpo.models.weights import locate_lora
from prefgrpo.rewards import PYTHON, load_class
from prefgrpo.run.checkpoint import CheckpointError, read_meta
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.judging import pairwise_templates

MAKES_THE_RUN = ("prompts", "pairs", "model's")
"""First words of what a resume may not change."""
MAY_BE_GONE = ("model's", "LoRA")
"""First words of what a run may go on without: text encoders whose embeddings are stored, a LoRA that was copied."""


def own_inputs(config: Config, folder: RunFolder) -> Config:
    """The configuration with the run's copies in place of files that are gone, and of the LoRA that a run with a
    checkpoint continues."""
    copies = {file: folder.input_copy(file) for file in _files(config) if not Path(file).is_file()}
    if config.train.lora_from and folder.latest():
        copies[config.train.lora_from] = folder.first_lora
    there = {name: str(copy) for name, copy in copies.items() if copy.exists()}
    return from_dict(_replaced(to_dict(config), there)) if there else config


def keep_inputs(config: Config, folder: RunFolder, first: bool) -> None:
    """Copy what may be moved away into the run folder; first: the run has no checkpoint yet."""
    for file in _files(config):
        copy = folder.input_copy(file)
        if Path(file).is_file() and Path(file) != copy:
            copy.parent.mkdir(exist_ok=True)
            write_atomic(copy, Path(file).read_bytes())
    if config.train.lora_from and first:
        denoisers = family(config.family).denoisers
        source = locate_lora(config.train.lora_from, denoisers[1:])
        write_folder(folder.first_lora, lambda inside: _copy_lora(source, inside, denoisers))


def fingerprints(
    config: Config, prompts: Sequence[Prompt], sets: Mapping[str, Sequence[Prompt]], lora_from: str
) -> dict[str, str]:
    """What the run is made from, in words → its fingerprint. lora_from: as it was given, not the run's copy."""
    root = locate(config.model)
    found = {"prompts": fingerprint(prompts)}
    found |= {f"prompts of {name}": fingerprint(of_set) for name, of_set in sets.items()}
    for part, (library, _) in components_of(root).items():
        files = sorted(file for file in (root / part).rglob("*") if file.is_file() and library)
        if files:
            found[f"model's {part}"] = _digest([(f.relative_to(root).as_posix(), file_digest(f)) for f in files])
    for column in {name: None for prompt in prompts for name in prompt.meta}:
        found[f"column {column} of the prompts"] = _digest([prompt.meta.get(column) for prompt in prompts])
    for entry in (*config.rewards, *config.measured):
        file = None if PYTHON in entry.options else inspect.getsourcefile(load_class(entry.reward))
        if file and not load_class(entry.reward).__module__.startswith("prefgrpo."):
            found[f"code of the reward {entry.name}"] = file_digest(file)
    templates = pairwise_templates((*config.rewards, *config.measured))
    found |= {f"template of {name}": _digest(asdict(replace(t, name=""))) for name, t in templates.items()}
    if Path(lora_from).exists() and lora_from:
        found["LoRA of train.lora_from (the run goes on from its copy)"] = file_digest(
            lora_files.locate(locate_lora(lora_from))
        )
    return found


def check_goes_on(config: Config, folder: RunFolder, newest: Path, now: Mapping[str, str]) -> list[str]:
    """Lines about what changed since a checkpoint. Raises CheckpointError if the run cannot go on from there."""
    meta = read_meta(newest)
    before = meta.get("inputs")
    if before is None:
        raise CheckpointError(f"{newest} was written by an older version, which noted no inputs: choose another name")
    gone = tuple(name for name in before if name.startswith(MAY_BE_GONE) and name not in now)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in gone]
    if fixed := [name for name in names if name.startswith(MAKES_THE_RUN)]:
        which = f"{config.data.prompts} or another file of prompts has different prompts"
        if config.data.pairs:
            which = f"{config.data.pairs} or a file of prompts has different prompts, images or verdicts"
        what = f"{config.model} has other weights or settings" if fixed[0].startswith("model's") else which
        raise CheckpointError(
            f"{what} than when {folder.root} was started ({', '.join(fixed)}); resume with the old ones, or choose "
            "another name"
        )
    if meta["step"] > config.train.steps:
        done = f"{folder.root} has done {meta['step']} steps: expected train.steps of at least that"
        raise CheckpointError(f"{done}, got {config.train.steps}; to use an earlier state, give a checkpoint")
    return [f"changed since: the {name}" for name in names]


def _files(config: Config) -> Iterator[str]:
    """The prompt files, and the templates that are files."""
    e = config.eval
    templates = [str(entry.options.get("template", "")) for entry in (*config.rewards, *e.rewards)]
    yield from filter(None, (config.data.prompts, e.file, e.final_prompts))
    yield from (name for name in templates if name.endswith((".yaml", ".yml")))


def _copy_lora(source: Path, target: Path, denoisers: Sequence[str]) -> None:
    """Copy the files from which `load_lora(source)` reads the LoRA, so that `load_lora(target)` reads the same."""
    for name in denoisers:
        within = "" if name == denoisers[0] else name
        file = lora_files.locate(source / within if within else source)
        (target / within).mkdir(exist_ok=True)
        kept = file.name if file.name == lora_files.PEFT_FILE else lora_files.FILE
        shutil.copyfile(file, target / within / kept)
        options = file.with_name(lora_files.CONFIG)
        if options.is_file():
            shutil.copyfile(options, target / within / options.name)


def _replaced(value: Any, new: Mapping[str, str]) -> Any:
    """Nested values with these strings replaced."""
    if isinstance(value, dict):
        return {key: _replaced(item, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, new) for item in value]
    return new.get(value, value) if isinstance(value, str) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
