"""Objects that a configuration names by their import path or file: rewards, objectives, model families, functions."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prefgrpo.config.recipe import did_you_mean

T = TypeVar("T")
IMPORT_PATH = re.compile(r"([^\W\d]\w*\.)*[^\W\d]\w*[.:][^\W\d]\w*|[^,:]+\.py:[^\W\d]\w*")
"""package.module.Class, package.module:Class or path/file.py:function."""


def load_object(path: str) -> Any:
    """The object named by "package.module.name", "package.module:name" or "file.py:name"; raises what importing raises,
    and AttributeError, with the nearest name."""
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    loaded = _file_module(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    if not hasattr(loaded, attribute):
        raise AttributeError(f"{module} has no attribute '{attribute}'{did_you_mean(attribute, vars(loaded))}")
    return getattr(loaded, attribute)


def registered_class(what: str, name: str, table: Mapping[str, str], base: type[T]) -> type[T]:
    """The class derived from `base` that `table` registers as `name`, or at the import path `name`.

    what: e.g. "family". Raises ValueError if there is none, and suggests the nearest name.
    """
    path = table.get(name, name)
    if not {".", ":"} & set(path):
        expected = f"expected one of {', '.join(table)}, or the import path of a class"
        raise ValueError(f"unknown {what} '{name}': {expected}{did_you_mean(name, table)}")
    try:
        cls = load_object(path)
    except Exception as error:
        raise ValueError(f"cannot load the {what} '{name}': {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"expected a class derived from {base.__module__}.{base.__name__} at '{name}', got {cls!r}")
    return cls


def load_function(name: str, names: Collection[str]) -> Callable[..., Any]:
    """The function at file.py:function or package.module.function. Raises ValueError, which expects one of `names` too,
    for a name that is neither."""
    if not IMPORT_PATH.fullmatch(name):
        expected = f"expected one of {', '.join(names)}, or file.py:function"
        raise ValueError(f"{expected}, got '{name}'{did_you_mean(name, names)}")
    try:
        function: Callable[..., Any] = load_object(name)
    except Exception as error:
        raise ValueError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"expected a function at {name!r}, got {type(function).__name__}")
    return function


def _file_module(file: Path) -> Any:
    """The module of a .py file, executed once per process."""
    name = f"prefgrpo_file_{file.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file.resolve())
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
