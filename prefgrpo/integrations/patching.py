"""Put this package's step functions in place of those of an imported codebase, and take them out again.

Every name in every imported module that refers to a replaced function is set anew, as `from x import f` makes copies of
the reference. Invariant: `unpatch` leaves the very objects that were there before `patch`, and `patch` twice is `patch`
once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

Function = Callable[..., Any]
_FLOW_GRPO, _FLOW_FACTORY = r"flow_grpo\.diffusers_patch\.", r"flow_factory\.scheduler\.flow_match_euler_discrete\."

CODEBASES: dict[str, dict[str, str]] = {
    "flow_grpo": {
        _FLOW_GRPO + r"sd3_sde_with_logprob\.sde_step_with_logprob": "flow_grpo.sde_step_with_logprob",
        _FLOW_GRPO + r"wan_pipeline_with_logprob\.sde_step_with_logprob": "flow_grpo.wan_sde_step_with_logprob",
    },
    "dance_grpo": {r"(fastvideo\.)?train_grpo_\w+\.flux_step": "dance_grpo.flux_step"},
    "pref_grpo": {
        r"fastvideo\.grpo\.steps\.flow_grpo_step": "pref_grpo.flow_grpo_step",
        r"fastvideo\.grpo\.steps\.dance_grpo_step": "pref_grpo.dance_grpo_step",
    },
    "flow_factory": {_FLOW_FACTORY + r"FlowMatchEulerDiscreteSDEScheduler\.step": "flow_factory.step"},
}
"""Regular expression for a function's dotted name → what takes its place, within prefgrpo.integrations."""
_PATCHED: dict[str, dict[Function, Function]] = {}
"""Codebase → original → replacement: a function of its own for each original, so that it can be put back."""


def patch(codebase: str) -> list[str]:
    """Replace the step functions of an imported codebase; prints and returns the dotted names that now hold ours.

    Raises ValueError for an unknown codebase, RuntimeError if it is not imported (import its training code first), or
    if a function is missing or has other parameters than the version known here; then nothing is replaced.
    """
    replaced = dict(_PATCHED.get(codebase, {}))
    for pattern, replacement in _targets(codebase).items():
        where, name = pattern.rsplit(r"\.", 1)
        owners = {place: vars(owner).get(name) for place, owner in _owners() if re.fullmatch(where, place)}
        functions = {place: f for place, f in owners.items() if isinstance(f, FunctionType)}
        if owners and not functions:
            raise RuntimeError(f"expected a function {name} in {', '.join(owners)}, found none: another version?")
        module, _, ours = replacement.partition(".")
        for place, original in functions.items():
            if original not in replaced and original not in replaced.values():
                step = getattr(importlib.import_module(f"prefgrpo.integrations.{module}"), ours)
                _check_parameters(f"{place}.{name}", original, step)
                replaced[original] = _copy(step)
    if not replaced:
        wanted = ", ".join(pattern.replace("\\", "") for pattern in _targets(codebase))
        raise RuntimeError(f"'{codebase}' is not imported, expected {wanted}: import its training code, then patch it")
    _PATCHED[codebase] = replaced
    _exchange(replaced)
    places = sorted(f"{place}.{name}" for place, _, name, f in _functions() if f in replaced.values())
    print(f"prefgrpo: patched {codebase}: {', '.join(places)}", file=sys.stderr)
    return places


def unpatch(codebase: str) -> list[str]:
    """Put the originals back, also where a module imported ours since; returns the dotted names, none if not patched.

    Raises ValueError for an unknown codebase.
    """
    _targets(codebase)
    return _exchange({ours: original for original, ours in _PATCHED.pop(codebase, {}).items()})


def _targets(codebase: str) -> dict[str, str]:
    if codebase not in CODEBASES:
        raise ValueError(f"unknown codebase '{codebase}': expected one of {', '.join(CODEBASES)}")
    return CODEBASES[codebase]


def _check_parameters(name: str, original: Function, ours: Function) -> None:
    """The original's parameters must be ours, in order; an older version may lack the last ones."""
    actual, expected = (list(inspect.signature(f).parameters) for f in (original, ours))
    if actual != expected[: len(actual)]:
        raise RuntimeError(f"{name}: expected the parameters ({', '.join(expected)}), found ({', '.join(actual)})")


def _copy(step: Function) -> Function:
    return functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))


def _owners() -> Iterator[tuple[str, Any]]:
    """Imported modules and Flow-Factory's classes, by name; a script that runs as __main__ goes by its file's name."""
    once: dict[int, tuple[str, Any]] = {
        id(module): (name, module) for name, module in reversed(list(sys.modules.items()))
    }
    for name, module in once.values():
        if not isinstance(module, ModuleType):
            continue
        file = getattr(module, "__file__", None) if name == "__main__" else None
        yield (name if file is None else Path(file).stem), module
        if name.startswith("flow_factory."):
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{value.__name__}", value


def _functions() -> Iterator[tuple[str, Any, str, Function]]:
    """(owner's name, owner, name, function) of every function that a module or class holds."""
    for place, owner in _owners():
        for name, value in list(vars(owner).items()):
            if type(value) is FunctionType:  # some objects in modules warn when asked for their class
                yield place, owner, name, value


def _exchange(new: dict[Function, Function]) -> list[str]:
    """Put new[f] wherever f is held; returns the dotted names."""
    held = [(place, owner, name, f) for place, owner, name, f in _functions() if f in new]
    for _, owner, name, f in held:
        setattr(owner, name, new[f])
    return sorted(f"{place}.{name}" for place, _, name, _ in held)
