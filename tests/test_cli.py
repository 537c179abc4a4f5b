"""The command line, as a person types it.

Why these cases: `--help` must show every field with its line, or people read the source; an override must reach its
nested field whatever its type (tuples, None, switches), before or after a typo in the recipe; and a wrong command or
option must end with exit code 2 and the right word, not with a traceback.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass
from itertools import pairwise
from typing import get_type_hints

import pytest
import tyro
from tiny_run import recipe, world

import prefgrpo
from prefgrpo.commands import cli
from prefgrpo.config.recipe import flatten
from prefgrpo.config.schema import Config, ConfigError, parse


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def asked(monkeypatch):
    """The configuration that `prefgrpo train …` would run with."""

    def ask(*argv):
        got = []
        monkeypatch.setattr(cli, "_run", lambda config, resume: got.append((config, resume)) or 0)
        code = cli.main(["train", *map(str, argv)])
        return got[0] if got else code

    return ask


def shown(capsys, *argv):
    """(exit code, what was printed, without colours and line breaks)."""
    try:
        code = cli.main(list(argv))
    except SystemExit as end:
        code = end.code
    text = "".join(capsys.readouterr())
    return code, re.sub(r"[\s│╭╮╰╯─]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def documented(cls, prefix=""):
    """(option, first words of its docstring) of every field, sections included."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    hints = get_type_hints(cls)
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            yield f"--{prefix}{node.target.id.replace('_', '-')}", after.value.value
    for f in fields(cls):
        if is_dataclass(hints[f.name]):
            yield from documented(hints[f.name], f"{prefix}{f.name}.")


def test_help_shows_every_field_with_its_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, text = shown(capsys, "train", "--help")
    assert code == 0
    found = list(documented(Config))
    options = {"reward.options", "eval.options"}  # empty, and so without leaves of their own
    assert len(found) == len(flatten(asdict(Config())).keys() | options) > 60
    for option, line in found:
        assert option in text, f"{option} is not in --help"
        words = re.sub(r"\s+", " ", line).split(";")[0].split(",")[0][:40]
        assert words in text, f"{option}: {words!r} is not in --help"
    assert "--resume" in text and "YAML file of the run" in text


def test_help_also_with_a_recipe_even_a_broken_one(capsys, place, tmp_path):
    (tmp_path / "bad.yaml").write_text("trian: [")
    for file in (recipe(place, "help"), tmp_path / "bad.yaml", tmp_path / "none.yaml"):
        code, text = shown(capsys, "train", str(file), "--help")
        assert code == 0 and "--train.lr" in text


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_the_list_of_commands(capsys, argv):
    code, text = shown(capsys, *argv)
    assert code == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert name in text and line in text


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(capsys, name):
    code, text = shown(capsys, *name.split(), "--help")
    assert code == 0 and f"usage: prefgrpo {name}" in text and "--help" in text


def test_version(capsys):
    assert shown(capsys, "--version") == (0, f"prefgrpo {prefgrpo.__version__} ")
    assert re.match(r"\d+\.\d+", prefgrpo.__version__)


@pytest.mark.parametrize("argv", [["trian"], ["judge"], ["judge", "srve"], ["--train"], ["", "x"]])
def test_unknown_commands(capsys, argv):
    code, text = shown(capsys, *argv)
    assert code == 2 and f"error: unknown command '{' '.join(argv[:2])}'" in text and "train" in text


def test_overrides_reach_every_kind_of_field(asked, place):
    file = recipe(place, "over")
    config_, resume = asked(
        file, "--train.lr", "3e-6", "--rollout.sigmas", "published", "--rollout.shift", "2.5",
        "--train.lora-targets", "to_q", "to_k",
        "--judge.endpoints", "http://a:1", "http://b:2", "--no-tensorboard", "--rollout.same-noise", "--seed", "7",
        "--judge.backend", "http", "--train.clip-range-high", "0.1", "--name", "my run", "--dtype", "bf16", "--resume",
    )  # fmt: skip
    assert resume and config_.train.lr == 3e-6 and config_.rollout.shift == 2.5 and config_.seed == 7
    assert config_.train.lora_targets == ("to_q", "to_k") and config_.judge.endpoints == ("http://a:1", "http://b:2")
    assert not config_.tensorboard and config_.rollout.same_noise and config_.train.clip_range_high == 0.1
    assert config_.name == "my run" and config_.dtype == "bf16"
    assert config_.rollout.group_size == 4, "what is not overridden is the recipe's"


def test_none_and_underscores_and_equals(asked, place):
    file = recipe(place, "none", rollout={"sigmas": "published", "shift": 3.0})
    assert asked(file)[0].rollout.shift == 3.0
    assert asked(file, "--rollout.sigmas", "pipeline", "--rollout.shift", "None")[0].rollout.shift is None
    assert asked(file, "--rollout.group_size", "6")[0].rollout.group_size == 6
    assert asked(file, "--rollout.group-size=5")[0].rollout.group_size == 5


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--tensorboard", "false"], "tensorboard", False),
        (["--train.gradient-checkpointing", "True"], "train.gradient_checkpointing", True),
        (["--train.gradient_checkpointing=false"], "train.gradient_checkpointing", False),
        (["train.gradient_checkpointing=true"], "train.gradient_checkpointing", True),
        (["--train.no-gradient-checkpointing"], "train.gradient_checkpointing", False),
        (["train.lr=3e-6"], "train.lr", 3e-6),
        (["rollout.shift=null"], "rollout.shift", None),
        (["rollout.shift=None"], "rollout.shift", None),
        (["train.lora-targets=[to_q, to_k]"], "train.lora_targets", ("to_q", "to_k")),
        (["reward.options={clip: {device: cpu}}"], "reward.options", {"clip": {"device": "cpu"}}),
        (["name=a b=c"], "name", "a b=c"),
        (["--name", "a=b"], "name", "a=b"),
        (["--judge.endpoints", "http://a:1/?k=v", "seed=3"], "judge.endpoints", ("http://a:1/?k=v",)),
    ],
)
def test_overrides_as_other_tools_spell_them(asked, place, argv, field, value):
    for order in (argv, ["--seed", "5", *argv]):
        config = asked(recipe(place, "spelled"), *order)[0]
        for part in field.split("."):
            config = getattr(config, part)
        assert config == value


def test_without_overrides_it_is_the_recipe(asked, place):
    file = recipe(place, "same")
    assert asked(file) == (parse(file)[0], False)


def test_an_override_may_mend_the_recipe(asked, place):
    file = recipe(place, "mend", rollout={"group_size": 1})
    assert asked(file) == 2
    assert asked(file, "--rollout.group-size", "2")[0].rollout.group_size == 2


def test_the_recipe_is_found_wherever_it_stands(asked, place):
    file = recipe(place, "late")
    assert asked("--train.lr", "0.5", file)[0].train.lr == 0.5
    assert asked("--resume", file)[1]
    plain = file.with_suffix("")
    plain.write_text(file.read_text())
    assert asked(plain, "--seed", "3")[0].seed == 3
    template = place / "template.yaml"
    template.write_text("labels: []")
    assert asked("--judge.template", template, file) == 2, "which of the two is the recipe is not guessed"


def test_mistakes_of_recipe_and_overrides_come_together(capsys, place):
    file = recipe(place, "both", trian={"lr": 1}, rollout={"group_size": 1})
    code, text = shown(capsys, "train", str(file), "--train.lr", "-1", "--checkpoint.every", "nan".replace("nan", "0"))
    assert code == 2
    for part in (
        "trian: unknown key; did you mean 'train'?",
        "group_size",
        "train.lr: expected a value above 0",
        "every",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--train.lrr", "1"], "--train.lrr: unknown option; did you mean 'train.lr'?"),
        (["--rollout.groupsize", "4"], "did you mean 'rollout.group_size'?"),
        (["--train.learning-rate", "1e-5"], "--train.learning-rate: unknown option; did you mean 'train.lr'?"),
        (["--learning_rate=1e-5"], "did you mean 'train.lr'?"),
        (["train.learning_rate=1e-5"], "did you mean 'train.lr'?"),
        (["--trian.lr", "1"], "did you mean 'train.lr'?"),
        (["--tensorboard=maybe"], "tensorboard: expected true or false, got 'maybe'"),
        (["train.steps=many"], "many"),
        (["--train.steps", "many"], "many"),
        (["--judge.backend", "magic"], "magic"),
        (["--train.steps"], "--train.steps"),
    ],
)
def test_wrong_options(capsys, place, option, told):
    code, text = shown(capsys, "train", str(recipe(place, "wrong")), *option)
    assert code == 2 and told in text and "Traceback" not in text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_do_not_come_in_here(capsys, place, value):
    code, text = shown(capsys, "train", str(recipe(place, "inf")), f"--train.lr={value}")
    assert code == 2 and f"train.lr: expected a finite number, got {value}" in text


def test_no_recipe_at_all(capsys):
    code, text = shown(capsys, "train")
    assert code == 2 and "PATH" in text
    code, text = shown(capsys, "train", "scripts/none.yaml")
    assert code == 2 and "recipe not found: scripts/none.yaml" in text


def test_errors_that_a_user_can_mend_have_no_traceback():
    for kind in cli._mendable():
        assert issubclass(kind, Exception) and not issubclass(kind, AssertionError | TypeError)
    assert ConfigError in cli._mendable()


def test_reports_can_be_written_again(capsys, place, tmp_path):
    from tiny_run import train

    assert train(recipe(place, "again", train={"steps": 1}))[0] == 0
    folder = place / "runs" / "again"
    (folder / "report.html").unlink()
    code, text = shown(capsys, "report", str(folder))
    assert code == 0 and (folder / "report.html").is_file() and "report.html" in text


def test_a_folder_that_is_no_run(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is no run: expected config.yaml or metrics.jsonl in it" in capsys.readouterr().err


def test_a_reader_may_leave():
    """As `prefgrpo reward list | head -1` does."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "prefgrpo", "reward", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 141


def test_help_imports_nothing_heavy():
    code = "import sys; from prefgrpo.commands.cli import main\ntry: main(['train', '--help'])"
    code += "\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--train.lr" in done.stdout
    assert not {"torch", "numpy", "transformers", "diffusers", "PIL", "aiohttp"} & set(done.stderr.split())


def test_mistakes_come_before_what_the_model_changes(capsys, place):
    tiny = ["--model", str(place / "flux"), "--rollout.height", "512"]
    file = place / "other.yaml"
    file.write_text(recipe(place, "base").read_text().replace(str(place / "flux"), "owner/name"))
    assert shown(capsys, "train", str(file), *tiny, "--train.lr", "-1")[1].startswith("error: the configuration has")


def test_python_dash_m_is_the_command():
    import prefgrpo.__main__ as module

    assert module.main is cli.main and "sys.exit(main())" in inspect.getsource(module)
    assert tyro.__version__ and sys.version_info >= (3, 10)
