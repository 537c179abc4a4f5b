"""Drop-in step functions for other GRPO codebases, based on the fused ops.

Each module here has a codebase's functions under their own names, to import in one line; `patch("flow_grpo")` replaces
those of an imported codebase. `diffusers.SDEFlowMatchScheduler` is a scheduler for any pipeline.
Intended differences: docs/ops.md.
Invariant: in fp32 the results are the peer's within rounding, and the same torch generator gives the same noise.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_FLOW_GRPO = "flow_grpo.diffusers_patch."
_FLOW_FACTORY = "flow_factory.scheduler.flow_match_euler_discrete"
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


def patch(codebase: str) -> list[str]:
    """Replace the step functions of an imported codebase in all imported modules; returns the dotted names.

    Raises RuntimeError, without replacing anything, if none of them is imported (import its training code first), or
    if one is missing or its parameters differ from the version that we replaced.
    """
    new = {}
    for place, name in CODEBASES[codebase].items():
        if place.partition(":")[0] not in sys.modules:
            continue
        ours = pkgutil.resolve_name(f"{__package__}.{name}")
        try:
            original = pkgutil.resolve_name(place)
        except AttributeError as error:
            raise RuntimeError(f"{place}: {error}; another version of {codebase}?") from None
        actual, expected = (list(inspect.signature(f).parameters) for f in (original, ours))
        if actual != expected[: len(actual)]:  # an older version may lack the last ones
            raise RuntimeError(f"{place}: expected the parameters {', '.join(expected)}, found {', '.join(actual)}")
        new[original] = ours
    if not new:
        raise RuntimeError(f"import {codebase}'s training code first: none of {', '.join(CODEBASES[codebase])} is")
    return rebind(new)


def rebind(new: dict[Callable[..., Any], Callable[..., Any]]) -> list[str]:
    """Replace every reference to f in an imported module, or in a class of it, by new[f]; returns the dotted names.

    Every reference, because `from x import f` copies it.
    """
    places = set()
    modules = {name: module for name, module in sys.modules.items() if issubclass(type(module), ModuleType)}
    for module_name, module in modules.items():
        owners: dict[str, Any] = {module_name: module}
        owners |= {f"{module_name}.{k}": v for k, v in list(vars(module).items()) if issubclass(type(v), type)}
        for owner_name, owner in owners.items():
            for name, value in list(vars(owner).items()):
                if type(value) is FunctionType and new.get(value, value) is not value:
                    setattr(owner, name, new[value])
                    places.add(f"{owner_name}.{name}")
    return sorted(places)
