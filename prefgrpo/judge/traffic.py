"""What the judge clients of this process do, counted for the step that asks.

Counts: questions (all that were put), cache_hits (answered from the cache), hedges (second requests beside a slow
one), unread (an answer came, and nothing could be read from it), spent_us (microseconds of all requests together) and
wasted_us (of those that brought nothing: timed out, given up, or unread). A request counts where it was asked: inside
`counted`, which asyncio's tasks and their callbacks inherit. Invariant: counts only grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prefgrpo.data.metric import Metric

_COUNTS: ContextVar[Counter[str]] = ContextVar("counts")


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Inside, what is asked is added to `counts`, whenever its answer comes."""
    token = _COUNTS.set(counts)
    try:
        yield
    finally:
        _COUNTS.reset(token)


def count(**more: int) -> None:
    """Add to the counts of whoever asked; to none outside `counted`."""
    if (counts := _COUNTS.get(None)) is not None:
        counts.update(more)


def metrics(done: Counter[str]) -> dict[str, float]:
    """judge/… figures of what was counted; none if there was no question."""
    if not done["questions"]:
        return {}
    share = done["wasted_us"] / done["spent_us"] if done["spent_us"] else None
    wasted = {} if share is None else {"judge/wasted_share": Metric(share, timed=True)}
    return wasted | {
        "judge/cache_hits": Metric(done["cache_hits"], "sum", timed=True),
        "judge/hedges": Metric(done["hedges"], "sum", timed=True),
        "judge/parse_failure_rate": done["unread"] / done["questions"],
    }
