"""Which ordered pairs of a group are judged.

A plan is a function (group size, seed) -> [(first shown, second shown), …], and depends on nothing else. The order
within pairs is balanced, so that a judge's position bias favours no member: each is as often first as second, ±1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from prefgrpo.judge.verdict import Pair, did_you_mean

Plan = Callable[[int, int], list[Pair]]


def _in_arrival_order(pairs: list[Pair]) -> list[Pair]:
    """Sort pairs by their later member, because members usually arrive in order."""
    return sorted(pairs, key=lambda p: (max(p), min(p), p[0]))


def rings(size: int, seed: int, shuffled: bool = True) -> list[list[Pair]]:
    """Every pair once, as rings: ring d pairs each seat of a circle with the d-th seat after it; each is first once.

    shuffled: False seats members in order, so that neighbours meet and can be judged while others are generated.
    For even sizes the last ring pairs opposite seats, and a random bit per pair decides which is first.
    """
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist() if shuffled else list(range(size))
    coins = rng.integers(0, 2, size // 2)
    found = [[(seats[a], seats[(a + d) % size]) for a in range(size)] for d in range(1, (size - 1) // 2 + 1)]
    if size % 2 == 0:
        half = size // 2
        found.append([(seats[a + half * int(c)], seats[a + half * (1 - int(c))]) for a, c in enumerate(coins)])
    return found


def round_robin(size: int, seed: int) -> list[Pair]:
    """Every pair once, G(G − 1)/2 verdicts; the order is random, balanced per member."""
    return _in_arrival_order([p for ring in rings(size, seed) for p in ring])


def both_orders(size: int, seed: int) -> list[Pair]:
    """Every pair twice, once in each order, G(G − 1) verdicts: the position bias cancels in the mean."""
    del seed  # unused; all plans share one signature
    return _in_arrival_order([(i, j) for i in range(size) for j in range(size) if i != j])


def k_regular(size: int, seed: int, n: int = 4) -> list[Pair]:
    """Every member in n pairs, n·G/2 verdicts, connected for n >= 2. ValueError unless 1 <= n < G and n·G is even."""
    if not 1 <= n < size or n * size % 2:
        raise ValueError(f"k_regular({n}) needs 1 <= k < G and k·G even, got G = {size}")
    circle = rings(size, seed, shuffled=False)
    chosen = circle[: n // 2]
    if n % 2:
        chosen.append(circle[-1])
    return _in_arrival_order([p for ring in chosen for p in ring])


PLANS: dict[str, Callable[..., list[Pair]]] = {
    "round_robin": round_robin,
    "both_orders": both_orders,
    "k_regular": k_regular,
}


def get_plan(name: str) -> Plan:
    """Plan by name: 'round_robin', 'both_orders' or 'k_regular(n)' (k_regular: n = 4); ValueError if unknown."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*", name)
    base, number = (match[1], match[2]) if match else (name, None)
    if base not in PLANS or (number and base != "k_regular"):
        raise ValueError(
            f"unknown pair plan '{name}'{did_you_mean(base, PLANS)}: expected one of round_robin, both_orders, "
            "k_regular(n)"
        )
    return partial(k_regular, n=int(number)) if number else PLANS[base]
