"""prefgrpo: RL post-training of flow models from pairwise preferences.

    from prefgrpo import PairwiseJudge, Trainer

Names are imported on first use: `import prefgrpo` imports nothing else. Their types are in __init__.pyi.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_EXPORTS = {
    "ConfigError": "prefgrpo.config.recipe",
    "PairwiseJudge": "prefgrpo.arguments",
    "Result": "prefgrpo.ending",
    "Trainer": "prefgrpo.trainer",
    "TrainingStopped": "prefgrpo.ending",
}


def __getattr__(name: str) -> Any:
    """The object called `name`, from its own module."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'prefgrpo' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """All names, imported or not."""
    return sorted([*globals(), *_EXPORTS])
