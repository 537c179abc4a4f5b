"""`prefgrpo reward list`: the registry as a table, from what the classes themselves say.

Needs no reward's libraries: a reward's module imports without them.
"""

from __future__ import annotations

import inspect

from prefgrpo.rewards import REWARDS, load_class
from prefgrpo.rewards.base import GroupwiseReward


def show() -> int:
    """Every reward: its name, what it takes, whether a judge answers it, and what it is."""
    rows = [("reward", "takes", "asks", "what it is")]
    for name in sorted(REWARDS):
        cls = load_class(name)
        takes = " + ".join([" or ".join(cls.takes), *["source"] * cls.needs_source, *cls.meta_keys])
        takes += " (group)" if issubclass(cls, GroupwiseReward) else ""
        rows.append((name, takes, "a judge" if cls.judged else "-", (inspect.getdoc(cls) or "").split("\n")[0]))
    wide = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, [*wide, 0], strict=True)).rstrip())
    return 0
