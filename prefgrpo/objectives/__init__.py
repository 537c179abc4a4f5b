"""Training objectives by name; each is a class in a file of its own (`objectives.base`)."""

from prefgrpo.config.schema import TrainConfig
from prefgrpo.objectives.base import Objective
from prefgrpo.rewards import load_object

OBJECTIVES = {"grpo": "prefgrpo.objectives.grpo:GRPO"}
"""Name → import path of the class."""


def objective_class(name: str) -> type[Objective]:
    """The class called `name`, or at the import path `name`. ValueError lists what there is."""
    path = OBJECTIVES.get(name, name)
    if not {".", ":"} & set(path):
        raise ValueError(f"unknown objective '{name}': expected one of {', '.join(OBJECTIVES)}, or an import path")
    kind = load_object(path)
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise ValueError(f"expected a class derived from prefgrpo.objectives.base.Objective at '{name}', got {kind!r}")
    return kind


def objective(train: TrainConfig) -> Objective:
    """The objective of a run, with its options."""
    return objective_class(train.objective)()
