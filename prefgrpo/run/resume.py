"""Whether a run may go on: what it is made from, and the copies that it keeps of what may be moved away.

Resuming with other prompts, pairs or another model is an error, as is another value of a field outside MAY_CHANGE; any
other change is logged once. Fingerprints are of contents, of a large file of parts of it; names and times do not count,
so what was copied or moved is the same. The copies are in RUN/inputs: prompt files, templates that are files, and the
LoRA that `train.lora_from` continues.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from prefgrpo.config.loading import differences, from_dict, load, to_dict
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
from prefgrpo.run.rewards import pairwise_templates

MAY_CHANGE = (
    "output", "name", "trackers", "data.cache", "offload",
    # compared by content:
    "model", "data.prompts", "data.pairs", "eval.prompts", "eval.final_prompts", "train.lora_from",
    "train.steps", "train.lr", "train.lr_scheduler", "train.max_grad_norm",
    "train.gradient_checkpointing", "checkpoint.every", "checkpoint.keep",
    "judge.endpoints", "judge.api_key_env", "judge.concurrency", "judge.timeout_s", "judge.deadline_s",
    "judge.max_missing", "parallel.shard", "parallel.ulysses", "parallel.ring",
)  # fmt: skip
"""Fields that may differ in a resumed run: where and how it runs, and options that help after a stop."""
MAY_CHANGE_IN_OPTIONS = (
    ".url", ".device", ".batch_size", ".judge.endpoints", ".judge.concurrency", ".judge.timeout_s", f".{PYTHON}",
)  # fmt: skip
"""The same for a reward's options, as suffixes."""


class Kind(Enum):
    """A kind of input; the value is the label of one of this kind."""

    PROMPTS = "prompts of {}"
    PAIRS = "pairs of {}"
    MODEL = "model's {}"
    COLUMN = "column {} of the prompts"
    CODE = "code of the reward {}"
    TEMPLATE = "template of {}"
    LORA = "LoRA of {} (the run goes on from its copy)"
    JUDGE = "model that judges {}"


MAKES_THE_RUN = (Kind.PROMPTS, Kind.PAIRS, Kind.MODEL)
"""What a resumed run may not change."""
MAY_BE_GONE = (Kind.MODEL, Kind.LORA)
"""What a run may go on without: text encoders whose embeddings are stored, a LoRA that was copied."""


@dataclass(frozen=True)
class Input:
    """One thing that a run is made from."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return self.kind.value.format(self.name)


Fingerprints = dict[Input, str]
"""What a run is made from → a digest of its content, or the name of a judge's model."""


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
) -> Fingerprints:
    """What the run is made from. sets: evaluation sets. lora_from: as given, not the run's copy."""
    root = locate(config.model)
    found = {Input(Kind.PROMPTS, "train"): fingerprint(prompts)}
    found |= {Input(Kind.PROMPTS, name): fingerprint(of_set) for name, of_set in sets.items()}
    for part, (library, _) in components_of(root).items():
        files = sorted(file for file in (root / part).rglob("*") if file.is_file() and library)
        if files:
            contents = [(f.relative_to(root).as_posix(), file_digest(f)) for f in files]
            found[Input(Kind.MODEL, part)] = _digest(contents)
    for column in {name: None for prompt in prompts for name in prompt.meta}:
        found[Input(Kind.COLUMN, column)] = _digest([prompt.meta.get(column) for prompt in prompts])
    for entry in (*config.rewards, *config.measured):
        file = None if PYTHON in entry.options else inspect.getsourcefile(load_class(entry.reward))
        if file and not load_class(entry.reward).__module__.startswith("prefgrpo."):
            found[Input(Kind.CODE, entry.name)] = file_digest(file)
    for name, template in pairwise_templates((*config.rewards, *config.measured)).items():
        found[Input(Kind.TEMPLATE, name)] = _digest(asdict(replace(template, name="")))
    if lora_from and Path(lora_from).exists():
        found[Input(Kind.LORA, "train.lora_from")] = file_digest(lora_files.locate(locate_lora(lora_from)))
    return found


def stored(inputs: Fingerprints) -> dict[str, dict[str, str]]:
    """Fingerprints as a checkpoint's meta holds them: kind → name → fingerprint."""
    kinds: dict[str, dict[str, str]] = {}
    for one, digest in inputs.items():
        kinds.setdefault(one.kind.name.lower(), {})[one.name] = digest
    return kinds


def _read(kinds: Mapping[str, Mapping[str, str]]) -> Fingerprints:
    """The fingerprints that were `stored`."""
    found: Fingerprints = {}
    for kind, digests in kinds.items():
        found |= {Input(Kind[kind.upper()], name): digest for name, digest in digests.items()}
    return found


def check_goes_on(config: Config, folder: RunFolder, newest: Path, now: Fingerprints) -> list[str]:
    """Lines about what changed since a checkpoint. Raises CheckpointError if the run cannot go on from there."""
    meta = read_meta(newest)
    before = _read(meta["inputs"])
    gone = [one for one in before if one.kind in MAY_BE_GONE and one not in now]
    changed = [one for one in {**before, **now} if before.get(one) != now.get(one) and one not in gone]
    if fixed := [one for one in changed if one.kind in MAKES_THE_RUN]:
        which = f"{config.data.prompts} or another file of prompts has different prompts"
        if config.data.pairs:
            which = f"{config.data.pairs} or a file of prompts has different prompts, images or verdicts"
        what = f"{config.model} has other weights or settings" if fixed[0].kind is Kind.MODEL else which
        raise CheckpointError(
            f"{what} than when {folder.root} was started ({', '.join(map(str, fixed))}); resume with the old ones, or "
            "choose another name"
        )
    if meta["step"] > config.train.steps:
        done = f"{folder.root} has done {meta['step']} steps: expected train.steps of at least that"
        raise CheckpointError(f"{done}, got {config.train.steps}; to use an earlier state, give a checkpoint")
    return [f"changed since: the {one}" for one in changed]


def check_same_run(config: Config, folder: RunFolder) -> None:
    """Raise CheckpointError if the folder's run differs in a field that a resumed run may not change."""
    changed = differences(load(folder.config), config) if folder.config.is_file() else {}
    fixed = [
        f"{field}: was {before!r}, is {now!r}"
        for field, (before, now) in changed.items()
        if field not in MAY_CHANGE and not ("rewards." in field and field.endswith(MAY_CHANGE_IN_OPTIONS))
    ]
    if fixed:
        raise CheckpointError(
            f"{folder.root} was started with another configuration ({'; '.join(fixed)}); resume with the old values, "
            f"or choose another name"
        )


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
