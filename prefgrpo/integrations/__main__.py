"""`python -m prefgrpo.integrations CODEBASE SCRIPT [ARGUMENTS]`: run a training script with its codebase patched.

A function is replaced right after the module that defines it has run, before another module can import it; a function
of the script itself, right after its definition. Invariant: the script runs as with `python SCRIPT` or
`python -m SCRIPT`: as __main__, with its own sys.argv and sys.path; no file is written.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from prefgrpo.integrations.patching import CODEBASES, describe_targets, patch, targets

HOOK = "__prefgrpo_patch__"
"""Name of the patching function in the script's namespace."""


class PatchingFinder(MetaPathFinder):
    """Finds the modules with a codebase's step functions, and patches the codebase after one of them has run."""

    def __init__(self, codebase: str) -> None:
        self.codebase, self.patched = codebase, False

    def patch(self) -> None:
        """Patch the functions imported so far."""
        patch(self.codebase)
        self.patched = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The spec found by the import system, extended to call `patch` after the module's code."""
        if not any(re.fullmatch(pattern.partition(":")[0], name) for pattern in targets(self.codebase)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.patch()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def code(codebase: str, file: str) -> CodeType:
    """The script's code, with a call of `HOOK` after each definition to be replaced.

    Raises RuntimeError if this script should define a step function of the codebase but does not.
    """
    tree = ast.parse(Path(file).read_bytes(), file)
    pairs = (pattern.partition(":")[::2] for pattern in targets(codebase))
    names = [name for where, name in pairs if re.fullmatch(where, Path(file).stem)]
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    if names and not found:
        raise RuntimeError(f"expected a function {' or '.join(names)} in {file}, found none: another version?")
    for node in found:
        call = ast.parse(f"{HOOK}()").body[0]
        tree.body.insert(tree.body.index(node) + 1, ast.copy_location(call, node))
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def run(codebase: str, script: str, arguments: Sequence[str] = (), module: bool = False) -> None:
    """Run a script, or the module of that name, as __main__ of this process, with the codebase patched.

    Raises SystemExit with the script's status, or with a message if the script succeeded but nothing was replaced;
    ImportError if the module does not exist, and RuntimeError for another version of the codebase.
    """
    file, main, finder = script, ModuleType("__main__"), PatchingFinder(codebase)
    sys.meta_path.insert(0, finder)
    if module:
        spec = importlib.util.find_spec(script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{script}.__main__")
        if spec is None or not spec.has_location or spec.origin is None:
            raise ImportError(f"expected the name of a module with a source file, got '{script}'")
        file, main.__spec__, main.__package__ = spec.origin, spec, spec.parent
    elif not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(file).resolve().parent)
    main.__file__ = file
    vars(main)[HOOK] = finder.patch
    body = code(codebase, file)
    sys.argv = [file, *arguments]
    sys.modules["__main__"] = main
    try:
        exec(body, vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if not finder.patched:
        names = describe_targets(codebase)
        sys.exit(f"prefgrpo: nothing was replaced: {script} imported none of {names}; another codebase?")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m prefgrpo.integrations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("codebase", choices=CODEBASES)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module, as for python -m"
    )
    parser.add_argument("script", help="the training script, e.g. scripts/train_sd3.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    given = parser.parse_args(argv)
    run(given.codebase, given.script, given.arguments, given.module)


if __name__ == "__main__":
    main()
