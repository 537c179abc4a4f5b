"""Which ordered pairs of a group are judged.

A plan is a function (group size, seed) -> [(first shown, second shown), …]. Invariant: which pairs and which order
depend on (size, seed) only, and every member is shown first as often as second (±1), so that a judge's position
bias favours nobody.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from prefgrpo.judge.verdict import Pair

Plan = Callable[[int, int], list[Pair]]


def _in_arrival_order(pairs: list[Pair]) -> list[Pair]:
    """Pairs sorted so that those of early members come first: members usually arrive in order."""
    return sorted(pairs, key=lambda p: (max(p), min(p), p[0]))


def round_robin(size: int, seed: int) -> list[Pair]:
    """Every pair once, G(G − 1)/2 verdicts; who is shown first is drawn, balanced per member.

    Members take seats on a circle at random; each is first against the (G − 1)/2 that follow it. For even G the
    opposite seat is left over: one coin per such pair.
    """
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist()
    coins = rng.integers(0, 2, size // 2)
    pairs = [(seats[a], seats[(a + d) % size]) for a in range(size) for d in range(1, (size - 1) // 2 + 1)]
    if size % 2 == 0:
        half = size // 2
        pairs += [(seats[a + half * int(c)], seats[(a + half * (1 - int(c)))]) for a, c in enumerate(coins)]
    return _in_arrival_order(pairs)


def both_orders(size: int, seed: int) -> list[Pair]:
    """Every pair twice, once in each order, G(G − 1) verdicts: the position bias cancels in the mean."""
    del seed  # nothing is random here; the argument is the plans' common signature
    return _in_arrival_order([(i, j) for i in range(size) for j in range(size) if i != j])


PLANS: dict[str, Plan] = {"round_robin": round_robin, "both_orders": both_orders}


def get_plan(name: str) -> Plan:
    """Plan by name; ValueError suggests the nearest."""
    if name not in PLANS:
        near = difflib.get_close_matches(name, PLANS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"unknown pair plan '{name}': expected one of {', '.join(PLANS)}{hint}")
    return PLANS[name]
