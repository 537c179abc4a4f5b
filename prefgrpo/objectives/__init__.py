"""Policy losses by name; each is a `loss(train, new, logp_old, advantage, denominator)` in a file of its own."""

from collections.abc import Callable

from prefgrpo.objectives import grpo
from prefgrpo.ops import PolicyLoss

OBJECTIVES: dict[str, Callable[..., PolicyLoss]] = {"grpo": grpo.loss}


def objective(name: str) -> Callable[..., PolicyLoss]:
    """The loss called `name`; ValueError lists what there is."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective '{name}': expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
