"""The entries of `rewards:`, and the short forms in which they may be written.

    [{name: clip, weight: 0.3, options: {…}, judge: {…}}, {name: mine, reward: clip}, …]             in a recipe
    "a,b"   "a:0.5,b:1"   "{a: 0.5, b: 1}"   "[a, {name: b, …}]"                            also as text, YAML or JSON

A user's own class or function is named by its import path, "pkg.mod:Class" or "pkg.mod.Class", or by its file,
"rewards.py:function". Invariant: names are unique, weights finite; every error names the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import yaml
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from prefgrpo.config.by_path import IMPORT_PATH
from prefgrpo.config.recipe import Loader


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class RewardEntry:
    """One reward of a run."""

    name: str
    """Its name in metrics, tables and logs."""
    reward: str = ""
    """Registry name (`prefgrpo reward list`), import path or file.py:name; empty: `name`."""
    weight: float = 1.0
    """Its weight in what is optimised; 0: logged, not trained on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its class; `url` runs it behind `prefgrpo reward serve`."""
    judge: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the judge section for this reward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", self.reward or self.name)


def entries(spec: Any) -> tuple[RewardEntry, ...]:
    """The entries in any of their forms. Raises ValueError that names the first bad one."""
    listed = _listed(spec)
    names = [entry.name for entry in listed]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"reward '{twice[0]}' is named twice; give each a name of its own, {{name: …, reward: {twice[0]}}}"
        )
    return tuple(listed)


def _listed(spec: Any) -> list[RewardEntry]:
    if isinstance(spec, RewardEntry):
        return [spec]
    if isinstance(spec, str) and spec.strip()[:1] in ("{", "["):
        try:
            return _listed(yaml.load(spec, Loader))
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{spec!r} is not valid YAML: {error}") from error
    if isinstance(spec, str):
        return [_from_text(part) for part in map(str.strip, spec.split(",")) if part]
    if isinstance(spec, Mapping):
        spec = {"name": spec["reward"], **spec} if "reward" in spec else spec
        return [_entry(spec)] if "name" in spec else [_entry({"name": k, "weight": w}) for k, w in spec.items()]
    if isinstance(spec, list | tuple):
        return [entry for item in spec for entry in _listed(item)]
    raise ValueError(
        f"bad entry {spec!r}: expected a name, {{name: …, reward: …, weight: …, options: …, judge: …}} or a list"
    )


def _from_text(text: str) -> RewardEntry:
    """The entry of 'name' or 'name:weight'; a name may be 'pkg.mod:Class' or 'file.py:name'."""
    if "=" in text:
        raise ValueError(f"bad entry {text!r}: expected 'name' or 'name:weight', as in '{text.replace('=', ':', 1)}'")
    name, colon, weight = (piece.strip() for piece in text.rpartition(":"))
    try:
        number = float(weight) if colon else 1.0
    except ValueError:
        if weight and not IMPORT_PATH.fullmatch(text):
            raise ValueError(f"weight of reward '{name}' must be a number, got {weight!r}") from None
        name = text
        number = 1.0
    name = name if colon else text
    if not name or (":" in name and not IMPORT_PATH.fullmatch(name)):
        raise ValueError(f"bad entry {text!r}: expected 'name' or 'name:weight'")
    return _entry({"name": name, "weight": number})


def _entry(content: Mapping[str, Any]) -> RewardEntry:
    """An entry from its keys."""
    try:
        return RewardEntry(**content)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = str(wrong["loc"][0])
        expected = {"name": "a text", "reward": "a text", "weight": "a finite number"}.get(key, "a mapping")
        if wrong["type"] == "unexpected_keyword_argument":
            expected = "none of this name, but name, reward, weight, options and judge"
        raise ValueError(f"{key} of reward {content['name']!r}: expected {expected}, got {wrong['input']!r}") from error
