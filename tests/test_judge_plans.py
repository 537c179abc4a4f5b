"""Pair plans.

Cases: properties of every plan over group sizes and seeds (who is compared with whom, balance of the two positions,
number of verdicts); refused names.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.judge.pairs import PLANS, both_orders, get_plan, k_regular, round_robin

sizes, seeds = st.integers(2, 24), st.integers(0, 2**63)


def first_minus_second(pairs, size):
    return [sum(i == m for i, _ in pairs) - sum(j == m for _, j in pairs) for m in range(size)]


def unordered(pairs):
    return [tuple(sorted(p)) for p in pairs]


@given(size=sizes, seed=seeds)
@settings(max_examples=100, deadline=None)
def test_full_plans_ask_every_pair_and_are_balanced(size, seed):
    pairs = round_robin(size, seed)
    assert sorted(unordered(pairs)) == [(i, j) for i in range(size) for j in range(i + 1, size)]
    assert max(map(abs, first_minus_second(pairs, size))) <= 1
    assert pairs == round_robin(size, seed)
    assert sorted(both_orders(size, 0)) == [(i, j) for i in range(size) for j in range(size) if i != j]
    assert {(0, 1) in round_robin(4, seed) for seed in range(32)} == {True, False}


@given(size=sizes, seed=seeds, data=st.data())
@settings(max_examples=100, deadline=None)
def test_k_regular_gives_everyone_k_opponents(size, seed, data):
    k = data.draw(st.sampled_from([k for k in range(1, size) if k * size % 2 == 0]))
    pairs = k_regular(size, seed, n=k)
    assert len(set(unordered(pairs))) == len(pairs) == k * size // 2
    assert [sum(m in p for p in pairs) for m in range(size)] == [k] * size
    assert max(map(abs, first_minus_second(pairs, size))) <= k % 2
    reached, border = set(), {0}
    while border:
        reached |= border
        border = {m for p in pairs for m in p if reached & set(p)} - reached
    assert len(reached) == (size if k > 1 else 2)  # connected: a chain of comparisons links any two members


def test_names_with_and_without_numbers():
    assert get_plan("both_orders") is PLANS["both_orders"]
    assert get_plan(" k_regular ( 6 ) ")(8, 0) == k_regular(8, 0, n=6)
    assert get_plan("k_regular")(8, 0) == k_regular(8, 0, n=4)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("roundrobin", "did you mean 'round_robin'"),
        ("both_orders(3)", r"expected one of round_robin, both_orders, k_regular\(n\)"),
        ("k_regular(-1)", "unknown pair plan"),
        *((name, "got G = 9") for name in ("k_regular(0)", "k_regular(3)", "k_regular(9)")),
    ],
)
def test_unknown_plans_and_numbers_that_do_not_fit_the_group_are_refused(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        get_plan(name)(9, 0)
