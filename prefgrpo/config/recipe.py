"""Reading a YAML recipe into nested dicts, and taking wrong entries out of them; what keys mean is config.py's.

`extends: FILE` (relative to the recipe) takes over another recipe's values; the recipe's own come first. Invariant:
nothing of a file is lost silently: a key given twice is an error, and on/off never becomes a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A recipe that cannot run; the message lists every mistake, one per line."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        super().__init__("the configuration has mistakes:\n" + "\n".join(f"  - {m}" for m in mistakes))


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where YAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.YAMLError(f"key '{name}' is given twice (again in line {key.start_mark.line + 1})")
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(recipe: str | Path) -> dict[str, Any]:
    """Nested dicts of a recipe and of those it extends. Raises ConfigError for a file that is missing or no mapping."""
    return _extended(Path(recipe), ())


def _extended(path: Path, by: tuple[Path, ...]) -> dict[str, Any]:
    """The values of `path`, which the files `by` extend."""
    if path.resolve() in by:
        raise ConfigError([f"{path}: 'extends' goes round in a circle: {' → '.join(p.name for p in by)} → {path.name}"])
    content = _read(path, by)
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise ConfigError([f"{path}: extends: expected the name of one recipe, got {parent!r}"])
    return merged(_extended(path.parent / parent, (*by, path.resolve())), content)


def _read(path: Path, by: tuple[Path, ...]) -> dict[str, Any]:
    """One file."""
    if not path.is_file():
        told = f"{by[-1]} extends it" if by else "expected a YAML file, e.g. scripts/prefgrpo/lora_flux.yaml"
        raise ConfigError([f"recipe not found: {path}; {told}"])
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not valid YAML: {error}"]) from error
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise ConfigError([f"{path}: expected a mapping of keys at the top level, got {type(content).__name__}"])
    return copy_tree(content)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `over`, section by section; `reward.options` and other deeper mappings likewise."""
    out = dict(base)
    for key, value in over.items():
        known = out.get(key)
        out[key] = merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else value
    return out


def copy_tree(value: Any) -> Any:
    """A copy of nested mappings with text keys."""
    return {str(k): copy_tree(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def drop_booleans(data: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    """Drop true/false where no switch is (YAML reads on, off, yes and no so, and they would count as 1 and 0)."""
    mistakes = []
    for key, value in list(data.items()):
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            mistakes += drop_booleans(value, known[key], f"{prefix}{key}.")
        elif isinstance(value, bool) and key in known and not isinstance(known[key], bool):
            del data[key]
            told = "YAML reads an unquoted on, off, yes or no as true or false"
            mistakes.append(f"{prefix}{key}: expected a value like {known[key]!r}, got {value} ({told})")
    return mistakes


def key_path(loc: tuple[int | str, ...], data: Any) -> tuple[str, ...]:
    """The keys of `data` that an error location names (pydantic adds indices and union branches)."""
    keys: list[str] = []
    for part in loc:
        if not (isinstance(data, dict) and part in data):
            break
        keys.append(str(part))
        data = data[part]
    return tuple(keys)


def drop(data: dict[str, Any], path: tuple[str, ...]) -> None:
    """Remove the entry at `path`."""
    for key in path[:-1]:
        data = data[key]
    data.pop(path[-1], None)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict → {dotted name: value}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return out
