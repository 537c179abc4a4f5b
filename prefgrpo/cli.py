"""The command line: `prefgrpo train | plan | preprocess | generate | report | judge … | tiny … | doctor`.

A command is a function; its arguments are its options, so `--help` is complete by construction. `train`, `preprocess`
and `generate` take a recipe, whose values are the defaults that overrides change. Exit codes: 2 for a mistake that
the message tells how to mend, 3 for a run that stopped with a resumable checkpoint.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from prefgrpo import __version__
from prefgrpo.config import MODEL_VALUES, Config, ConfigError, check, differences, parse

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("prefgrpo.cli:train", "train a model from a recipe; any field can be overridden"),
    "preprocess": (
        "prefgrpo.cli:preprocess",
        "encode all prompts of a recipe once, into data.cache (also under torchrun)",
    ),
    "plan": ("prefgrpo.cli:plan", "parameters and memory per GPU, from the model's config alone"),
    "generate": ("prefgrpo.cli:generate", "make images or clips of every prompt of a file (also under torchrun)"),
    "score": ("prefgrpo.score:main", "what a folder of images or clips is worth (also under torchrun)"),
    "reward list": ("prefgrpo.rewards.listing:show", "every reward: what it takes, what it is, where it runs"),
    "reward serve": ("prefgrpo.rewards.serve:main", "serve one reward over HTTP, from an environment of its own"),
    "report": ("prefgrpo.cli:report", "write report.html of a run, finished or not"),
    "judge serve": ("prefgrpo.judge.serve:serve", "start one or several judges with the right flags, behind one port"),
    "judge route": ("prefgrpo.judge.route:route", "put running judge servers behind one port"),
    "judge check": ("prefgrpo.judge.check:check", "is the judge there, does it serve the model, does it answer"),
    "judge plan": ("prefgrpo.judge.plan:plan", "pair plans: calls against rank correlation, the best one for a budget"),
    "tiny": ("prefgrpo.tiny.pipelines:make", "write a tiny random pipeline of a family: prefgrpo tiny flux DIR"),
    "tiny reward": ("prefgrpo.tiny.rewards:make", "write tiny checkpoints: prefgrpo tiny reward clip,aesthetic DIR"),
    "tiny vae": ("prefgrpo.tiny.vae:train", "train the demo world's VAE"),
    "tiny base": ("prefgrpo.tiny.base:train", "train the demo world's FLUX pipeline"),
    "tiny judge": ("prefgrpo.tiny.judge:train", "train the demo world's judge"),
    "doctor": ("prefgrpo.doctor:doctor", "what is installed, which backends really run, which GPU"),
}


@dataclass(frozen=True)
class Train:
    """Train a model from a recipe."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. recipes/demo.yaml."""
    resume: bool = False
    """Continue the run in output/name from its newest checkpoint (from the start if it has none yet)."""
    dry_run: bool = False
    """Print configuration and memory, make the first batch, replay one step, write nothing, ask no judge."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Plan:
    """Parameters and memory per GPU, from the model's config alone."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. scripts/lora_prefgrpo_flux.yaml."""
    memory_gib: float = 80.0
    """Memory of one GPU."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Preprocess:
    """Encode all prompts of a recipe once, into data.cache."""

    recipe: tyro.conf.Positional[Path]
    """YAML file of the run, e.g. scripts/lora_prefgrpo_flux.yaml."""
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
    words = [word for word in argv if not word.startswith("-")]
    recipe = next((word for word in words if word.endswith((".yaml", ".yml"))), words[0] if words else None)
    asks_help = "-h" in argv or "--help" in argv
    config, mistakes = parse(recipe) if recipe and not asks_help else (Config(), [])
    args = _read(command, argv, name, config)
    if recipe and args.config.model != config.model:
        own, mistakes = parse(recipe, args.config.model)
        if changed := differences(config, own):
            if os.environ.get("RANK", "0") == "0":
                shown = ", ".join(f"{key} {b} (was {a})" for key, (a, b) in changed.items())
                print(f"from {args.config.model}/{MODEL_VALUES}: {shown}", file=sys.stderr)
            args = _read(command, argv, name, own)
    if args.recipe != Path(recipe or ""):
        raise ConfigError([f"recipe: '{recipe}' or '{args.recipe}'? Put the recipe before the overrides"])
    if mistakes := mistakes + check(args.config) + _beyond(command, args.config):
        raise ConfigError(mistakes)
    return args


def _beyond(command: Any, config: Config) -> list[str]:
    """Mistakes that the parts of a run see: none of them needs the model's files."""
    from prefgrpo.loading import misfits

    found = misfits(config)
    if command is Train:
        from prefgrpo.session import mistakes

        found += mistakes(config, int(os.environ.get("WORLD_SIZE", "1")))
    return found


def _read(command: Any, argv: Sequence[str], name: str, config: Config) -> Any:
    """The arguments of a command whose defaults are `config`."""
    default = command(tyro.MISSING, config=config)
    return tyro.cli(command, args=list(argv), default=default, prog=f"prefgrpo {name}")


def train(argv: Sequence[str]) -> int:
    """`prefgrpo train RECIPE [--override …] [--resume | --dry-run]`."""
    args = _with_recipe(Train, argv, "train")
    if args.dry_run:
        from prefgrpo.dry_run import dry_run

        return dry_run(args.config)
    return _run(args.config, args.resume)


def plan(argv: Sequence[str]) -> int:
    """`prefgrpo plan RECIPE [--gpus N] [--override …]`."""
    args = _with_recipe(Plan, argv, "plan")
    from prefgrpo.plan import plan as run

    return run(args.config, args.memory_gib)


def preprocess(argv: Sequence[str]) -> int:
    """`prefgrpo preprocess RECIPE [--override …]`."""
    args = _with_recipe(Preprocess, argv, "preprocess")
    from prefgrpo.preprocess import preprocess as run

    return run(args.config)


def generate(argv: Sequence[str]) -> int:
    """`prefgrpo generate RECIPE [--lora DIR] [--override …]`."""
    args = _with_recipe(Generate, argv, "generate")
    from prefgrpo.generate import generate as run

    return run(args.config, args.lora, args.prompts, args.out, args.samples, args.naming, args.fps)


def _run(config: Config, resume: bool) -> int:
    from prefgrpo.report import write_report
    from prefgrpo.trainer import Trainer, TrainingStopped

    trainer = Trainer(config, resume)
    try:
        folder = trainer.run()
    except TrainingStopped as stop:
        if trainer.world.main:
            print(f"stopped: {stop}", file=sys.stderr, flush=True)
            print(f"report so far: {write_report(trainer.folder)}", file=sys.stderr)
        return 3
    if trainer.world.main:
        print(f"report: {write_report(folder)}")
        if trainer.verdict:
            print(trainer.verdict)
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
    from prefgrpo.checkpoint import CheckpointError
    from prefgrpo.data import DataError
    from prefgrpo.judge.verdict import JudgeError
    from prefgrpo.models.folder import ModelError
    from prefgrpo.rewards import RewardSpecError
    from prefgrpo.rewards.base import RewardError

    return ConfigError, CheckpointError, DataError, JudgeError, ModelError, RewardError, RewardSpecError


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
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
        asked = not argv or argv[0] in ("-h", "--help")
        print(
            _usage() if asked else f"error: unknown command '{' '.join(argv[:2])}'\n{_usage()}",
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
        sys.stdout.flush()
    except _mendable() as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `prefgrpo reward list | head`; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return result if isinstance(result, int) else 0
