"""Put this package's step functions in place of those of an imported codebase, and take them out again.

A codebase is a list of targets: a function (or method) that one of its modules defines. Every name in every imported
module that refers to it is replaced, as `from x import f` makes copies of the reference. Invariant: `unpatch` leaves
the very objects that were there before `patch`, and `patch` twice is `patch` once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Target(NamedTuple):
    """A function of another codebase, and what takes its place."""

    module: str
    """Regular expression for the name of the module that defines it."""
    name: str
    """The function's name, or Class.method."""
    replacement: str
    """module:function, within prefgrpo.integrations."""


class _Swap(NamedTuple):
    original: Function
    copy: Function
    """The replacement, a function object of its own: it says which original to put back."""
    owner: type | None
    """The class, if it is a method."""


CODEBASES: dict[str, tuple[Target, ...]] = {
    "flow_grpo": (
        Target(
            r"flow_grpo\.diffusers_patch\.sd3_sde_with_logprob",
            "sde_step_with_logprob",
            "flow_grpo:sde_step_with_logprob",
        ),
        Target(
            r"flow_grpo\.diffusers_patch\.wan_pipeline_with_logprob",
            "sde_step_with_logprob",
            "flow_grpo:wan_sde_step_with_logprob",
        ),
    ),
    "dance_grpo": (Target(r"(fastvideo\.)?train_grpo_\w+", "flux_step", "dance_grpo:flux_step"),),
    "pref_grpo": (
        Target(r"fastvideo\.grpo\.steps", "flow_grpo_step", "pref_grpo:flow_grpo_step"),
        Target(r"fastvideo\.grpo\.steps", "dance_grpo_step", "pref_grpo:dance_grpo_step"),
    ),
    "flow_factory": (
        Target(
            r"flow_factory\.scheduler\.flow_match_euler_discrete",
            "FlowMatchEulerDiscreteSDEScheduler.step",
            "flow_factory:step",
        ),
    ),
}
_ACTIVE: dict[str, list[_Swap]] = {}


def patch(codebase: str) -> list[str]:
    """Replace the step functions of an imported codebase; prints and returns the dotted names that now hold ours.

    Raises ValueError for an unknown codebase, RuntimeError if it is not imported (import its training code first), or
    if a function is missing or has other parameters than the version known here; then nothing is replaced.
    """
    swaps = _ACTIVE.get(codebase, [])
    known = {id(s.original) for s in swaps} | {id(s.copy) for s in swaps}
    found = [s for target in _targets(codebase) for s in _find(target) if id(s.original) not in known]
    if not found and not swaps:
        wanted = ", ".join(dict.fromkeys(t.module.replace("\\", "") for t in _targets(codebase)))
        raise RuntimeError(f"'{codebase}' is not imported, expected {wanted}: import its training code, then patch it")
    swaps = _ACTIVE[codebase] = swaps + found
    _exchange({id(s.original): s.copy for s in swaps}, swaps)
    places = sorted(f"{name}.{key}" for name, _, key, held in _holders(swaps) if any(held is s.copy for s in swaps))
    print(f"prefgrpo: patched {codebase}: {', '.join(places)}", file=sys.stderr)
    return places


def unpatch(codebase: str) -> list[str]:
    """Put the originals back, also where a module imported ours since; returns the dotted names, none if not patched.

    Raises ValueError for an unknown codebase.
    """
    _targets(codebase)
    swaps = _ACTIVE.pop(codebase, [])
    return sorted(_exchange({id(s.copy): s.original for s in swaps}, swaps))


def _targets(codebase: str) -> tuple[Target, ...]:
    if codebase not in CODEBASES:
        raise ValueError(f"unknown codebase '{codebase}': expected one of {', '.join(CODEBASES)}")
    return CODEBASES[codebase]


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Imported modules, each once, by name; a script that runs as __main__ goes by its file's name."""
    once = {id(module): (name, module) for name, module in reversed(list(sys.modules.items()))}
    for name, module in once.values():
        if isinstance(module, ModuleType):
            file = getattr(module, "__file__", None) if name == "__main__" else None
            yield (name if file is None else Path(file).stem), module


def _find(target: Target) -> Iterator[_Swap]:
    """The target in every module that defines it; raises RuntimeError if such modules are imported, but none has it."""
    ours_in, _, ours = target.replacement.partition(":")
    *outer, last = target.name.split(".")
    found: dict[int, _Swap] = {}
    matching = {name: module for name, module in _modules() if re.fullmatch(target.module, name)}
    for name, module in matching.items():
        owner = getattr(module, outer[0], None) if outer else None
        original = vars(owner or module).get(last)
        if isinstance(original, FunctionType):
            replacement = getattr(importlib.import_module(f"prefgrpo.integrations.{ours_in}"), ours)
            _check_parameters(f"{name}.{target.name}", original, replacement)
            found[id(original)] = _Swap(original, _copied(replacement), owner)
    if matching and not found:
        raise RuntimeError(f"expected a function {target.name} in {', '.join(matching)}, found none: another version?")
    yield from found.values()


def _check_parameters(name: str, original: Function, replacement: Function) -> None:
    """The original's parameters must be ours, in order; an older version may lack the last ones."""
    theirs, ours = (list(inspect.signature(f).parameters) for f in (original, replacement))
    if theirs != ours[: len(theirs)]:
        raise RuntimeError(f"{name}: expected the parameters ({', '.join(ours)}), found ({', '.join(theirs)})")


def _copied(f: Any) -> Function:
    copy = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return functools.update_wrapper(copy, f)


def _holders(swaps: list[_Swap]) -> Iterator[tuple[str, Any, str, Any]]:
    """(owner's name, owner, key, value) of everything that modules, and the classes with a replaced method, hold."""
    owners: list[tuple[str, Any]] = [(name, module) for name, module in _modules()]
    owners += [(f"{c.__module__}.{c.__qualname__}", c) for c in {s.owner for s in swaps} if c is not None]
    for name, owner in owners:
        for key, value in list(vars(owner).items()):
            yield name, owner, key, value


def _exchange(new: Mapping[int, Function], swaps: list[_Swap]) -> list[str]:
    """Put new[id(value)] wherever such a value is held; returns the dotted names."""
    done = []
    for name, owner, key, value in _holders(swaps):
        if id(value) in new:
            setattr(owner, key, new[id(value)])
            done.append(f"{name}.{key}")
    return done
