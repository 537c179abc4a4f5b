"""`prefgrpo reward list`: the registry as a table, from what the classes themselves say.

Needs no reward's libraries: a reward's module imports without them.
"""

from __future__ import annotations

import inspect

from prefgrpo.rewards import REWARDS, load_class
from prefgrpo.rewards.base import GroupwiseReward, Reward


def takes(reward: type[Reward]) -> str:
    """A reward's input in a few words: image, video, + source, + columns, (group)."""
    told = " or ".join(reward.takes) + (" + source" if reward.needs_source else "")
    told += "".join(f" + {key}" for key in reward.meta_keys)
    return told + (" (group)" if issubclass(reward, GroupwiseReward) else "")


def what(reward: type[Reward]) -> str:
    """First line of a reward's docstring."""
    return (inspect.getdoc(reward) or "").split("\n")[0]


def show() -> int:
    """Every reward: its name, what it takes, whether a judge answers it, and what it is."""
    rows = [("reward", "takes", "asks", "what it is")]
    for name in sorted(REWARDS):
        found = load_class(name)
        rows.append((name, takes(found), "a judge" if found.judged else "-", what(found)))
    wide = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, [*wide, 0], strict=True)).rstrip())
    return 0
