"""Configuration: what every recipe must have in common; single mistakes are in tests/run/test_errors.py.

Why these cases: a configuration must survive the round trip through the run folder, or resuming would refuse it; YAML
1.1 has traps; NaN passes comparisons; and no content may end in anything but a configuration or a list of mistakes.
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
from prefgrpo.config.loading import differences, flat_fields, from_dict, load, to_dict
from prefgrpo.config.recipe import ConfigError, read_yaml, to_yaml
from prefgrpo.config.schema import Config
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
