"""The command line: `prefgrpo train | preprocess | generate | evaluate | report | judge … | tiny | …`.

A command is a function whose arguments are its options, so `--help` is always complete. A command with an argument
`config` takes a recipe and `--section.field value` overrides, which are checked together. Exit codes: 2 for an error
whose message says how to fix it, 3 for a run that stopped with a resumable checkpoint.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from fnmatch import fnmatch
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
import yaml

from prefgrpo import __version__
from prefgrpo.config.loading import differences, flat_fields, load, parse, recipe_values
from prefgrpo.config.recipe import ConfigError, Loader, UserError, merge
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import MODEL_VALUES, Config

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("prefgrpo.commands.cli:train", "train a model from a recipe; any field can be overridden"),
    "demo": ("prefgrpo.commands.cli:demo", "train the tiny demo into ./runs/demo; takes the options of train"),
    "preprocess": ("prefgrpo.commands.preprocess:preprocess", "encode all prompts of a recipe once, into data.cache"),
    "generate": ("prefgrpo.commands.generate:generate", "generate images or clips for every prompt of a file"),
    "export": ("prefgrpo.commands.export:export", "write a run's LoRA for ComfyUI"),
    "evaluate": ("prefgrpo.commands.evaluate:evaluate", "evaluate on a published suite, or against the base model"),
    "score": ("prefgrpo.commands.score:main", "score a folder of images or clips"),
    "reward list": ("prefgrpo.rewards:show_rewards", "list all rewards with inputs, description and where they run"),
    "reward serve": ("prefgrpo.rewards.serve:main", "serve one reward over HTTP, from a separate environment"),
    "report": ("prefgrpo.commands.cli:report", "write report.html for a run"),
    "judge serve": ("prefgrpo.judge.serve:serve", "start a judge with vLLM and the flags that judging needs"),
    "judge prompts": ("prefgrpo.judge.prompts:main", "fetch the questions that fine-tuned judges were trained on"),
    "judge check": ("prefgrpo.judge.check:main", "test a judge: reachable, right model, correct on known answers"),
    "tiny": ("prefgrpo.tiny.pipelines:make", "write a tiny pipeline with random weights: prefgrpo tiny flux DIR"),
    "doctor": ("prefgrpo.commands.doctor:doctor", "show versions, and test which op backends work"),
}

FIELDS = {
    "train": "model name output seed data.prompts rollout.height rollout.width rollout.steps rollout.guidance "
    "rollout.prompts_per_step rollout.group_size rollout.batch_size judge.model judge.endpoints "
    "rewards train.steps train.lr train.lora_rank train.gradient_checkpointing eval.every eval.prompts "
    "checkpoint.every",
    "preprocess": "model family seed dtype device data.* rollout.height rollout.width rollout.frames rollout.guidance "
    "rollout.source_area eval.every eval.prompts eval.final_prompts eval.holdout eval.max_prompts eval.height "
    "eval.width memory.offload",
    "generate": "model family seed dtype device data.* rollout.height rollout.width rollout.frames rollout.steps "
    "rollout.guidance* rollout.shift rollout.source_area rollout.batch_size eval.prompts eval.height eval.width "
    "eval.steps memory.*",
    "evaluate": "seed dtype device data.cache rollout.height rollout.width rollout.frames rollout.steps "
    "rollout.guidance* rollout.batch_size judge.backend judge.model judge.endpoints judge.concurrency "
    "eval.prompts eval.samples_per_prompt eval.max_prompts eval.height eval.width eval.steps eval.rewards "
    "memory.* parallel.*",
}
"""Configuration fields that --help shows: the most common ones for `train`, for other commands those they use."""


def train(config: Config, resume: bool = False, dry_run: bool = False) -> int:
    """Train a model from a recipe. Every field of the recipe can be overridden; the common ones are listed here, and
    --help-all lists all.

    Args:
        config: The recipe with its overrides.
        resume: Continue the run in output/name from its newest checkpoint (from the start if it has none yet).
        dry_run: Print configuration and memory, generate the first batch and replay one step; write nothing, and do not
            query the judge.
    """
    if dry_run:
        from prefgrpo.commands.dry_run import dry_run as run

        return run(config)
    from prefgrpo.run.stopping import TrainingStopped
    from prefgrpo.trainer import Trainer

    trainer = Trainer(config, resume=resume)
    main = os.environ.get("RANK", "0") == "0"
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


def demo(argv: Sequence[str]) -> int:
    """`prefgrpo demo [--override …] [--resume | --dry-run]`: train the demo with the files of the installed package."""
    from prefgrpo.tiny import demo_options

    recipe, *paths = demo_options()
    return _with_recipe(train, "demo", [*paths, *argv], Path(recipe))


def _with_recipe(command: Any, name: str, argv: Sequence[str], recipe: Path | None = None) -> int:
    """Run a command on a checked configuration: the recipe (default: the first argument) and its overrides."""
    own = {k: p.replace(kind=Parameter.KEYWORD_ONLY) for k, p in signature(command, eval_str=True).parameters.items()}
    del own["config"]
    parameters = list(own.values())
    if recipe is None and "target" not in own:
        parameters.insert(0, Parameter("recipe", Parameter.POSITIONAL_OR_KEYWORD, annotation=RECIPE))
    if wanted := {"-h", "--help", "--help-all"} & set(argv):
        shown = ["*"] if wanted == {"--help-all"} else FIELDS[command.__name__].split()
        section = _help_section(load(recipe) if recipe else Config(), shown)
        whole: Any = Annotated[section, tyro.conf.arg(name="")]
        parameters.append(Parameter("config", Parameter.KEYWORD_ONLY, annotation=whole, default=section()))
        argv = ["--help"]
    words, values = overrides(argv, {*own, "help"})

    def arguments(**given: Any) -> dict[str, Any]:
        return given

    arguments.__doc__ = command.__doc__
    arguments.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    arguments.__annotations__ = {p.name: p.annotation for p in parameters}
    given = tyro.cli(arguments, args=words, prog=f"prefgrpo {name}")
    if "target" in given:
        from prefgrpo.commands.evaluate import recipe_of

        file, found = recipe_of(given["target"], given["prompts"] or str(given["results"] or ""))
        return command(_read(file, merge(found, values), command.__name__), **given)
    return command(_read(recipe or given.pop("recipe"), values, command.__name__), **given)


RECIPE = Annotated[
    tyro.conf.Positional[Path],
    tyro.conf.arg(metavar="RECIPE", help="YAML file of the run, e.g. scripts/prefgrpo/lora_flux.yaml."),
]


def _help_section(values: Any, shown: Sequence[str], prefix: str = "") -> Any:
    """A section's class, reduced to the fields that match one of the patterns `shown`, for --help."""
    out: list[Any] = []
    for name, info in values.__pydantic_fields__.items():
        kind, default = info.annotation, getattr(values, name)
        if is_dataclass(kind):
            section = _help_section(default, shown, f"{prefix}{name}.")
            out += [(name, section, field(default_factory=section))] if fields(section) else []
        elif any(fnmatch(prefix + name, pattern) for pattern in shown):
            as_text = isinstance(default, dict) or RewardEntry in get_args(kind)
            help_ = tyro.conf.arg(help=" ".join(info.description.split()), metavar="YAML" if as_text else None)
            text = ",".join(entry.name for entry in default) if isinstance(default, tuple) and as_text else ""
            out.append((name, Annotated[str if as_text else kind, help_], field(default=text if as_text else default)))
    return make_dataclass(type(values).__name__, out, namespace={"__doc__": values.__doc__})


def overrides(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into (the command's own words, nested values of configuration fields).

    Fields are `--train.lr 1e-5`, `--train.lr=1e-5`, `--train.lora-targets to_q to_k`. An unknown name counts as a
    field, so that it is reported with the recipe's mistakes, unless it resembles one of `own`, the names of the
    command's options.
    """
    defaults, rest = flat_fields(Config()), list(argv)
    words, values = list[str](), dict[str, Any]()
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if equals and key in defaults and not option.startswith("--"):
            raise ConfigError([f"{word}: expected --{word}"])
        if not option.startswith("--") or (key not in defaults and difflib.get_close_matches(key, own)):
            words.append(word)
            continue
        several = isinstance(defaults.get(key), tuple)
        following = list(takewhile(lambda w: not w.startswith("--"), rest))
        texts = [text] if equals else following if several else following[:1]
        if not equals:
            del rest[: len(texts)]
        if not (texts or several):
            raise ConfigError([f"{word}: expected a value, as in {word} {_as_text(defaults.get(key)) or 'VALUE'}"])
        value = _value(texts, defaults.get(key))
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
    return str(value).lower() if isinstance(value, bool) else str(value or "")


def _read(recipe: Path | None, values: Mapping[str, Any], command: str) -> Config:
    """A command's configuration. Raises ConfigError with every mistake."""
    from prefgrpo.run.loading import unsupported

    model = str(values.get("model", ""))
    written = recipe_values(recipe)
    adapted = recipe_values(recipe, model)
    config, mistakes = parse(merge(adapted, dict(values)))
    mistakes += unsupported(config)
    if command == "train":
        from prefgrpo.run.checks import config_errors

        mistakes += config_errors(config)
    if mistakes:
        raise ConfigError(mistakes)
    changed = differences(parse(written)[0], parse(adapted)[0])
    if changed and os.environ.get("RANK", "0") == "0":
        listed = ", ".join(f"{key} {new} (was {old})" for key, (old, new) in changed.items())
        print(f"from {model}/{MODEL_VALUES}: {listed}", file=sys.stderr)
    return config


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
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        hint = "; choose another file with --out" * (isinstance(error, PermissionError) and not error.filename)
        print(f"error: {text}{hint}", file=sys.stderr)
        return 2
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
    name, rest = " ".join(argv[:length]), argv[length:]
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
    try:
        code = _run(name, rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `prefgrpo reward list | head`; discard unflushed output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if code == 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from prefgrpo.parallel.world import leave

        leave()
    return code


def _run(name: str, argv: list[str]) -> int:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: Any = getattr(import_module(module), attribute)
    if name in FIELDS:
        return _with_recipe(command, name, argv)
    if list(signature(command).parameters) == ["argv"]:  # it parses its own arguments
        return command(argv)
    result = tyro.cli(command, args=argv, prog=f"prefgrpo {name}", config=(tyro.conf.PositionalRequiredArgs,))
    if isinstance(result, Path):
        print(f"wrote {result}")
    return result if isinstance(result, int) else 0
