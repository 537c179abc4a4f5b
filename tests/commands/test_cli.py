"""The command line as users type it.

Why these cases: `--help-all` must show every field with its help text, or users must read the source; an override must
reach its nested field whatever its type (tuples, None, switches), even if the recipe has a typo; and a wrong command
or option must end with exit code 2 and a suggestion, not with a traceback.
"""

import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
from world import recipe

from prefgrpo.commands import cli
from prefgrpo.config.loading import flat_fields, load
from prefgrpo.config.schema import Config


@pytest.fixture
def asked(monkeypatch):
    """Function of the command-line words: the (config, resume) that `prefgrpo train …` would run, or its exit code."""

    def ask(*argv):
        got = []

        def train(recipe: Path, resume: bool = False, dry_run: bool = False, *, overrides: cli.Overrides) -> int:
            got.append((cli.read(recipe, overrides), resume))
            return 0

        monkeypatch.setattr(cli, "train", train)
        code = cli.main(["train", *map(str, argv)])
        return got[0] if got else code

    return ask


def shown(capsys, *argv):
    """(exit code, printed text without colours and line breaks)."""
    try:
        code = cli.main(list(map(str, argv)))
    except SystemExit as end:
        code = end.code
    text = "".join(capsys.readouterr())
    return code, re.sub(r"[\s│╭╮╰╯─]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def description(name):
    *sections, last = name.split(".")
    cls = reduce(lambda cls, key: cls.__pydantic_fields__[key].annotation, sections, Config)
    return " ".join(cls.__pydantic_fields__[last].description.split())


def options(text):
    """Names of the configuration fields that a help text lists."""
    words = {word.replace("-", "_") for word in re.findall(r"--([\w.-]+)", text)}
    return {name for name in flat_fields(Config()) if name in words}


def test_help_shows_the_fields_that_a_command_uses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, text = shown(capsys, "train", "--help-all")
    assert code == 0 and options(text) == flat_fields(Config()).keys()
    for name in options(text):
        assert description(name)[:40] in text, name
    first = shown(capsys, "train", "--help")[1]
    assert 15 < len(options(first)) < 25 and "--help-all" in first and "--resume" in first
    assert {"model", "data.prompts", "rewards", "train.lr", "train.lora_rank"} < options(first)


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["judge"], ["judge", "--help"], ["reward", "-h"]])
def test_the_list_of_commands(capsys, argv):
    code, text = shown(capsys, *argv)
    group = " ".join(argv[:1]) if argv and argv[0][0] != "-" else ""
    assert code == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert (f"{name} {line}" in text) == name.startswith(group)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(capsys, name):
    code, text = shown(capsys, *name.split(), "--help")
    assert code == 0 and f"usage: prefgrpo {name}" in text and "--help" in text
    assert ("RECIPE" in text) == (name in ("train", "preprocess"))


@pytest.mark.parametrize(("argv", "message"), [
    ("trian r.yaml", "unknown command 'trian'; did you mean 'prefgrpo train'?"),
    ("judge srve", "unknown command 'judge srve'; did you mean 'prefgrpo judge serve'?"),
    ("--xyz", "unknown command '--xyz' usage: prefgrpo COMMAND"),
])  # fmt: skip
def test_unknown_commands(capsys, argv, message):
    code, text = shown(capsys, *argv.split())
    assert code == 2 and message in text


OVERRIDES = [
    ("--train.lr 3e-6", "train.lr", 3e-6),
    ("--rollout.group-size=5", "rollout.group_size", 5),
    ("--trackers", "trackers", ()),
    ("--compile true", "compile", True),
    ("--compile=true", "compile", True),
    ("--train.gradient_checkpointing=0.5", "train.gradient_checkpointing", 0.5),
    ("--rollout.shift 2.5", "rollout.shift", 2.5),
    ("--rollout.shift None", "rollout.shift", None),
    ("--train.lora-targets to_q to_k", "train.lora_targets", ("to_q", "to_k")),
    ("--train.lora-targets", "train.lora_targets", ()),
    ("--judge.endpoints=[http://a:1,http://b:2]", "judge.endpoints", ("http://a:1", "http://b:2")),
    ("--judge.endpoints http://a:1/?k=v --seed 3", "judge.endpoints", ("http://a:1/?k=v",)),
    ("--name my\xa0run=b", "name", "my run=b"),
    ("--rollout.negative-prompt ", "rollout.negative_prompt", ""),
    ("--rollout.negative-prompt no", "rollout.negative_prompt", "no"),
    ("--rollout.negative-prompt blurry:\xa0low,\xa0#bad", "rollout.negative_prompt", "blurry: low, #bad"),
    ("--rollout.negative-prompt None", "rollout.negative_prompt", None),
]


@pytest.mark.parametrize(("words", "field", "value"), OVERRIDES, ids=[words for words, _, _ in OVERRIDES])
def test_overrides_reach_every_kind_of_field(asked, place, words, field, value):
    file, argv = recipe(place, "over"), [word.replace("\xa0", " ") for word in words.split(" ")]
    config, resume = asked(file, "--resume", *argv)
    assert resume and flat_fields(config)[field] == value
    others = flat_fields(asked(file)[0])
    changed = {name for name, v in flat_fields(config).items() if v != others[name]} - {field, "seed"}
    assert not changed, "fields that are not overridden keep the recipe's values"


def test_where_the_recipe_stands(asked, place):
    file = recipe(place, "late")
    assert asked(file) == (load(file), False)
    assert asked("--train.lr", "0.5", file)[0].train.lr == 0.5
    assert asked("--resume", "--compile", "false", file)[1]
    plain = file.with_suffix("")
    plain.write_text(file.read_text())
    assert asked(plain, "--seed", "3")[0].seed == 3
    options = "[{name: clip, weight: 0.3, options: {device: cpu}}, {name: jpeg_compressibility}]"
    for words, weights in (("clip:0.5,jpeg_compressibility", {"clip": 0.5, "jpeg_compressibility": 1.0}),
                           ("[{clip: 0.2}, {jpeg_compressibility: 1}]", {"clip": 0.2, "jpeg_compressibility": 1.0}),
                           (options, {"clip": 0.3, "jpeg_compressibility": 1.0})):  # fmt: skip
        assert {e.name: e.weight for e in asked(file, "--rewards", words)[0].rewards} == weights


def test_mistakes_of_recipe_and_overrides_come_together(capsys, place):
    file = recipe(place, "both", trian={"lr": 1}, rollout={"group_size": 1})
    code, text = shown(capsys, "train", file, "--train.lr", "-1", "--checkpoint.every", "0", "--train.stepps", "3")
    assert code == 2 and text.count(" - ") == 5
    for part in ("trian: unknown key; did you mean 'train'?", "group_size", "train.lr: expected a value above 0",
                 "checkpoint.every", "train.stepps: unknown key; did you mean 'train.steps'?"):  # fmt: skip
        assert part in text


WRONG = [
    ("--train.lrr 1", "train.lrr: unknown key; did you mean 'train.lr'?"),
    ("train.lr=1e-4", "train.lr=1e-4: expected --train.lr=1e-4"),
    ("--judge.endpoints h:8000 --rollout.height 721", "judge.endpoints: expected addresses that begin with http://"),
    ("--resum", "--resume"),
    ("--compile=maybe", "compile: expected true or false, got 'maybe'"),
    ("--compile", "--compile: expected a value, as in --compile false"),
    ("--train.steps", "--train.steps: expected a value, as in --train.steps 300"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_options(capsys, place, words, message):
    code, text = shown(capsys, "train", recipe(place, "wrong"), *words.split())
    assert code == 2 and message in text and "Traceback" not in text


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "export", "tiny"])
def test_help_imports_nothing_heavy(command):
    code = f"import sys; from prefgrpo.commands.cli import main\nmain(['{command}', '--help'])"
    code += "\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and f"prefgrpo {command}" in done.stdout
    assert not {"torch", "numpy", "transformers", "diffusers", "PIL", "aiohttp"} & set(done.stderr.split())
