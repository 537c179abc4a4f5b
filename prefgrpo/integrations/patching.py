"""Replace the step functions of an imported codebase by this package's, and restore them.

Every name in every imported module that refers to a replaced function is rebound, because `from x import f` copies the
reference. Invariant: `unpatch` restores the very objects that were there before `patch`; calling `patch` twice has the
same effect as calling it once.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

Function = Callable[..., Any]
_FLOW_GRPO, _FLOW_FACTORY = "flow_grpo.diffusers_patch.", "flow_factory.scheduler.flow_match_euler_discrete"
CODEBASES: dict[str, dict[str, str]] = {
    "flow_grpo": {
        _FLOW_GRPO + "sd3_sde_with_logprob:sde_step_with_logprob": "flow_grpo:sde_step_with_logprob",
        _FLOW_GRPO + "wan_pipeline_with_logprob:sde_step_with_logprob": "flow_grpo:wan_sde_step_with_logprob",
        _FLOW_GRPO + "solver:flow_grpo_step": "pref_grpo:flow_grpo_step",
    },
    "pref_grpo": {
        "fastvideo.grpo.steps:flow_grpo_step": "pref_grpo:flow_grpo_step",
        "fastvideo.grpo.steps:dance_grpo_step": "pref_grpo:dance_grpo_step",
    },
    "verl_omni": {
        "verl_omni.pipelines.schedulers.flow_match_sde:FlowMatchSDEDiscreteScheduler.sample_previous_step": (
            "verl_omni:sample_previous_step"
        )
    },
    "flow_factory": {_FLOW_FACTORY + ":FlowMatchEulerDiscreteSDEScheduler.step": "flow_factory:step"},
}
"""Module and function of each codebase that calls its step through a module → ours, relative to this package."""
_PATCHED: dict[str, dict[Function, Function]] = {}
"""Codebase → original → replacement."""


def patch(codebase: str) -> list[str]:
    """Replace the step functions of an imported codebase; returns the dotted names that were replaced now.

    Raises ValueError for an unknown codebase, and RuntimeError, without replacing anything, if it is not imported
    (import its training code first), or if a function is missing or its parameters differ from the known version's.
    """
    targets = _targets(codebase)
    replaced = _PATCHED.get(codebase, {})
    found = dict(replaced)
    for place, name in targets.items():
        if place.partition(":")[0] not in sys.modules:
            continue
        try:
            original = pkgutil.resolve_name(place)
        except AttributeError as error:
            raise RuntimeError(f"{place}: {error}; another version of {codebase}?") from None
        if original not in found.values():
            ours = pkgutil.resolve_name(f"{__package__}.{name}")
            _check_parameters(place, original, ours)
            found[original] = _copy(ours)
    if not found:
        raise RuntimeError(f"expected {', '.join(targets)} to be imported: import {codebase}'s training code first")
    _PATCHED[codebase] = found
    return rebind(found)


def unpatch(codebase: str) -> list[str]:
    """Restore the originals, also in modules that have imported ours since; returns the dotted names ([]: not patched).

    Raises ValueError for an unknown codebase.
    """
    _targets(codebase)
    return rebind({ours: original for original, ours in _PATCHED.pop(codebase, {}).items()})


def _targets(codebase: str) -> dict[str, str]:
    if codebase not in CODEBASES:
        raise ValueError(f"unknown codebase '{codebase}': expected one of {', '.join(CODEBASES)}")
    return CODEBASES[codebase]


def _check_parameters(name: str, original: Function, ours: Function) -> None:
    """Check that the original's parameters are ours, in order; an older version may lack the last ones."""
    actual, expected = (list(inspect.signature(f).parameters) for f in (original, ours))
    if actual != expected[: len(actual)]:
        raise RuntimeError(f"{name}: expected the parameters ({', '.join(expected)}), found ({', '.join(actual)})")


def _copy(step: Function) -> Function:
    """A function that calls `step`; each original has its own, so that it can be restored."""
    return functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))


def rebind(new: dict[Function, Function]) -> list[str]:
    """Replace every reference to f in an imported module, or in a class of it, by new[f]; returns the dotted names."""
    places = []
    modules = {id(module): (name, module) for name, module in sys.modules.items() if isinstance(module, ModuleType)}
    for module_name, module in modules.values():
        owners: list[tuple[str, Any]] = [(module_name, module)]
        owners += [(f"{module_name}.{k}", v) for k, v in list(vars(module).items()) if issubclass(type(v), type)]
        for owner_name, owner in owners:
            for name, value in list(vars(owner).items()):
                if type(value) is FunctionType and value in new:
                    setattr(owner, name, new[value])
                    places.append(f"{owner_name}.{name}")
    return sorted(places)
