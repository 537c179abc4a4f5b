"""The command line: `prefgrpo train | preprocess | generate | evaluate | report | judge … | tiny | …`.

A command is a function whose arguments are its options, so `--help` is always complete; heavy modules are imported when
a command runs, so `--help` is fast. A command with `overrides` takes `--section.field value` for every field of the
configuration. Exit codes: 2 for an error whose message says how to fix it, 3 for a run that stopped with a resumable
checkpoint.
"""

from __future__ import annotations

import difflib
import os
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import is_dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
import yaml

from prefgrpo import __version__
from prefgrpo.config.loading import flat_fields, from_dict, recipe_values
from prefgrpo.config.recipe import ConfigError, Loader, UserError, flatten, merge
from prefgrpo.config.schema import MODEL_VALUES, Config

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("prefgrpo.commands.cli:train", "train a model from a recipe; any field can be overridden"),
    "demo": ("prefgrpo.commands.cli:demo", "train the tiny demo into ./runs/demo; takes the options of train"),
    "preprocess": ("prefgrpo.commands.cli:preprocess", "encode all prompts of a recipe once, into data.cache"),
    "generate": ("prefgrpo.commands.cli:generate", "generate images or clips for every prompt of a file"),
    "export": ("prefgrpo.commands.export:export", "write the weights of a run or of one of its checkpoints"),
    "evaluate": ("prefgrpo.commands.cli:evaluate", "evaluate on a published suite, or against the base model"),
    "score": ("prefgrpo.commands.score:main", "score a folder of images or clips"),
    "reward list": ("prefgrpo.rewards:show_rewards", "list all rewards with inputs, description and where they run"),
    "reward serve": ("prefgrpo.rewards.serve:main", "serve one reward over HTTP, from a separate environment"),
    "report": ("prefgrpo.commands.cli:report", "write report.html for a run"),
    "judge serve": ("prefgrpo.judge.serve:serve", "start a judge with vLLM and the flags that judging needs"),
    "judge prompts": ("prefgrpo.judge.published:main", "fetch the questions that fine-tuned judges were trained on"),
    "judge check": ("prefgrpo.judge.check:main", "test a judge: reachable, right model, correct on known answers"),
    "tiny": ("prefgrpo.tiny:tiny", "write a tiny pipeline with random weights: prefgrpo tiny flux DIR"),
    "doctor": ("prefgrpo.commands.doctor:doctor", "show versions, and test which op backends work"),
}

COMMON = (
    "model name output seed data.prompts data.pairs rollout.height rollout.width rollout.steps rollout.guidance "
    "rollout.batch_size rollout.prompts_per_step rollout.group_size judge.model judge.endpoints rewards train.steps "
    "train.lr train.lora_rank train.gradient_checkpointing eval.every eval.prompts checkpoint.every"
)
"""Configuration fields that --help shows."""
OPTIONAL_TEXT = ("rollout.negative_prompt",)
"""Fields that take any text, also an empty one, or None."""
Recipe = Annotated[Path, tyro.conf.arg(metavar="RECIPE")]
Target = Annotated[str, tyro.conf.arg(metavar="TARGET")]
Overrides = Annotated[dict[str, Any], tyro.conf.Suppress, tyro.conf.Fixed]
"""Nested values of configuration fields that the command line gives."""


# ---- the commands that take a configuration -------------------------------------------------------------------------


def train(
    recipe: Recipe, resume: bool = False, dry_run: bool = False, allow_idle: bool = False, *, overrides: Overrides
) -> int:
    """Train a model from a recipe.

    Args:
        recipe: YAML file of the run, e.g. scripts/prefgrpo/lora_flux.yaml.
        resume: Continue the run in output/name from its newest checkpoint (from the start if it has none yet).
        dry_run: Print configuration and memory, generate the first batch and replay one step; write nothing, and do not
            query the judge.
        allow_idle: Train even if the steps are too small to keep half of the GPUs busy.
    """
    from prefgrpo.run.folder import run_of

    folder = run_of(recipe.parent) if resume else None
    if folder is not None and recipe.name == folder.config.name:  # also if the run was moved or renamed
        overrides = merge(folder.place, overrides)
    config = read(recipe, overrides)
    main = os.environ.get("RANK", "0") == "0"
    if dry_run:
        from prefgrpo.commands.dry_run import dry_run as run

        with redirect_stdout(sys.stdout if main else None):
            return run(config)
    from prefgrpo.ending import TrainingStopped
    from prefgrpo.trainer import Trainer

    trainer = Trainer(config, resume=resume, allow_idle=allow_idle)
    try:
        result = trainer.train()
    except TrainingStopped as stop:
        if main:
            print(f"stopped: {stop}\nreport so far: {trainer.folder.report}", file=sys.stderr, flush=True)
        return 3
    if main:
        print(f"report: {result.report}")
    return 0


def demo(resume: bool = False, dry_run: bool = False, allow_idle: bool = False, *, overrides: Overrides) -> int:
    """Train the tiny demo with the files of the installed package.

    Args:
        resume: Continue the run from its newest checkpoint (from the start if it has none yet).
        dry_run: Print configuration and memory, generate the first batch and replay one step; write nothing.
        allow_idle: Train even if the steps are too small to keep half of the GPUs busy.
    """
    from prefgrpo.tiny import DEMO, demo_paths

    return train(DEMO, resume, dry_run, allow_idle, overrides=merge(demo_paths(), overrides))


def preprocess(recipe: Recipe, *, overrides: Overrides) -> int:
    """Encode all prompts of a recipe once, into data.cache (also under torchrun).

    Args:
        recipe: YAML file of the run.
    """
    from prefgrpo.commands.preprocess import preprocess as run

    return run(read(recipe, overrides))


def generate(
    target: Target,
    lora: Path | None = None,
    prompts: str = "",
    out: Path = Path("generated"),
    samples: int = 4,
    naming: Literal["plain", "unigenbench", "vbench"] = "plain",
    fps: float | None = None,
    *,
    overrides: Overrides,
) -> int:
    """Generate images or clips for every prompt of a file, as the evaluation does (also under torchrun).

    Args:
        target: Run folder (its newest checkpoint), RUN/checkpoints/step_000020, recipe, pipeline folder or hub id.
        lora: A LoRA (a folder, a file or a hub id), for a target without weights of its own.
        prompts: Prompts: txt, csv, tsv, jsonl or parquet; empty: the target's eval.prompts, or else its data.prompts,
            or those of its data.pairs.
        out: Output folder; existing files are skipped. It records what made them, and rejects anything else.
        samples: Images or clips per prompt.
        naming: plain: 000012_0.png by position; unigenbench: INDEX_0.png by the table's index column; vbench:
            PROMPT-0.mp4.
        fps: Frames per second of clips; none: those of the model family.
    """
    from prefgrpo.commands import generate as command

    config = read_target(target, prompts, overrides)
    return command.generate(config, target, lora, prompts, out, samples, naming, fps)


def evaluate(
    target: Target,
    suite: Literal["unigenbench", "geneval2", "geneval", "imgedit", "vbench"] | None = None,
    prompts: str = "",
    out: Path | None = None,
    samples: int = 0,
    against: str = "base",
    results: Path | None = None,
    fps: float | None = None,
    *,
    overrides: Overrides,
) -> int:
    """Evaluate a run, one of its checkpoints or a model (also under torchrun): on a published suite with --suite, else
    against another model on held-out prompts, from the same noise.

    Args:
        target: Run folder (its newest checkpoint), RUN/checkpoints/step_000020, recipe, pipeline folder or hub id.
        suite: Published suite; none: compare with --against.
        prompts: The suite's own file or folder of prompts (docs/suites.md); without a suite: a file of prompts,
            empty: the run's held-out prompts.
        out: Output folder for files and tables; none: RUN/evaluations/…. Existing files are kept.
        samples: Images or clips per prompt; 0: the suite's own number, without a suite eval.samples_per_prompt.
        against: base, or another run, checkpoint or model, sampled with the target's settings.
        results: Output of the suite's own tools, read into our table instead of generating and scoring.
        fps: Frames per second of clips; none: those of the model family.
    """
    from prefgrpo.commands import evaluate as command

    if suite and against != "base":
        raise ConfigError(["--against: expected no --suite with it"])
    if results is not None:
        if not suite:
            raise ConfigError(["--results: expected a --suite with it"])
        return command.read_results(suite, results, out)
    config = read_target(target, prompts, overrides)
    if suite:
        return command.on_suite(config, target, suite, prompts, out, samples, fps)
    return command.against_other(config, target, against, prompts, out, samples, fps)


def read(recipe: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a recipe (None: the defaults) and overrides. Raises ConfigError."""
    model = str(overrides.get("model", ""))
    written = flat_fields(Config()) | flatten(merge(recipe_values(recipe), dict(overrides)))
    values = merge(recipe_values(recipe, model), dict(overrides))
    changed = {key: value for key, value in flatten(values).items() if written.get(key) != value}
    if changed and os.environ.get("RANK", "0") == "0":
        before = {key: f" (was {old})" for key in changed if (old := written.get(key)) is not None}
        listed = ", ".join(f"{key} {value}{before.get(key, '')}" for key, value in changed.items())
        print(f"from {model}/{MODEL_VALUES}: {listed}", file=sys.stderr)
    return from_dict(values)


def read_target(target: str, prompts: str, overrides: dict[str, Any]) -> Config:
    """The configuration of a run, a checkpoint of one, a recipe, or a model with a file of prompts.

    Raises ConfigError, ModelError.
    """
    from prefgrpo.models import family_of
    from prefgrpo.run.folder import run_of
    from prefgrpo.run.resume import own_inputs

    if (run := run_of(Path(target))) is not None:
        return own_inputs(read(run.config, merge(run.place, overrides)), run)
    if Path(target).suffix in (".yaml", ".yml"):
        return read(Path(target), overrides)
    if not prompts:
        lacks = f"{target} has no config.yaml" if Path(target).is_dir() else f"there is no folder {target}"
        expected = f"expected a file of prompts for {target}, or a run ({lacks})"
        raise ConfigError([f"--prompts: a model has no prompts of its own; {expected}"])
    values = {"model": target, "name": Path(target).resolve().name, "family": family_of(target)}
    return read(None, merge(values | {"data": {"prompts": prompts}}, overrides))


# ---- the command line -----------------------------------------------------------------------------------------------


def split(argv: Sequence[str], options: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into (the command's own words, nested values of configuration fields).

    Fields are `--train.lr 1e-5`, `--train.lr=1e-5`, `--train.lora-targets to_q to_k`. An unknown name counts as a
    field, so that it is reported with the recipe's mistakes, unless it resembles one of the command's `options`.
    """
    defaults = flat_fields(Config())
    rest = list(argv)
    words = list[str]()
    values = dict[str, Any]()
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if equals and key in defaults and not option.startswith("--"):
            raise ConfigError([f"{word}: expected --{word}"])
        if not option.startswith("--") or (key not in defaults and difflib.get_close_matches(key, options)):
            words.append(word)
            continue
        several = isinstance(defaults.get(key), tuple)
        following = list(takewhile(lambda w: not w.startswith("--"), rest))
        texts = [text] if equals else following if several else following[:1]
        if not equals:
            del rest[: len(texts)]
        if not (texts or several):
            raise ConfigError([f"{word}: expected a value, as in {word} {_as_text(defaults.get(key)) or 'VALUE'}"])
        value: Any = texts[0] if key in OPTIONAL_TEXT and texts != ["None"] else _value(texts, defaults.get(key))
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(values, value)
    return words, values


def _value(texts: list[str], default: Any) -> Any:
    """The value of a field with this default: text stays text, a list has one word per item, else YAML is read."""
    if isinstance(default, str):
        return texts[0]
    if isinstance(default, tuple) and not (len(texts) == 1 and texts[0].startswith("[")):
        return texts
    try:
        return None if texts[0] == "None" else yaml.load(texts[0], Loader)
    except yaml.YAMLError:
        return texts[0]


def _as_text(value: Any) -> str:
    """A value as it is written in YAML."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _field_help(section: Any, names: Collection[str], prefix: str = "") -> Iterator[str]:
    """A paragraph about every field of a section whose dotted name is in `names`."""
    for name, info in section.__pydantic_fields__.items():
        if is_dataclass(info.annotation):
            yield from _field_help(info.annotation, names, f"{prefix}{name}.")
        elif prefix + name in names:
            choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str | int)]
            value = info.get_default(call_default_factory=True)
            default = "" if isinstance(value, tuple) else _as_text(value)
            kind = "true|false" if info.annotation is bool else "|".join(choices) or "VALUE"
            yield f"  --{prefix}{name.replace('_', '-')} {kind}"
            text = " ".join(info.description.split()) + f" (default: {default})" * bool(default)
            width = int(os.environ.get("COLUMNS", "100"))
            yield textwrap.fill(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _call(command: Any, name: str, argv: Sequence[str]) -> int:
    """Parse a command's arguments and run it, or print its help; returns the exit code."""
    run = partial(tyro.cli, prog=f"prefgrpo {name}", config=(tyro.conf.PositionalRequiredArgs,))
    parameters = signature(command).parameters
    if "overrides" not in parameters:
        result = run(command, args=list(argv))
        if isinstance(result, Path):
            print(f"wrote {result}")
        return result if isinstance(result, int) else 0
    if wanted := {"-h", "--help", "--help-all"} & set(argv):
        with suppress(SystemExit):
            run(partial(command, overrides={}), args=["--help"])
        names = flat_fields(Config()) if "--help-all" in wanted else COMMON.split()
        print("Any field of the configuration can be set; --help-all lists all:", *_field_help(Config, names), sep="\n")
        return 0
    words, values = split(argv, {*parameters, "help"})
    return int(run(partial(command, overrides=values), args=words))


def report(run: Path, out: Path | None = None) -> int:
    """Write report.html into a run folder.

    Args:
        run: Run folder, e.g. runs/demo.
        out: File of the page; none: report.html in the run folder.
    """
    from prefgrpo.report import write_report

    try:
        print(write_report(run, out))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
    return 0


def _usage(group: str = "") -> str:
    """Help text with one line per command, or per command of one group."""
    shown = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    head = [f"usage: prefgrpo {group}COMMAND [--help] …", ""]
    return "\n".join([*head, *lines, *([] if group else ["", "  --version"])])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"prefgrpo {__version__}")
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its image processor warnings do not concern this run
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also disables transformers' bars
    length = next((n for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), 0)
    name = " ".join(argv[:length])
    rest = argv[length:]
    if not name:
        group = next((argv[0] + " " for command in COMMANDS if argv and command.startswith(argv[0] + " ")), "")
        if (argv[1:] if group else argv) in ([], ["-h"], ["--help"]):
            print(_usage(group))
            return 0
        typed = " ".join(argv[:2] if group else argv[:1])
        near = difflib.get_close_matches(typed, COMMANDS, n=1)
        hint = f"; did you mean 'prefgrpo {near[0]}'?" if near else f"\n{_usage(group)}"
        print(f"error: unknown command '{typed}'{hint}", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # in a locale without Δ or a prompt's emoji
    try:
        module, _, attribute = COMMANDS[name][0].partition(":")
        command = getattr(import_module(module), attribute)
        reads_words = list(signature(command).parameters) == ["argv"]
        code: int = command(rest) if reads_words else _call(command, name, rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `prefgrpo reward list | head`; discard unflushed output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["LOCAL_RANK"] != "0" and isinstance(error, ConfigError):
            time.sleep(30)  # this machine's first process says the same, and torchrun then ends this one
        print(f"error: {error}", file=sys.stderr)
        return 2
    if code == 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from prefgrpo.parallel.world import leave

        leave()
    return code
