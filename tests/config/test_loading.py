"""Configuration: valid recipes, and the error messages for invalid ones.

Why these cases: the recipe is the first thing a user gets wrong, so all mistakes must be reported together, with the
closest valid key; YAML 1.1 has traps (1e-4 is text, on is true, a repeated key drops the first); NaN passes
comparisons; and a configuration must survive the round trip through the run folder, or resuming would refuse it.
"""

import math
from dataclasses import asdict
from functools import reduce
from operator import getitem
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from prefgrpo.config import schema
from prefgrpo.config.loading import differences, flat_fields, from_dict, load, section, to_dict
from prefgrpo.config.recipe import ConfigError, read_yaml, to_yaml
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.sde.rules import RULES

GOOD = {"model": "m", "data": {"prompts": "p.txt"}}
OPTIONS = st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=6) | st.booleans(), max_size=3)


def field(name):
    """pydantic's FieldInfo of a field, by dotted name."""
    *sections, last = name.split(".")
    return reduce(lambda cls, key: cls.__pydantic_fields__[key].annotation, sections, Config).__pydantic_fields__[last]


def values(name):
    """Hypothesis strategy of the values that the field's type allows."""
    if name.endswith("rewards"):
        entry = st.fixed_dictionaries({"name": st.text(min_size=1, max_size=6)}, optional={"options": OPTIONS})
        return st.lists(entry, max_size=3, unique_by=lambda e: e["name"])
    if name.endswith("options"):
        return st.dictionaries(st.text(min_size=1, max_size=6), OPTIONS, max_size=3)
    info = field(name)
    kinds = get_args(info.annotation) if get_origin(info.annotation) in (Union, UnionType) else (info.annotation,)
    return st.one_of(st.from_type(limited(kind, info.metadata)) for kind in kinds)


def limited(kind, limits=()):
    """A type with its limits as annotated_types, which hypothesis reads, instead of in pydantic's Field."""
    base, *more = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    limits = [*limits, *(m for limit in more for m in getattr(limit, "metadata", [limit]))]
    return Annotated[(base, *limits)] if limits else base


def put(tree, name, value):
    *sections, last = name.split(".")
    reduce(getitem, sections, tree)[last] = value
    return tree


@settings(max_examples=60, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_any_valid_configuration_survives_its_file(tmp_path_factory, data):
    changed = asdict(from_dict(GOOD))
    for name in data.draw(st.sets(st.sampled_from(sorted(flat_fields(Config()))), max_size=8)):
        put(changed, name, data.draw(values(name).filter(lambda v: not isinstance(v, float) or math.isfinite(v))))
    try:
        config = from_dict(changed)
    except ConfigError:
        reject()  # values that contradict each other
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_text(to_yaml(to_dict(config)), encoding="utf-8")
    assert load(file) == from_dict(to_dict(config)) == config and differences(load(file), config) == {}


@pytest.mark.parametrize("text", ["1e5", "1.e-4", "+1e5", ".5e3", "yes", "~", "0x1F", "12:30", "\x85"])
def test_text_that_looks_like_another_value_survives_the_file(tmp_path, text):
    config = from_dict(GOOD | {"name": text, "rewards": [{"name": "clip", "options": {"model": text}}]})
    (tmp_path / "run.yaml").write_text(to_yaml(to_dict(config)), encoding="utf-8")
    assert load(tmp_path / "run.yaml") == config


def test_every_field_says_what_it_is():
    """The docstring below a field is its help text."""
    assert [name for name in flat_fields(Config()) if not (field(name).description or "")[3:]] == []
    assert set(schema.RULES) == RULES.keys() - {"ode"}, "ode has no log-prob to train on"


def test_every_mistake_of_names_and_types_is_listed_at_once():
    """And when there is none, every contradiction."""
    content = {
        "data": {"promts": "p.txt"},
        "rollout": {"group_size": 1, "steps": "many"},
        "trian": {"lr": 1},
        "train": {"lr": -1, "kl_coef": 0.1, "lora_rank": 0, "updates_per_rollout": 0},
        "judge": {"image_format": "gif", "endpoints": []},
    }
    with pytest.raises(ConfigError) as caught:
        from_dict(content)
    assert sorted(caught.value.mistakes) == [
        "data.promts: unknown key; did you mean 'data.prompts'?",
        "judge.image_format: expected 'jpeg', 'png' or 'webp', got 'gif'",
        "rollout.group_size: expected 2 or more, got 1",
        "rollout.steps: expected a whole number, got 'many'",
        "train.lr: expected a value above 0, got -1",
        "train.updates_per_rollout: expected a value above 0, got 0",
        "trian: unknown key; did you mean 'train'?",
    ]
    with pytest.raises(ConfigError) as caught:
        from_dict({"judge": {"endpoints": []}})
    assert sorted(caught.value.mistakes) == [
        "data.prompts: expected a file of prompts (txt, csv, tsv, jsonl or parquet), or data.pairs, got nothing",
        "judge.endpoints: expected at least one URL, or in `model` a judge that runs in this process, got neither",
        "model: expected the folder or hub id of a diffusers pipeline, got nothing",
    ]


TRAP = "(YAML reads an unquoted on, off, yes or no as true or false)"
MISTAKES = [
    ("rollout: {lr: 1e-4}", "rollout.lr: unknown key; did you mean 'train.lr'?"),
    ("train: {beta: 0.04}", "train.beta: unknown key; did you mean 'train.kl_coef'?"),
    ("learning_rate: 3e-4", "learning_rate: unknown key; did you mean 'train.lr'?"),
    ("sample: {noise_level: 0.7}", "sample: unknown key; did you mean 'rollout.eta'?"),
    ("config: {reward_fn: {ocr: 1}}", "config: unknown key; did you mean 'rewards'?"),
    ("train:", "train: expected a mapping of keys, got None"),
    ("name: no", f"name: expected text, got False {TRAP}"),
    ("judge: {endpoints: http://h}", "judge.endpoints: expected a list, got 'http://h'"),
    ("rollout: {shift: off}", f"rollout.shift: expected a number, got False {TRAP}"),
    ("train: {steps: yes}", f"train.steps: expected a whole number, got True {TRAP}"),
    ("train: {lr: .nan}", "train.lr: expected a finite number, got nan"),
    ("name: a/b", "name: expected a folder name, got 'a/b'"),
    ("rollout: {eta: 0}", "rollout.eta: expected a noise level above 0"),
    ("rollout: {rule: cps, eta: 1.5}", "rollout.eta: rule cps takes 0 … 1, got 1.5"),
    ("rollout: {window_low: 9}", "rollout.window_low/high: expected 0 <= low < high <= steps (10), got 9 and 9"),
    ("rollout: {window_size: 10}", "rollout.window_size: expected 0 … 9, got 10"),
    ("rollout: {rule: cps}\ntrain: {kl_form: flow_grpo}", "train.kl_form: flow_grpo divides by a variance"),
    ("judge: {deadline_s: 1, timeout_s: 2}", "judge.deadline_s: expected at least judge.timeout_s (2.0), got 1.0"),
    ("train: {lr: 1}\nname: x\ntrain: {steps: 2}", "key 'train' is given twice (again in line 5)"),
    ("- a", "is not valid YAML"),
    ("train: &x {lr: *x}", "is not valid YAML: the anchor in line 3 contains itself"),
    ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_what_is_said_about_one_mistake(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(f"model: m\ndata: {{prompts: p}}\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "r.yaml")
    (mistake,) = caught.value.mistakes
    assert message in mistake


def test_a_section_without_keys():
    with pytest.raises(ConfigError, match="judge: expected a mapping of keys, got None"):
        section(JudgeConfig, None, "judge")


def test_files(tmp_path, root):
    file = tmp_path / "r.yaml"
    with pytest.raises(ConfigError, match=r"recipe not found: .*r\.yaml"):
        load(file)
    for content in (b"model: \xff\xfe", b"a: " + b"[" * 5000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is not valid YAML"):
            load(file)
    for text, kind in (("- a\n- b\n", "list"), ("hello", "str")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"expected a mapping of keys at the top level, got {kind}"):
            load(file)
    file.write_text("")
    assert read_yaml(file) == {}
    file.write_text("model: m\ndata: {prompts: p}\ncompile: off\ntrain: {lr: 1e-4}\n")
    assert not load(file).compile and load(file).train.lr == 1e-4, "plain YAML 1.1 would read 1e-4 as text"
    for recipe in (root / "scripts" / "demo").glob("*.yaml"):
        load(recipe)


@settings(max_examples=100)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["model", "data", "train", "rollout", "lr", "steps", "prompts", "judge", "x"])
                      | st.integers() | st.booleans() | st.none(), inner, max_size=4)
), max_leaves=12))  # fmt: skip
def test_any_content_ends_in_a_configuration_or_a_list_of_mistakes(content):
    """Never hangs, never raises another exception."""
    if isinstance(content, dict):
        try:
            assert not list(from_dict(content).mistakes())
        except ConfigError as error:
            assert error.mistakes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    floats = [name for name, v in flat_fields(Config()).items() if isinstance(v, float)] + ["rollout.shift"]
    assert len(floats) > 12
    for name in floats:
        with pytest.raises(ConfigError) as caught:
            from_dict(put(asdict(from_dict(GOOD)), name, value))
        (mistake,) = caught.value.mistakes
        assert mistake.startswith(f"{name}: expected a") and "got" in mistake
