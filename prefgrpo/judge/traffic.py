"""Statistics of this process's judge clients, attributed to the step that issued each question.

Counts: questions (total), unread (answers
that could not be parsed), spent_us (total microseconds of all requests) and wasted_us (the part spent on requests that
timed out, were cancelled or could not be parsed). A request is attributed to the `collect_counts` context in which it
was issued; asyncio tasks and callbacks inherit the context. Invariant: counts never decrease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prefgrpo.data.metric import Metric

_COUNTS: ContextVar[Counter[str]] = ContextVar("counts")


@contextmanager
def collect_counts(counts: Counter[str]) -> Iterator[None]:
    """Questions asked inside this context are added to `counts`, whenever their answers arrive."""
    token = _COUNTS.set(counts)
    try:
        yield
    finally:
        _COUNTS.reset(token)


def count(**more: int) -> None:
    """Add to the counts of the current `collect_counts` context, if there is one."""
    if (counts := _COUNTS.get(None)) is not None:
        counts.update(more)


def metrics(done: Counter[str]) -> dict[str, float]:
    """judge/… metrics from these counts; empty if there were no questions."""
    if not done["questions"]:
        return {}
    share = done["wasted_us"] / done["spent_us"] if done["spent_us"] else None
    wasted = {} if share is None else {"judge/wasted_share": Metric(share, timed=True)}
    return wasted | {
        "judge/parse_failure_rate": done["unread"] / done["questions"],
    }
