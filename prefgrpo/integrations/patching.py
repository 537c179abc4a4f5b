"""Replace the step functions of an imported codebase by this package's, and restore them.

Every name in every imported module that refers to a replaced function is rebound, because `from x import f` copies the
reference. Invariant: `unpatch` restores the very objects that were there before `patch`; calling `patch` twice has the
same effect as calling it once.
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

Function = Callable[..., Any]
_FLOW_GRPO, _FLOW_FACTORY = r"flow_grpo\.diffusers_patch\.", r"flow_factory\.scheduler\.flow_match_euler_discrete"

CODEBASES: dict[str, dict[str, str]] = {
    "flow_grpo": {
        _FLOW_GRPO + "sd3_sde_with_logprob:sde_step_with_logprob": "flow_grpo:sde_step_with_logprob",
        _FLOW_GRPO + "wan_pipeline_with_logprob:sde_step_with_logprob": "flow_grpo:wan_sde_step_with_logprob",
        _FLOW_GRPO + "solver:flow_grpo_step": "pref_grpo:flow_grpo_step",
    },
    "dance_grpo": {r"(fastvideo\.)?train_grpo_\w+:flux_step": "dance_grpo:flux_step"},
    "pref_grpo": {
        r"fastvideo\.grpo\.steps:flow_grpo_step": "pref_grpo:flow_grpo_step",
        r"fastvideo\.grpo\.steps:dance_grpo_step": "pref_grpo:dance_grpo_step",
    },
    "flow_factory": {_FLOW_FACTORY + ":FlowMatchEulerDiscreteSDEScheduler.step": "flow_factory:step"},
}
"""Regular expression for a module's name and, after a colon, a function in it → its replacement likewise, relative to
prefgrpo.integrations."""
_PATCHED: dict[str, dict[Function, Function]] = {}
"""Codebase → original → replacement; each original has a separate replacement, so that it can be restored."""


def patch(codebase: str) -> list[str]:
    """Replace the step functions of an imported codebase; prints and returns the dotted names that are now ours.

    Raises ValueError for an unknown codebase, and RuntimeError, without replacing anything, if it is not imported
    (import its training code first), or if a function is missing or its parameters differ from the known version's.
    """
    replaced = dict(_PATCHED.get(codebase, {}))
    before = len(replaced)
    for pattern, replacement in targets(codebase).items():
        where, _, name = pattern.partition(":")
        modules = {place: module for place, module in _modules() if re.fullmatch(where, place)}
        functions = {place: f for place, module in modules.items() if (f := _function(module, name)) is not None}
        if modules and not functions:
            raise RuntimeError(f"expected a function {name} in {', '.join(modules)}, found none: another version?")
        for place, original in functions.items():
            if original not in replaced and original not in replaced.values():
                step = pkgutil.resolve_name(f"prefgrpo.integrations.{replacement}")
                _check_parameters(f"{place}.{name}", original, step)
                replaced[original] = _wrap(step)
    if not replaced:
        names = describe_targets(codebase)
        raise RuntimeError(f"'{codebase}' is not imported, expected {names}: import its training code first")
    _PATCHED[codebase] = replaced
    rebind(replaced)
    places = sorted(f"{place}.{name}" for place, _, name, f in _functions() if f in replaced.values())
    if len(replaced) > before and os.environ.get("RANK", "0") == "0":
        print(f"prefgrpo: patched {codebase}: {', '.join(places)}", file=sys.stderr, flush=True)
    return places


def unpatch(codebase: str) -> list[str]:
    """Restore the originals, also in modules that have imported ours since; returns the dotted names ([]: not patched).

    Raises ValueError for an unknown codebase.
    """
    targets(codebase)
    return rebind({ours: original for original, ours in _PATCHED.pop(codebase, {}).items()})


def targets(codebase: str) -> dict[str, str]:
    """The entries of `CODEBASES` for a codebase. Raises ValueError for an unknown one."""
    if codebase not in CODEBASES:
        raise ValueError(f"unknown codebase '{codebase}': expected one of {', '.join(CODEBASES)}")
    return CODEBASES[codebase]


def describe_targets(codebase: str) -> str:
    """The functions replaced in a codebase, for messages."""
    return ", ".join(pattern.replace("\\", "") for pattern in targets(codebase))


def _function(module: ModuleType, name: str) -> FunctionType | None:
    """The function of that name, which may be `Class.method`, or None."""
    owner: Any = module
    for part in name.split("."):
        owner = vars(owner).get(part) if isinstance(owner, (ModuleType, type)) else None
    return owner if isinstance(owner, FunctionType) else None


def _check_parameters(name: str, original: Function, ours: Function) -> None:
    """Check that the original's parameters are ours, in order; an older version may lack the last ones."""
    actual, expected = (list(inspect.signature(f).parameters) for f in (original, ours))
    if actual != expected[: len(actual)]:
        raise RuntimeError(f"{name}: expected the parameters ({', '.join(expected)}), found ({', '.join(actual)})")


def _wrap(step: Function) -> Function:
    return functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Imported modules by name; a script that runs as __main__ is listed under its file's name."""
    once = {id(module): (name, module) for name, module in reversed(list(sys.modules.items()))}
    for name, module in once.values():
        if isinstance(module, ModuleType):
            file = getattr(module, "__file__", None) if name == "__main__" else None
            yield (name if file is None else Path(file).stem), module


def _namespaces() -> Iterator[tuple[str, Any]]:
    """Imported modules and Flow-Factory's classes, by name."""
    for name, module in _modules():
        yield name, module
        if name.startswith("flow_factory."):
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{value.__name__}", value


def _functions() -> Iterator[tuple[str, Any, str, Function]]:
    """(owner's name, owner, name, function) for every function in a module or class."""
    for place, owner in _namespaces():
        for name, value in list(vars(owner).items()):
            if type(value) is FunctionType:  # not isinstance: some objects in modules warn when it reads __class__
                yield place, owner, name, value


def rebind(new: dict[Function, Function]) -> list[str]:
    """Replace every reference to f by new[f]; returns the dotted names."""
    held = [(place, owner, name, f) for place, owner, name, f in _functions() if f in new]
    for _, owner, name, f in held:
        setattr(owner, name, new[f])
    return sorted(f"{place}.{name}" for place, _, name, _ in held)
