"""Makes a configuration from a recipe or from dicts, in one validation pass.

Invariant: `load` either returns a configuration or raises one ConfigError: with every mistake of names and types, or,
if there is none, with everything that contradicts itself.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from prefgrpo.config.recipe import ConfigError, flatten, merge, read_yaml
from prefgrpo.config.schema import MODEL_VALUES, Config

T = TypeVar("T")

PEERS = {
    "rollout.height": "h resolution",
    "rollout.width": "w",
    "rollout.steps": "sampling_steps num_steps",
    "rollout.guidance": "train_guidance_scale cfg_infer guidance_scale",
    "rollout.eta": "noise_level",
    "rollout.rule": "grpo_step_mode sde_type",
    "rollout.group_size": "num_generations num_image_per_prompt",
    "rollout.prompts_per_step": "train_batch_size num_batches_per_epoch",
    "rollout.window_size": "timestep_fraction sde_window_size",
    "rollout.window_low": "sde_window_range",
    "rollout.same_noise": "init_same_noise same_latent",
    "train.updates_per_rollout": "gradient_accumulation_steps",
    "train.objective": "rationorm",
    "train.objective_options": "bestofn",
    "train.lr": "learning_rate",
    "train.kl_coef": "kl_beta beta",
    "train.ema_decay": "ema",
    "rewards": "reward_spec reward_fn",
    "advantage.combine": "apply_gdpo",
    "advantage.std": "global_std",
    "checkpoint.every": "checkpointing_steps save_freq",
    "eval.every": "eval_every_steps eval_freq",
}
"""Our field → what Pref-GRPO, DanceGRPO and Flow-GRPO call it (the table of docs/recipes.md)."""


def load(recipe: str | Path) -> Config:
    """Configuration from a YAML recipe. Raises ConfigError."""
    return from_dict(read_yaml(recipe))


def from_dict(content: Mapping[str, Any]) -> Config:
    """Configuration from nested dicts. Raises ConfigError."""
    texts = {key: value for key, value in flatten(dict(content)).items() if isinstance(value, str)}
    if foreign := [key for key, value in texts.items() if re.search("[\ud800-\udfff]", value)]:
        raise ConfigError([f"{key}: expected a name in UTF-8, got {texts[key]!a}: rename it" for key in foreign])
    if texts.get("data.pairs"):
        content = {"rewards": []} | dict(content)  # no judge by default, as the pairs have verdicts
    return _checked(Config, content, (), [])


def section(kind: type[T], content: Mapping[str, Any], name: str) -> T:
    """A section of the configuration, or another dataclass of options, from a mapping called `name`.

    Raises ConfigError with every mistake in it.
    """
    if not isinstance(content, Mapping):
        raise ConfigError([f"{name}: expected a mapping of keys, got {content!r}"])
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    mistakes = [f"{name}.{key}: unknown key; {_suggest_key(name, key, names)}" for key in content if key not in names]
    return _checked(kind, {key: content[key] for key in content if key in names}, (name,), mistakes)


def _checked(kind: type[T], content: Mapping[str, Any], path: tuple[str, ...], mistakes: list[str]) -> T:
    """A dataclass from its content. Raises ConfigError with `mistakes` and all others."""
    text = json.dumps(content, default=str)  # JSON, because pydantic's strict mode takes its lists as tuples
    try:
        options = TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise ConfigError([*mistakes, *_messages(error, json.loads(text), path)]) from error
    contradictions = options.mistakes() if hasattr(options, "mistakes") else ()
    if mistakes := [*mistakes, *(".".join((*path, mistake)) for mistake in contradictions)]:
        raise ConfigError(mistakes)
    return options


def recipe_values(recipe: str | Path | None, model: str = "") -> dict[str, Any]:
    """Nested values of a recipe (None: none), overridden by the file MODEL_VALUES in the folder of `model`.

    That is, if it is not the recipe's own model: a tiny pipeline cannot render the 720 pixels of FLUX's recipe. Its
    prompts are left out by a recipe with data.pairs.
    """
    values = read_yaml(recipe) if recipe else {}
    file = Path(model) / MODEL_VALUES
    if model and values.get("model") != model and file.is_file():
        own = read_yaml(file)
        if values.get("data", {}).get("pairs"):
            own.get("data", {}).pop("prompts", None)
        values = merge(values, own)
    return values


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict (tuples become lists), as written to the run folder."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted field name → (value in a, value in b) where they differ."""
    left, right = flatten(asdict(a)), flatten(asdict(b))
    both = dict.fromkeys([*left, *right])  # options of rewards may be in one only
    return {key: (left.get(key), right.get(key)) for key in both if left.get(key) != right.get(key)}


def flat_fields(section: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name → value of every field below a section."""
    out: dict[str, Any] = {}
    for f in fields(section):
        value = getattr(section, f.name)
        out |= flat_fields(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name: value}
    return out


EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a value above {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_type": "a whole number",
    "less_than": "a value below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_type": "text",
    "tuple_type": "a list",
}
"""Pydantic's error type → description of the expected value."""


def _messages(error: ValidationError, data: Any, section: tuple[str, ...]) -> list[str]:
    """A message per wrong value in `data`, the content of `section`; a union has an error per branch."""
    errors: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors():
        errors.setdefault(_key_path(item["loc"], data), []).append(item)
    return [_describe_error((*section, *path), items) for path, items in errors.items()]


def _key_path(loc: tuple[int | str, ...], data: Any) -> tuple[str, ...]:
    """The keys in an error's location, without the list indices and union branches that pydantic adds to it."""
    keys: list[str] = []
    for part in loc:
        if not (isinstance(data, dict) and part in data):
            break
        keys.append(str(part))
        data = data[part]
    return tuple(keys)


def _describe_error(path: tuple[str, ...], items: list[Any]) -> str:
    """One message for all errors at a key."""
    name = ".".join(path)
    value = items[0]["input"]
    if items[0]["type"] == "unexpected_keyword_argument":
        *sections, key = path
        given = {part for below in flatten({key: value}) for part in below.split(".")}
        if ours := [field for field, theirs in PEERS.items() if given & set(theirs.split())]:
            return f"{name}: unknown key; did you mean {', '.join(map(repr, ours))}?"
        siblings = [f.name for f in fields(reduce(getattr, sections, Config()))]
        return f"{name}: unknown key; {_suggest_key('.'.join(sections), key, siblings, list(flat_fields(Config())))}"
    if items[0]["type"] == "value_error":
        return f"{name}: {items[0]['ctx']['error']}"
    expected = [EXPECTED.get(item["type"], item["msg"]).format(**item.get("ctx", {})) for item in items]
    trap = " (YAML reads an unquoted on, off, yes or no as true or false)" * isinstance(value, bool)
    return f"{name}: expected {' or '.join(dict.fromkeys(expected))}, got {value!r}{trap}"


def _suggest_key(section: str, key: str, siblings: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Hint for an unknown key: "did you mean 'train.lr'?", or the section's keys. elsewhere: keys of all sections."""
    near = [name for name in elsewhere if name.split(".")[-1] == key] or difflib.get_close_matches(key, siblings, n=1)
    if not near:
        return f"known keys here: {', '.join(siblings) or 'none'}"
    return f"did you mean '{near[0] if '.' in near[0] or not section else f'{section}.{near[0]}'}'?"
