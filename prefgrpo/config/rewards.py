"""The entries of `rewards:`, and the short forms in which they may be written.

    [{name: clip, weight: 0.3, options: {…}, judge: {…}}, …]                                         in a recipe
    "a,b"   "a:0.5,b:1"   '{"a": 0.5, "b": 1}'   '["a", "b"]'                                        also as text

A user's own class or function is named by its import path, "pkg.mod:Class" or "pkg.mod.Class", or by its file,
"rewards.py:function". Invariant: each reward is named once, with a finite weight; every error names the entry.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

IMPORT_PATH = re.compile(r"([^\W\d]\w*\.)*[^\W\d]\w*[.:][^\W\d]\w*|[^,:]+\.py:[^\W\d]\w*")
"""package.module.Class, package.module:Class or path/file.py:function."""


@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class RewardEntry:
    """One reward of a run."""

    name: str
    """Registry name (`prefgrpo reward list`), import path or file.py:name."""
    weight: float = 1.0
    """Its weight in what is optimised; 0: logged, not trained on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its class; `url` runs it behind `prefgrpo reward serve`."""
    judge: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the judge section for this reward."""


def entries(spec: Any) -> tuple[RewardEntry, ...]:
    """The entries in any of their forms. Raises ValueError that names the first bad one."""
    found: dict[str, RewardEntry] = {}
    for entry in _listed(spec):
        if entry.name in found:
            raise ValueError(f"reward '{entry.name}' is named twice; give each reward once")
        found[entry.name] = entry
    return tuple(found.values())


def _listed(spec: Any) -> list[RewardEntry]:
    if isinstance(spec, RewardEntry):
        return [spec]
    if isinstance(spec, str):
        text = spec.strip()
        if text[:1] not in ("{", "["):
            return [_from_text(entry.strip(), spec) for entry in text.split(",") if entry.strip()]
        try:
            pairs = json.loads(text, object_pairs_hook=_pairs)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{spec!r} is not valid JSON: {error}") from error
        return _listed(pairs)
    if isinstance(spec, Mapping):
        return [_entry({"name": name, "weight": weight}) for name, weight in spec.items()]
    if not isinstance(spec, list | tuple):
        raise ValueError(f"expected a text, a list of entries or a mapping from names to weights, got {spec!r}")
    if bad := [item for item in spec if not isinstance(item, str | Mapping | RewardEntry)]:
        raise ValueError(f"bad entry {bad[0]!r}: expected a name, or {{name: …, weight: …, options: …, judge: …}}")
    made: list[RewardEntry] = []
    for item in spec:
        if isinstance(item, Mapping):
            made.append(_entry(item))
        elif isinstance(item, str) and IMPORT_PATH.fullmatch(item.strip()):
            made.append(_entry({"name": item.strip()}))
        else:
            made += _listed(item)
    return made


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a dict would drop the first of two equal names."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"reward '{twice[0]}' is named twice; give each reward once")
    return dict(pairs)


def _from_text(entry: str, spec: str) -> RewardEntry:
    """'name', 'name:weight', 'pkg.mod:Class' or 'pkg.mod:Class:weight'."""
    if "=" in entry:
        raise ValueError(f"bad entry {entry!r} in {spec!r}: a weight follows a colon, '{entry.replace('=', ':')}'")
    name, *rest = [part.strip() for part in entry.split(":")]
    if rest and not _is_number(rest[0]) and ("." in name or rest[0][:1].isupper()):
        if IMPORT_PATH.fullmatch(f"{name}:{rest[0]}"):
            name, rest = f"{name}:{rest[0]}", rest[1:]
    if not name or len(rest) > 1 or rest == [""]:
        raise ValueError(f"bad entry {entry!r} in {spec!r}: expected 'name' or 'name:weight'")
    if rest and not _is_number(rest[0]):
        raise ValueError(f"weight of reward '{name}' must be a number, got {rest[0]!r}")
    return _entry({"name": name, "weight": float(rest[0]) if rest else 1.0})


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _entry(content: Mapping[str, Any]) -> RewardEntry:
    """An entry from its keys."""
    keys = [f.name for f in fields(RewardEntry)]
    if unknown := [key for key in content if key not in keys]:
        raise ValueError(f"an entry has no key {unknown[0]!r}: expected {', '.join(keys)}, got {dict(content)!r:.120}")
    name, weight = content.get("name"), content.get("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise ValueError(f"bad reward name {name!r}: expected a text, as in {{name: clip}}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"weight of reward '{name}' must be a finite number, got {weight!r}")
    try:
        return RewardEntry(**content)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"reward '{name}': {wrong['loc'][0]}: expected a mapping, got {wrong['input']!r}") from error
