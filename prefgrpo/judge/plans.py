"""Which ordered pairs of a group are judged.

A plan is a function (group size, seed, verdicts so far) -> the next [(first shown, second shown), …], [] at the end.
Most plans return all pairs at once; `swiss` and `tournament` proceed in rounds. Pairs depend on these arguments only.
The order within pairs is balanced, so that a judge's position bias favours no member (full rounds: as often first as
second, ±1; swiss: whichever was shown first less often goes first; tournament: random).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from prefgrpo.judge.verdict import Pair, did_you_mean

Judged = tuple[int, int, float | None]
"""(first, second, P(first) or None if it failed) of a judged pair."""
Plan = Callable[[int, int, Sequence[Judged]], list[Pair]]


def _in_arrival_order(pairs: list[Pair]) -> list[Pair]:
    """Sort pairs by their later member, because members usually arrive in order."""
    return sorted(pairs, key=lambda p: (max(p), min(p), p[0]))


def _circle(size: int, seed: int, shuffled: bool = True) -> list[list[Pair]]:
    """Every pair once, as rings: ring d pairs each seat of a circle with the d-th seat after it; each is first once.

    shuffled: False seats members in order, so that neighbours meet and can be judged while others are generated.
    For even sizes the last ring pairs opposite seats, and a random bit per pair decides which is first.
    """
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist() if shuffled else list(range(size))
    coins = rng.integers(0, 2, size // 2)
    rings = [[(seats[a], seats[(a + d) % size]) for a in range(size)] for d in range(1, (size - 1) // 2 + 1)]
    if size % 2 == 0:
        half = size // 2
        rings.append([(seats[a + half * int(c)], seats[a + half * (1 - int(c))]) for a, c in enumerate(coins)])
    return rings


def round_robin(size: int, seed: int, done: Sequence[Judged] = ()) -> list[Pair]:
    """Every pair once, G(G − 1)/2 verdicts; the order is random, balanced per member."""
    return [] if done else _in_arrival_order([p for ring in _circle(size, seed) for p in ring])


def both_orders(size: int, seed: int, done: Sequence[Judged] = ()) -> list[Pair]:
    """Every pair twice, once in each order, G(G − 1) verdicts: the position bias cancels in the mean."""
    del seed  # unused; all plans share one signature
    return [] if done else _in_arrival_order([(i, j) for i in range(size) for j in range(size) if i != j])


def k_regular(size: int, seed: int, done: Sequence[Judged] = (), n: int = 4) -> list[Pair]:
    """Every member in n pairs, n·G/2 verdicts, connected. ValueError unless 2 <= n < G and n·G is even."""
    if not 2 <= n < size or n * size % 2:
        raise ValueError(f"k_regular({n}) needs 2 <= k < G and k·G even, got G = {size}")
    if done:
        return []
    rings = _circle(size, seed, shuffled=False)
    chosen = rings[: n // 2] + ([rings[-1]] if n % 2 else [])
    return _in_arrival_order([p for ring in chosen for p in ring])


def budget(size: int, seed: int, done: Sequence[Judged] = (), n: int = 16) -> list[Pair]:
    """n verdicts, ring by ring, then the same pairs in swapped order. ValueError unless G/2 <= n <= G(G − 1)."""
    if not size / 2 <= n <= size * (size - 1):
        raise ValueError(f"budget({n}) needs G/2 <= n <= G(G - 1), got G = {size}")
    if done:
        return []
    once = [p for ring in _circle(size, seed) for p in ring]
    return _in_arrival_order((once + [(j, i) for i, j in once])[:n])


def swiss(size: int, seed: int, done: Sequence[Judged] = (), n: int = 4) -> list[Pair]:
    """n rounds of G/2 pairs; each pairs members with similar scores that have not met. With odd G, one sits out.

    Strong members meet strong opponents, which pulls plain win rates towards the middle; use Bradley-Terry strengths
    for the ranking instead of win rates as the reward. The same holds for `tournament`.
    """
    if not 1 <= n < size:
        raise ValueError(f"swiss({n}) needs 1 <= rounds < G, got G = {size}")
    if len(done) // max(size // 2, 1) >= n:
        return []
    rng = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, len(done)])
    score, played, lead = np.zeros(size), np.zeros(size), np.zeros(size)
    for i, j, p in done:
        lead[[i, j]] += (1, -1)
        played[[i, j]] += 1
        score[[i, j]] += (0.5, 0.5) if p is None else (p, 1.0 - p)
    order = np.lexsort((rng.random(size), -score)).tolist()
    if size % 2:  # the lowest-ranked of the members with most games
        order.remove(max(reversed(order), key=lambda m: played[m]))
    met = {frozenset((i, j)) for i, j, _ in done}
    pairs: list[Pair] = []
    while order:
        a = order.pop(0)
        b = next((m for m in order if frozenset((a, m)) not in met), order[0])
        order.remove(b)
        swap = lead[b] < lead[a] or (lead[a] == lead[b] and rng.random() < 0.5)
        pairs.append((b, a) if swap else (a, b))
    return pairs


def tournament(size: int, seed: int, done: Sequence[Judged] = ()) -> list[Pair]:
    """Single elimination, G − 1 verdicts: finds the best member. Ties and failed comparisons are decided at random."""
    rng = np.random.default_rng(seed)
    seats = rng.permutation(size).tolist()
    lots = rng.random(size)
    for i, j, p in done:
        first_wins = lots[i] > lots[j] if p is None or p == 0.5 else p > 0.5
        seats.remove(j if first_wins else i)
    level = max(1, 2 ** (len(seats) - 1).bit_length() // 2)  # members in the next round: a power of 2
    pairs = [(seats[2 * k], seats[2 * k + 1]) for k in range(len(seats) - level)]
    return pairs if len(seats) > 1 else []


PLANS: dict[str, Callable[..., list[Pair]]] = {
    "round_robin": round_robin,
    "both_orders": both_orders,
    "k_regular": k_regular,
    "budget": budget,
    "swiss": swiss,
    "tournament": tournament,
}
_WITH_NUMBER = ("k_regular", "budget", "swiss")


def get_plan(name: str) -> Plan:
    """Plan by name, with its number if it takes one: 'both_orders', 'k_regular(4)'; ValueError if unknown."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*", name)
    base, number = (match[1], match[2]) if match else (name, None)
    if base not in PLANS or (number and base not in _WITH_NUMBER):
        shown = [f"{p}(n)" if p in _WITH_NUMBER else p for p in PLANS]
        raise ValueError(f"unknown pair plan '{name}'{did_you_mean(base, PLANS)}: expected one of {', '.join(shown)}")
    return partial(PLANS[base], n=int(number)) if number else PLANS[base]
