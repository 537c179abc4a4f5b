"""What the judge clients of this process have done so far; the difference of two moments is what a step did.

Counts: questions (all that were put), cache_hits (answered from the cache), hedges (second requests beside a slow
one), unread (an answer came, and nothing could be read from it), spent_us (microseconds of all requests together) and
wasted_us (of those that brought nothing: timed out, given up, or unread). Invariant: counts only grow.
"""

from __future__ import annotations

from collections import Counter

from prefgrpo.data.metric import Metric

TRAFFIC: Counter[str] = Counter()


def metrics(since: Counter[str]) -> dict[str, float]:
    """judge/… figures of the questions since a copy of TRAFFIC was taken; none if there was no question."""
    done = TRAFFIC - since
    if not done["questions"]:
        return {}
    share = done["wasted_us"] / done["spent_us"] if done["spent_us"] else None
    wasted = {} if share is None else {"judge/wasted_share": Metric(share, timed=True)}
    return wasted | {
        "judge/cache_hits": Metric(done["cache_hits"], "sum", timed=True),
        "judge/hedges": Metric(done["hedges"], "sum", timed=True),
        "judge/parse_failure_rate": done["unread"] / done["questions"],
    }
