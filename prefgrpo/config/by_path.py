"""Objects that a configuration names by their import path or file: rewards, objectives, model families, functions."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

IMPORT_PATH = re.compile(r"([^\W\d]\w*\.)*[^\W\d]\w*[.:][^\W\d]\w*|[^,:]+\.py:[^\W\d]\w*")
"""package.module.Class, package.module:Class or path/file.py:function."""


def load_object(path: str) -> Any:
    """What "package.module.name", "package.module:name" or "file.py:name" is; raises what importing it raises, and
    AttributeError."""
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    loaded = _file_module(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    if not hasattr(loaded, attribute):
        names = {name.lower(): name for name in vars(loaded)}
        near = difflib.get_close_matches(attribute.lower(), names, n=1)
        hint = f" (did you mean '{names[near[0]]}'?)" if near else ""
        raise AttributeError(f"{module} has no '{attribute}'{hint}")
    return getattr(loaded, attribute)


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
