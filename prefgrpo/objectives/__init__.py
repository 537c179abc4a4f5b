"""Registry of training objectives: one class per file, derived from `objectives.base.Objective`."""

from prefgrpo.config.by_path import load_object
from prefgrpo.config.loading import section
from prefgrpo.config.schema import TrainConfig
from prefgrpo.judge.verdict import did_you_mean
from prefgrpo.objectives.base import Objective

OBJECTIVES = {
    "grpo": "prefgrpo.objectives.grpo:GRPO",
    "grpo_guard": "prefgrpo.objectives.grpo_guard:GRPOGuard",
    "nft": "prefgrpo.objectives.nft:NFT",
    "awm": "prefgrpo.objectives.awm:AWM",
    "sft": "prefgrpo.objectives.sft:SFT",
    "dpo": "prefgrpo.objectives.dpo:DPO",
    "soft_dpo": "prefgrpo.objectives.soft_dpo:SoftDPO",
}
"""Name → import path of the class."""


def objective_class(name: str) -> type[Objective]:
    """The class registered as `name`, or at the import path `name`. Raises ValueError if there is none."""
    path = OBJECTIVES.get(name, name)
    if not {".", ":"} & set(path):
        expected = f"expected one of {', '.join(OBJECTIVES)}, or the import path of a class"
        raise ValueError(f"{expected}, got {name!r}{did_you_mean(name, OBJECTIVES)}")
    try:
        kind = load_object(path)
    except Exception as error:
        raise ValueError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise ValueError(f"expected a class derived from prefgrpo.objectives.base.Objective at {name!r}, got {kind!r}")
    return kind


def objective(train: TrainConfig) -> Objective:
    """A run's objective with its options set. Raises ValueError for a bad name, ConfigError for bad options."""
    return section(objective_class(train.objective), train.objective_options, "train.objective_options")
