"""Pair plans.

Cases: properties of every plan over group sizes and seeds (who is compared with whom, balance of the two positions,
number of verdicts); plans in rounds with a judge that knows the true order; refused names.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.judge.plans import PLANS, both_orders, budget, get_plan, k_regular, round_robin, swiss, tournament

sizes, seeds = st.integers(2, 24), st.integers(0, 2**63)
FITTING = {"k_regular": "(2)", "budget": "(24)", "swiss": "(1)"}


def first_minus_second(pairs, size):
    return [sum(i == m for i, _ in pairs) - sum(j == m for _, j in pairs) for m in range(size)]


def unordered(pairs):
    return [tuple(sorted(p)) for p in pairs]


def play(plan, size, seed=0, answer=lambda i, j: float(i > j)):
    """All comparisons that a plan requests, with their answers."""
    done = []
    while pairs := plan(size, seed, done):
        done += [(i, j, answer(i, j)) for i, j in pairs]
    return done


@given(size=sizes, seed=seeds)
@settings(max_examples=100, deadline=None)
def test_full_plans_ask_every_pair_and_are_balanced(size, seed):
    pairs = round_robin(size, seed)
    assert sorted(unordered(pairs)) == [(i, j) for i in range(size) for j in range(i + 1, size)]
    assert max(map(abs, first_minus_second(pairs, size))) <= 1
    assert pairs == round_robin(size, seed)
    assert sorted(both_orders(size, 0)) == [(i, j) for i in range(size) for j in range(size) if i != j]
    assert {(0, 1) in round_robin(4, seed) for seed in range(32)} == {True, False}


@given(size=st.integers(3, 24), seed=seeds, data=st.data())
@settings(max_examples=100, deadline=None)
def test_k_regular_gives_everyone_k_opponents(size, seed, data):
    k = data.draw(st.integers(2, size - 1).filter(lambda k: k * size % 2 == 0))
    pairs = k_regular(size, seed, n=k)
    assert len(set(unordered(pairs))) == len(pairs) == k * size // 2
    assert [sum(m in p for p in pairs) for m in range(size)] == [k] * size
    assert max(map(abs, first_minus_second(pairs, size))) <= k % 2
    reached, border = set(), {0}
    while border:
        reached |= border
        border = {m for p in pairs for m in p if reached & set(p)} - reached
    assert len(reached) == size  # connected: any two members are linked by a chain of comparisons


@given(size=sizes, seed=seeds, data=st.data())
@settings(max_examples=100, deadline=None)
def test_budget_asks_exactly_n_and_spreads_them(size, seed, data):
    n = data.draw(st.integers(-(-size // 2), size * (size - 1)))
    pairs = budget(size, seed, n=n)
    assert len(set(pairs)) == len(pairs) == n
    repeated = n - len(set(unordered(pairs)))
    assert repeated == max(0, n - size * (size - 1) // 2)  # no pair is repeated before all were asked once


@given(size=sizes, seed=seeds, data=st.data())
@settings(max_examples=100, deadline=None)
def test_swiss_rounds_pair_everyone_with_new_opponents(size, seed, data):
    rounds = data.draw(st.integers(1, size - 1))
    done = play(lambda *a: swiss(*a, n=rounds), size, seed)
    assert len(done) == rounds * (size // 2)
    games = [sum(m in d[:2] for d in done) for m in range(size)]
    assert min(games) >= rounds - (size % 2) * (1 + rounds // size) and max(games) <= rounds
    for start in range(0, len(done), size // 2):  # the member shown first less often goes first
        lead = first_minus_second([d[:2] for d in done[:start]], size)
        assert all(lead[i] <= lead[j] for i, j, _ in done[start : start + size // 2])
    early = [tuple(sorted(d[:2])) for d in done[: 2 * (size // 2)]]
    assert len(set(early)) == len(early) or size < 4


@given(size=sizes, seed=seeds)
@settings(max_examples=100, deadline=None)
def test_a_tournament_finds_the_best_in_g_minus_1(size, seed):
    done = play(tournament, size, seed)
    assert len(done) == size - 1
    losses = {min(i, j) for i, j, _ in done}
    assert set(range(size)) - losses == {size - 1}  # the judge prefers the higher number


@pytest.mark.parametrize("lost", [None, 0.5])
def test_plans_in_rounds_end_when_the_judge_is_no_help(lost):
    for plan in (tournament, lambda *a: swiss(*a, n=5)):
        done = play(plan, 9, 3, answer=lambda i, j: lost)
        assert len(done) in (8, 20)


def test_names_with_and_without_numbers():
    assert get_plan("both_orders") is PLANS["both_orders"]
    assert get_plan("k_regular(6)")(8, 0, ()) == k_regular(8, 0, n=6)
    assert len(get_plan(" budget ( 10 ) ")(8, 0, ())) == 10
    for name in PLANS:
        plan = get_plan(name + FITTING.get(name, ""))
        assert plan(8, 0, ()) and plan(8, 0, ()) == plan(8, 0, ())


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("roundrobin", "did you mean 'round_robin'"),
        ("both_orders(3)", r"expected one of round_robin, both_orders, k_regular\(n\)"),
        ("swiss(-1)", "unknown pair plan"),
        *((name, "got G = 9") for name in ("k_regular(3)", "k_regular(9)", "budget(2)", "budget(73)", "swiss(9)")),
    ],
)
def test_unknown_plans_and_numbers_that_do_not_fit_the_group_are_refused(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        get_plan(name)(9, 0, ())
