"""Reads a YAML recipe into nested dicts; schema.py defines the meaning of the keys.

`extends: FILE` (relative to the recipe) inherits another recipe's values; the recipe's own override them. Invariant:
no value is silently dropped: duplicate keys are an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


class UserError(Exception):
    """An error whose message alone says what to do: the command line prints it without a traceback."""


class ConfigError(UserError, ValueError):
    """A recipe that cannot run; the message lists every mistake, one per line."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        super().__init__("the configuration has mistakes:\n" + "\n".join(f"  - {m}" for m in mistakes))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint " (did you mean …?)" for the closest known name, if there is one; ignores case."""
    folded = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f" (did you mean '{folded[close[0]]}'?)" if close else ""


class Loader(yaml.SafeLoader):
    """Safe YAML loader that reads 1e-4 as a number, and rejects duplicate keys (YAML would drop the first value) and
    an anchor that contains itself."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node. Raises YAMLError for one that is not complete yet."""
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:
            raise yaml.YAMLError(f"the anchor in line {node.start_mark.line + 1} contains itself")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node. Raises YAMLError for a duplicate key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.YAMLError(f"key '{name}' is given twice (again in line {key.start_mark.line + 1})")
            seen.add(name)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes every text that `Loader` would read as a number."""


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def to_yaml(values: Mapping[str, Any], allow_unicode: bool = False) -> str:
    """YAML that `read_yaml` reads back unchanged; without `allow_unicode` in ASCII, else U+0085 is lost."""
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=allow_unicode)
    return text


def read_yaml(recipe: str | Path) -> dict[str, Any]:
    """A recipe merged over those it extends, as nested dicts. Raises ConfigError for a missing or invalid file."""
    return _read_with_parents(Path(recipe), ())


def _read_with_parents(path: Path, by: tuple[Path, ...]) -> dict[str, Any]:
    """The values of `path`, merged over those it extends. by: the chain of files that extend `path`."""
    if path.resolve() in by:
        raise ConfigError([f"{path}: circular 'extends': {' → '.join(p.name for p in by)} → {path.name}"])
    content = _read(path, by)
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise ConfigError([f"{path}: extends: expected the name of one recipe, got {parent!r}"])
    return merge(_read_with_parents(path.parent / parent, (*by, path.resolve())), content)


def _read(path: Path, by: tuple[Path, ...]) -> dict[str, Any]:
    """The top-level mapping of one file."""
    if not path.is_file():
        hint = f"{by[-1]} extends it" if by else "expected a YAML file, e.g. scripts/prefgrpo/lora_flux.yaml"
        raise ConfigError([f"recipe not found: {path}; {hint}"])
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path} is not valid YAML: {error}"]) from error
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise ConfigError([f"{path}: expected a mapping of keys at the top level, got {type(content).__name__}"])
    return dict(content)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with the entries of `over`, recursively for mappings."""
    out = dict(base)
    for key, value in over.items():
        before = out.get(key)
        out[key] = merge(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return out


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict → {dotted name: value}; if all entries of a list have a name, they are found by it."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list | tuple) and value and all(isinstance(v, dict) and "name" in v for v in value):
            value = {str(item["name"]): {k: v for k, v in item.items() if k != "name"} for item in value}
        out.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return out
