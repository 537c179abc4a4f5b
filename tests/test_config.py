"""Configuration: what a recipe may say, and what is said when it is wrong.

Why these cases: a recipe is the first thing a user gets wrong, so every mistake must be named at once with the nearest
right key; YAML 1.1 has traps (1e-4 is text, on is true, a key twice drops the first); NaN passes comparisons; and a
configuration must survive the way through the run folder unchanged, or resuming would refuse it.
"""

import ast
import inspect
import math
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from prefgrpo.config import schema as config
from prefgrpo.config.schema import Config, ConfigError, check, differences, from_dict, load, parse, to_dict

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking 60 fields takes minutes
GOOD = {"model": "m", "data": {"prompts": "p.txt"}}
SECTIONS = [cls for cls in vars(config).values() if is_dataclass(cls) and cls.__module__ == config.__name__]


def mistakes(content) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(content)
    return str(caught.value)


def written(tmp_path, text: str) -> Path:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=PHASES)
@given(st.data())
def test_any_valid_configuration_survives_its_file(tmp_path_factory, data):
    changed = asdict(from_dict(GOOD | {"judge": {"model": "j"}}))
    together = ("rollout.window", "rollout.sigmas", "rollout.shift")  # their values depend on other fields'
    leaves = {k: v for k, v in _leaves(Config()).items() if not k.startswith(together)}
    for name in data.draw(st.sets(st.sampled_from(sorted(leaves)), max_size=8)):
        _put(changed, name, data.draw(_like(name, leaves[name])))
    one = from_dict(changed)
    assert from_dict(to_dict(one)) == one
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_text(yaml.safe_dump(to_dict(one), sort_keys=False), encoding="utf-8")
    assert load(file) == one and differences(load(file), one) == {}


def _leaves(value, prefix=""):
    out = {}
    for f in fields(value):
        one = getattr(value, f.name)
        out.update(_leaves(one, f"{prefix}{f.name}.") if is_dataclass(one) else {prefix + f.name: one})
    return out


def _put(tree, name, value):
    *path, last = name.split(".")
    for key in path:
        tree = tree[key]
    tree[last] = value


def _like(name, value):
    """Values of the field's type, mostly sensible ones."""
    hint = _hint(name)
    if get_origin(hint) is Literal:
        return st.sampled_from(hint.__args__)
    if name == "memory.offload":
        return st.lists(st.sampled_from(["text_encoder", "vae"]), unique=True)
    if isinstance(value, bool):
        return st.booleans()
    if name in ("device", "rollout.rule", "name"):
        return st.sampled_from({"device": ["cpu", "cuda"], "name": ["x", "é 1"]}.get(name, ["dance", "cps", "wan"]))
    if isinstance(value, int):
        return st.integers(2, 64)
    if isinstance(value, tuple):
        return st.lists(st.text(max_size=8), min_size=1, max_size=3).map(tuple)
    if isinstance(value, str):
        return st.text(min_size=1, max_size=12)
    if isinstance(value, dict):
        options = st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=6) | st.booleans(), max_size=3)
        return st.dictionaries(st.text(min_size=1, max_size=6), options, max_size=3)
    whole = int in getattr(hint, "__args__", ())
    share = st.integers(1, 64) if whole else st.floats(0, 0.99, exclude_min=True)
    return share if value is not None else st.none() | share


def _hint(name):
    *path, last = name.split(".")
    cls = Config
    for key in path:
        cls = get_type_hints(cls)[key]
    return get_type_hints(cls)[last]


def test_differences_name_every_changed_field():
    a = from_dict(GOOD)
    b = replace(a, seed=3, train=replace(a.train, lora_targets=("to_q",)))
    assert differences(a, b) == {"seed": (0, 3), "train.lora_targets": ((), ("to_q",))}


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda c: c.__name__)
def test_every_field_says_what_it_is(cls):
    """A docstring right after each field: it is the help text."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and not is_dataclass(get_type_hints(cls)[node.target.id]):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), (
                f"{node.target.id} has no line"
            )
            assert len(after.value.value) > 3


def test_every_mistake_is_listed_at_once():
    told = mistakes(
        {
            "data": {"promts": "p.txt"},
            "rollout": {"group_size": 1, "steps": "many", "rule": "flwo"},
            "trian": {"lr": 1},
            "train": {"lr": -1, "kl_coef": 0.1, "lora_rank": 0, "updates_per_rollout": 0},
            "judge": {"backend": "magic", "endpoints": []},
        }
    )
    for part in (
        "data.promts: unknown key; did you mean 'data.prompts'?",
        "trian: unknown key; did you mean 'train'?",
        "rollout.steps:",
        "got 'many'",
        "rollout.group_size: a group needs at least 2 images to compare, got 1",
        "rollout.rule: expected one of flow, dance, cps",
        "train.lr: expected a value above 0, got -1",
        "train.kl_coef: the reference is the LoRA switched off",
        "train.updates_per_rollout: expected a value above 0, got 0",
        "judge.backend:",
        "judge.endpoints: expected at least one URL",
        "model: expected the folder or hub id",
        "data.prompts: expected a text file",
    ):
        assert part in told, f"{part!r} is missing in:\n{told}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"group_size": 8}, "group_size: unknown key; did you mean 'rollout.group_size'?"),
        ({"rollout": {"lr": 1e-4}}, "rollout.lr: unknown key; did you mean 'train.lr'?"),
        ({"train": {"learning_rate": 1e-4}}, "train.learning_rate: unknown key; did you mean 'train.lr'?"),
        ({"train": {"zzzzzz": 1}}, "train.zzzzzz: unknown key; known keys here: steps, "),
        ({"sead": 1}, "sead: unknown key; did you mean 'seed'?"),
        ({1: 2}, "1: unknown key"),
        ({True: 2}, "True: unknown key"),
        ({"train": None}, "train: Input should be"),
        ({"train": 3}, "train: Input should be"),
        ({"data": {"prompts": {"a": 1}}}, "data.prompts: Input should be a valid string"),
        ({"judge": {"endpoints": "http://h"}}, "judge.endpoints: Input should be"),
        ({"judge": {"endpoints": [1, 2]}}, "judge.endpoints: Input should be a valid string"),
        ({"rollout": {"shift": "high"}}, "rollout.shift:"),
        ({"rollout": {"steps": 10.5}}, "rollout.steps:"),
        ({"name": "a/b"}, "name: expected a folder name, got 'a/b'"),
        ({"name": ""}, "name: expected a folder name, got ''"),
        ({"seed": -1}, "seed: expected 0"),
        ({"seed": 2**63}, "seed: expected 0"),
        ({"device": "gpu"}, "device: expected auto, cpu or cuda, got 'gpu'"),
        ({"rollout": {"rule": "ode"}}, "'ode' has no log-prob to train on"),
        ({"rollout": {"eta": 0}}, "rollout.eta: expected a noise level above 0"),
        ({"rollout": {"rule": "cps", "eta": 1.5}}, "rollout.eta: rule cps takes 0 … 1, got 1.5"),
        (
            {"rollout": {"window_low": 9}},
            "rollout.window_low/high: expected 0 <= low < high <= steps (10), got 9 and 9",
        ),
        ({"rollout": {"window_size": 10}}, "rollout.window_size: expected 0 … 9, got 10"),
        (
            {"rollout": {"sigmas": "published", "shift": 0.0}},
            "rollout.shift: expected a value above 0 for rollout.sigmas",
        ),
        ({"train": {"beta1": 1.0}}, "train.beta1: expected [0, 1), got 1.0"),
        ({"train": {"ema_decay": 1.0}}, "train.ema_decay: expected [0, 1), got 1.0"),
        ({"train": {"clip_range_high": 0.0}}, "train.clip_range_high: expected > 0, got 0.0"),
        ({"judge": {"backend": "local"}}, "judge.model: the local judge needs a checkpoint"),
        ({"judge": {"max_missing": 1.0}}, "judge.max_missing: expected a share in [0, 1), got 1.0"),
        ({"data": {"max_length": 0}}, "data.max_length: expected a value above 0, got 0"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every: expected a value above 0, got 0"),
    ],
)
def test_what_is_said_about_one_mistake(content, told):
    text = mistakes(GOOD | content)
    assert told in text
    assert text.count("\n  - ") == 1 or "data" in content, f"one mistake, one line: {text}"


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["model", "data", "train", "rollout", "lr", "steps", "prompts", "judge", "x"])
                      | st.integers() | st.booleans() | st.none(), inner, max_size=4)
), max_leaves=12))  # fmt: skip
def test_any_content_ends_in_a_configuration_or_a_list_of_mistakes(content):
    """Never a hang, never another exception."""
    if isinstance(content, dict):
        try:
            assert check(from_dict(content)) == []
        except ConfigError as error:
            assert error.mistakes


def test_yaml_traps(tmp_path):
    assert load(written(tmp_path, "model: m\ndata: {prompts: p}\ntrain: {lr: 1e-4}\n")).train.lr == 1e-4
    assert load(written(tmp_path, "model: m\ndata: {prompts: p}\ntensorboard: off\n")).tensorboard is False
    text = "model: m\ndata: {prompts: p}\ntrain: {lr: on, steps: yes}\nname: no\nrollout: {shift: off}\n"
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    told = str(caught.value)
    for field in ("train.lr", "train.steps", "name", "rollout.shift"):
        assert f"{field}: expected a value like" in told
    assert "YAML reads an unquoted on, off, yes or no as true or false" in told
    with pytest.raises(ConfigError, match=r"key 'train' is given twice .again in line 4"):
        load(written(tmp_path, "model: m\ntrain: {lr: 1}\ndata: {prompts: p}\ntrain: {steps: 2}\n"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    """Also those that come from the command line, past the YAML reader."""
    base = from_dict(GOOD)
    floats = [name for name, v in _leaves(base).items() if isinstance(v, float)] + ["rollout.shift"]
    assert len(floats) > 15
    for name in floats:
        tree = asdict(base)
        _put(tree, name, value)
        assert f"{name}: expected a finite number, got {value}" in check(TypeAdapter(Config).validate_python(tree))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", "expected a mapping of keys at the top level, got list"),
        ("hello", "expected a mapping of keys at the top level, got str"),
        ("a: [1", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        ("? [a, b]\n: 1\n", "is not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        parse(written(tmp_path, text))


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe not found: .*nowhere\.yaml"):
        parse(tmp_path / "nowhere.yaml")
    (tmp_path / "b.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        parse(tmp_path / "b.yaml")
    assert parse(written(tmp_path, ""))[0] == Config()


def test_the_shipped_recipes_are_valid(root):
    found = sorted((root / "scripts" / "demo").glob("*.yaml"))
    assert found
    for recipe in found:
        load(recipe)
