"""Registry of training objectives: one class per file, derived from `objectives.base.Objective`."""

from prefgrpo.config.by_path import registered_class
from prefgrpo.config.loading import section
from prefgrpo.config.schema import TrainConfig
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
    return registered_class("objective", name, OBJECTIVES, Objective)


def make_objective(train: TrainConfig) -> Objective:
    """A run's objective with its options set. Raises ValueError for a bad name, ConfigError for bad options."""
    return section(objective_class(train.objective), train.objective_options, "train.objective_options")
