"""The command line: `prefgrpo train | plan | preprocess | generate | report | judge … | tiny | demo | doctor`.

A command is a function; its arguments are its options, so `--help` is complete by construction. `train`, `preprocess`
and `generate` take a recipe, whose values are the defaults that overrides change. Exit codes: 2 for a mistake that
the message tells how to mend, 3 for a run that stopped with a resumable checkpoint.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro
import yaml

from prefgrpo import __version__
from prefgrpo.commands.launch import speaks, wait_for_first
from prefgrpo.config.schema import MODEL_VALUES, Config, ConfigError, check, differences, nearest, parse

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("prefgrpo.commands.cli:train", "train a model from a recipe; any field can be overridden"),
    "demo": ("prefgrpo.commands.cli:demo", "train the tiny demo in runs/demo of this folder; options as for train"),
    "preprocess": (
        "prefgrpo.commands.cli:preprocess",
        "encode all prompts of a recipe once, into data.cache (also under torchrun)",
    ),
    "launch": (
        "prefgrpo.commands.launch:launch",
        "torchrun with the run's exit code: launch --nproc_per_node 8 train RECIPE",
    ),
    "plan": ("prefgrpo.commands.cli:plan", "parameters and memory per GPU, from the model's config alone"),
    "generate": (
        "prefgrpo.commands.cli:generate",
        "make images or clips of every prompt of a file (also under torchrun)",
    ),
    "score": ("prefgrpo.commands.score:main", "score a folder of images or clips (also under torchrun)"),
    "reward list": ("prefgrpo.rewards.listing:show", "every reward: what it takes, what it is, where it runs"),
    "reward serve": ("prefgrpo.rewards.serve:main", "serve one reward over HTTP, from an environment of its own"),
    "report": ("prefgrpo.commands.cli:report", "write report.html of a run, finished or not"),
    "judge serve": ("prefgrpo.judge.serve:serve", "start judges with vLLM or SGLang, one port per model"),
    "judge check": ("prefgrpo.judge.check:check", "test a judge: reachable, right model, known answers right"),
    "judge plan": ("prefgrpo.judge.simulate:plan", "compare pair plans: calls against rank correlation"),
    "tiny": ("prefgrpo.tiny.pipelines:make", "write a tiny random pipeline of a family: prefgrpo tiny flux DIR"),
    "doctor": ("prefgrpo.commands.doctor:doctor", "what is installed, which backends really run, which GPU"),
}


@dataclass(frozen=True)
class Train:
    """Train a model from a recipe."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. scripts/prefgrpo/lora_flux.yaml."""
    resume: bool = False
    """Continue the run in output/name from its newest checkpoint (from the start if it has none yet)."""
    dry_run: bool = False
    """Print configuration and memory, make the first batch, replay one step, write nothing, ask no judge."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Plan:
    """Parameters and memory per GPU, from the model's config alone."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. scripts/prefgrpo/lora_flux.yaml."""
    memory_gib: float = 80.0
    """Memory of one GPU."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Preprocess:
    """Encode all prompts of a recipe once, into data.cache."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. scripts/prefgrpo/lora_flux.yaml."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Generate:
    """Make images or clips of every prompt of a file, as the evaluation does."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run: model, size, steps, guidance and seed, e.g. runs/demo/config.yaml."""
    lora: Path | None = None
    """Folder of a trained LoRA, or the run folder that has it; none: the base model (or a --model of full weights)."""
    prompts: str = ""
    """Prompts: txt, csv, jsonl or parquet; empty: the recipe's eval.prompts, or else its data.prompts."""
    out: Path = Path("generated")
    """Folder of the files; what is there already is skipped."""
    samples: int = 4
    """Images or clips per prompt."""
    naming: Literal["plain", "unigenbench", "vbench"] = "plain"
    """plain: 000012_0.png by place; unigenbench: INDEX_0.png by the table's index column; vbench: PROMPT-0.mp4."""
    fps: int = 16
    """Frames per second of clips."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def _with_recipe(command: Any, argv: Sequence[str], name: str) -> Any:
    """The command's arguments: its recipe read, overridden and checked. Raises ConfigError with every mistake."""
    words = [word for word in argv if not word.startswith("-") and "=" not in word]
    recipe = next((word for word in words if word.endswith((".yaml", ".yml"))), words[0] if words else None)
    asks_help = "-h" in argv or "--help" in argv
    config, mistakes = parse(recipe) if recipe and not asks_help else (Config(), [])
    argv, misspelled = (argv, []) if asks_help else options(command, argv)
    args, changed = _read(command, argv, name, config), {}
    if recipe and args.config.model != config.model:
        own, mistakes = parse(recipe, args.config.model)
        if changed := differences(config, own):
            args = _read(command, argv, name, own)
    if args.recipe != Path(recipe or ""):
        raise ConfigError([f"recipe: '{recipe}' or '{args.recipe}'? Put the recipe before the overrides"])
    if mistakes := mistakes + misspelled + check(args.config) + _beyond(command, args.config):
        raise ConfigError(mistakes)
    if changed and os.environ.get("RANK", "0") == "0":
        shown = ", ".join(f"{key} {b} (was {a})" for key, (a, b) in changed.items())
        print(f"from {args.config.model}/{MODEL_VALUES}: {shown}", file=sys.stderr)
    return args


SWITCHES = {"true": "", "false": "no_"}


def options(command: Any, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(`argv` as tyro reads it, mistakes): overrides may also be KEY=VALUE, and switches take true or false.

    A KEY=VALUE has its value as in a recipe: `train.lora_targets=[to_q, to_k]`, `rollout.shift=null`.
    """
    known = _fields(command) | _fields(Config)
    out, mistakes, rest = list[str](), list[str](), list(argv)
    while rest:
        word = rest.pop(0)
        given, equals, value = word.removeprefix("--").partition("=")
        section, dot, name = (key := given.replace("-", "_")).rpartition(".")
        is_option = re.fullmatch(r"--[a-z][\w.-]*(=.*)?", word, re.S)
        if not is_option and not (equals and (key in known or section in known)):
            out.append(word)
        elif known.get(key) is bool and (equals or (rest and rest[0].lower() in SWITCHES)):
            switch = (value if equals else rest.pop(0)).lower()
            if switch in SWITCHES:
                out.append(f"--{section}{dot}{SWITCHES[switch]}{name}".replace("_", "-"))
            else:
                mistakes.append(f"{key}: expected true or false, got {switch!r}")
        elif key in known and not is_option:
            read = _value(value)
            out += [f"--{given}", *map(str, read)] if isinstance(read, list) else [f"--{given}={read}"]
        elif key in known or known.get(f"{section}{dot}{name.removeprefix('no_')}") is bool:
            out.append(word)
        else:
            mistakes.append(f"{word}: unknown option; {nearest(tuple(key.split('.')))}")
            while rest and not rest[0].startswith("--"):
                rest.pop(0)  # its values
    return out, mistakes


def _value(text: str) -> Any:
    """The value of KEY=VALUE: a list, None, or else the text itself."""
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return read if isinstance(read, list) else None if text and read is None else text


def _fields(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name → type of every field of a dataclass and of its sections; of a command, its own options."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if name != "config":
            found |= {prefix + name: kind} | (_fields(kind, f"{prefix}{name}.") if is_dataclass(kind) else {})
    return found


def _beyond(command: Any, config: Config) -> list[str]:
    """Mistakes that the parts of a run see: none of them needs the model's files."""
    from prefgrpo.run.loading import misfits

    found = misfits(config)
    if command is Train:
        from prefgrpo.run.session import mistakes

        found += mistakes(config, int(os.environ.get("WORLD_SIZE", "1")))
    return found


def _read(command: Any, argv: Sequence[str], name: str, config: Config) -> Any:
    """The arguments of a command whose defaults are `config`."""
    default = command(tyro.MISSING, config=config)
    with nullcontext() if speaks() else redirect_stderr(StringIO()):
        return tyro.cli(command, args=list(argv), default=default, prog=f"prefgrpo {name}")


def train(argv: Sequence[str]) -> int:
    """`prefgrpo train RECIPE [--override …] [--resume | --dry-run]`."""
    return _train(argv, "train")


def demo(argv: Sequence[str]) -> int:
    """`prefgrpo demo [--override …] [--resume | --dry-run]`: train the demo with the files of the installed package."""
    from prefgrpo.tiny import demo_options

    return _train([*demo_options(), *argv], "demo")


def _train(argv: Sequence[str], name: str) -> int:
    args = _with_recipe(Train, argv, name)
    if args.dry_run:
        from prefgrpo.commands.dry_run import dry_run

        return dry_run(args.config)
    return _run(args.config, args.resume)


def plan(argv: Sequence[str]) -> int:
    """`prefgrpo plan RECIPE [--gpus N] [--override …]`."""
    args = _with_recipe(Plan, argv, "plan")
    from prefgrpo.run.memory import plan as run

    return run(args.config, args.memory_gib)


def preprocess(argv: Sequence[str]) -> int:
    """`prefgrpo preprocess RECIPE [--override …]`."""
    args = _with_recipe(Preprocess, argv, "preprocess")
    from prefgrpo.commands.preprocess import preprocess as run

    return run(args.config)


def generate(argv: Sequence[str]) -> int:
    """`prefgrpo generate RECIPE [--lora DIR] [--override …]`."""
    args = _with_recipe(Generate, argv, "generate")
    from prefgrpo.commands.generate import generate as run

    return run(args.config, args.lora, args.prompts, args.out, args.samples, args.naming, args.fps)


def _run(config: Config, resume: bool) -> int:
    from prefgrpo.commands.train import Trainer
    from prefgrpo.run.loop import TrainingStopped

    trainer, main = Trainer.from_config(config, resume), os.environ.get("RANK", "0") == "0"
    try:
        result = trainer.train()
    except TrainingStopped as stop:
        if main:
            print(f"stopped: {stop}\nreport so far: {trainer.folder.report}", file=sys.stderr, flush=True)
        return 3
    if main:
        print(f"report: {result.report}")
        if result.summary:
            print(result.summary)
    return 0


def report(run: Path) -> int:
    """Write report.html into a run folder.

    Args:
        run: Run folder, e.g. runs/demo.
    """
    from prefgrpo.report import write_report

    try:
        print(write_report(run))
    except FileNotFoundError as error:
        raise ConfigError([str(error)]) from error
    return 0


def _mendable() -> tuple[type[Exception], ...]:
    """Errors whose message alone tells the user what to do."""
    from prefgrpo.data.prompts import DataError
    from prefgrpo.judge.verdict import JudgeError
    from prefgrpo.models.folder import ModelError
    from prefgrpo.rewards import RewardSpecError
    from prefgrpo.rewards.base import RewardError
    from prefgrpo.run.checkpoint import CheckpointError

    return ConfigError, CheckpointError, DataError, JudgeError, ModelError, RewardError, RewardSpecError


def _usage(group: str = "") -> str:
    """All commands, or those whose names start with `group`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items() if name.startswith(group)]
    return "\n".join(["usage: prefgrpo COMMAND [--help] …", "", *lines, "", "  --version"])


def _find(argv: Sequence[str]) -> tuple[str, list[str]] | None:
    """(command, its arguments) at the head of `argv`."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return name, list(argv[words:])
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"prefgrpo {__version__}")
        return 0
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice on image processors is not about this run
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers too
    found = _find(argv)
    if found is None:
        words = " ".join(argv).replace("--help", "-h")
        group = words.removesuffix("-h") if any(f"{name.split()[0]} -h" == words for name in COMMANDS) else ""
        asked = not argv or bool(group) or words.startswith("-h")
        print(
            _usage(group) if asked else f"error: unknown command '{' '.join(argv[:2])}'\n{_usage()}",
            file=sys.stderr if not asked else sys.stdout,
        )
        return 0 if asked else 2
    name, rest = found
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: Any = getattr(import_module(module), attribute)
    try:
        if list(inspect.signature(command).parameters) == ["argv"]:  # it reads them itself
            result = command(rest)
        else:
            result = tyro.cli(command, args=rest, prog=f"prefgrpo {name}", config=(tyro.conf.PositionalRequiredArgs,))
        if isinstance(result, Path):
            print(f"wrote {result}")
        sys.stdout.flush()
    except SystemExit as end:  # tyro's
        if end.code:
            wait_for_first(2)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `prefgrpo reward list | head`; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not isinstance(error, ConfigError) and not isinstance(error, _mendable()):  # the latter imports torch
            raise
        wait_for_first(2)
        print(f"error: {error}", file=sys.stderr)
        return 2
    code = result if isinstance(result, int) else 0
    if code:
        wait_for_first(code)
    return code
