"""Pair plans, and from verdicts to win rates.

Plans: properties over group sizes and seeds (who is compared with whom, balance of the two positions, number of
verdicts); refused names. Oracles of rates: without noise, Bradley-Terry recovers the win rates of the full plan from a
few pairs; at its strengths the gradient of the penalised likelihood is 0, whatever the iteration; by hand: ties,
missing and rounded verdicts. The win rates of the rewards are tested in tests/rewards/test_scorer.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import noise

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.pairs import PLANS, Compares, bradley_terry, get_plan, k_regular, pair_table, rate_groups

G = 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def asked(plan, quality, bias=0.0, seed=0):
    """All comparisons that a plan requests from a judge with exact Bradley-Terry answers."""
    pairs = get_plan(plan)(len(quality), seed)
    return [(i, j, float(sigmoid(quality[i] - quality[j] + bias))) for i, j in pairs]


def rated(size, groups, *how):
    """(ratings, wins, counts) of groups of games (first, second, P(first) or None)."""
    return rate_groups(np.stack([pair_table(size, (((i, j), p) for i, j, p in games)) for games in groups]), *how)


def full_rates(quality):
    p = sigmoid(quality[:, None] - quality)
    return (p.sum(1) - 0.5) / (len(quality) - 1)


@pytest.fixture
def quality():
    return np.random.default_rng(0).permutation(np.linspace(-2, 2, G))


@pytest.mark.parametrize("plan", ["k_regular(4)", "k_regular(6)"])
def test_few_pairs_give_the_rates_of_the_full_plan(plan, quality):
    done = asked(plan, quality)
    strength = rated(G, [done], "bradley_terry")[0][0]
    wins = rated(G, [done])[0][0]
    error, plain = np.abs(strength - full_rates(quality)), np.abs(wins - full_rates(quality))
    assert error.max() < 0.05 and error.max() < 0.5 * plain.max()
    assert np.array_equal(strength.argsort(), quality.argsort())


def test_ties_and_missing_verdicts():
    judged = [(0, 1, 0.5), (1, 2, None), (2, 3, 0.9), (3, 2, None)]
    by_wins = rated(5, [judged])[0][0]
    assert by_wins == pytest.approx([0.5, 0.5, 0.9, 0.1, np.nan], nan_ok=True)
    strength = rated(5, [judged], "bradley_terry")[0][0]
    assert strength[0] == pytest.approx(strength[1]) and strength[2] > strength[0] > strength[3]
    assert np.isnan(strength[4]) and strength[:4].mean() == pytest.approx(0.5)
    without = rated(5, [[v for v in judged if v[2] is not None]], "bradley_terry")[0][0]
    assert strength == pytest.approx(without, nan_ok=True)
    assert np.isnan(rated(3, [[(0, 1, None)], []], "bradley_terry")[0]).all()


def test_hard_verdicts_average_the_orders_to_half_when_they_contradict():
    judged = [(0, 1, 0.9), (1, 0, 0.8), (0, 2, 0.6), (2, 0, 0.1), (1, 2, 0.5)]
    values, wins, counts = rated(3, [judged], "win_rate", True)
    assert wins[0].tolist() == [[0, 0.5, 1], [0.5, 0, 0.5], [0, 0.5, 0]]
    assert counts[0].tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert values[0].tolist() == [0.75, 0.5, 0.25]


def test_many_groups_at_once_are_each_alone():
    rng = np.random.default_rng(1)
    groups = [asked("k_regular(3)", rng.normal(size=G), bias=0.4, seed=k) for k in range(3)]
    for how in ([], ["bradley_terry"], ["win_rate", True]):
        alone = [rated(G, [group], *how)[0][0] for group in groups]
        np.testing.assert_allclose(rated(G, groups, *how)[0], alone, rtol=1e-5)


# ---- strengths -------------------------------------------------------------------------------------------------------


def games(seed, prompts, group, density):
    rng = np.random.default_rng(seed)
    played = np.triu((rng.random((prompts, group, group)) < density) * rng.integers(1, 3, (prompts, group, group)), 1)
    upper = rng.random(played.shape) * played
    counts = played + played.transpose(0, 2, 1)
    wins = upper + np.triu(played - upper, 1).transpose(0, 2, 1)
    return torch.tensor(wins), torch.tensor(counts)


def slope(theta, wins, counts, prior):
    """Gradient of the penalised likelihood."""
    expected = counts * torch.sigmoid(theta[:, :, None] - theta[:, None, :])
    return wins.sum(-1) - expected.sum(-1) + prior * (0.5 - torch.sigmoid(theta))


@settings(max_examples=25)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(2, 9), st.sampled_from([0.2, 0.6, 1.0]), st.floats(0.2, 3.0))
def test_strengths_are_the_optimum(seed, prompts, group, density, prior):
    wins, counts = games(seed, prompts, group, density)
    theta = bradley_terry(wins, counts, prior=prior).double()
    lost = counts.sum(-1) == 0
    assert torch.equal(torch.isnan(theta), lost)
    assert (slope(theta.nan_to_num(0.0), wins, counts, prior)[~lost].abs() < 1e-9).all()


@pytest.mark.parametrize("kind", ["chain", "one wins all", "ring of upsets", "stated both orders"])
def test_one_sided_sparse_games_reach_the_optimum(kind):
    """Here 100 iterations of Hunter's MM algorithm were off by whole logits; the likelihood is strictly concave."""
    group = 10
    first, shown = torch.zeros(2, 1, group, group, dtype=torch.float64)
    for i in range(group - 1):
        shown[0, i, i + 1] = 1.0
        first[0, i, i + 1] = {"ring of upsets": 0.0 if i == 4 else 0.97}.get(kind, 1.0)
    if kind == "one wins all":
        shown[0, 0, 1:] = 1.0
        first[0, 0, 1:] = 1.0
    if kind == "stated both orders":
        shown[0] = 1.0 - torch.eye(group)
        first = torch.triu(shown)
    wins, counts = first + (shown - first).mT, shown + shown.mT
    assert slope(bradley_terry(wins, counts, prior=0.3), wins, counts, 0.3).abs().max() < 1e-9


def test_a_nan_without_a_comparison_moves_nothing_and_a_nan_verdict_stays_in_its_group():
    """A single NaN used to stop the iteration of every group in the call after its first step."""
    wins, counts = games(3, 2, 8, 0.5)
    wins, counts = wins.double(), counts.double()
    want = bradley_terry(wins, counts)
    absent = torch.where(counts == 0, torch.nan, wins)
    torch.testing.assert_close(bradley_terry(absent, counts), want, equal_nan=True)
    broken = wins.clone()
    broken[0] = torch.where(counts[0] > 0, torch.nan, broken[0])
    found = bradley_terry(broken, counts)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1], want[1], equal_nan=True)


# ---- plans -----------------------------------------------------------------------------------------------------------

sizes = st.integers(2, 24)
seeds = st.integers(0, 2**63)


def first_minus_second(pairs, size):
    return [sum(i == m for i, _ in pairs) - sum(j == m for _, j in pairs) for m in range(size)]


def unordered(pairs):
    return [tuple(sorted(p)) for p in pairs]


@given(size=sizes, seed=seeds)
@settings(max_examples=100, deadline=None)
def test_full_plans_ask_every_pair_and_are_balanced(size, seed):
    round_robin = PLANS["round_robin"]
    pairs = round_robin(size, seed)
    assert sorted(unordered(pairs)) == [(i, j) for i in range(size) for j in range(i + 1, size)]
    assert max(map(abs, first_minus_second(pairs, size))) <= 1
    assert pairs == round_robin(size, seed)
    assert sorted(PLANS["both_orders"](size, 0)) == [(i, j) for i in range(size) for j in range(size) if i != j]
    assert {(0, 1) in round_robin(4, seed) for seed in range(32)} == {True, False}


@given(size=sizes, seed=seeds, data=st.data())
@settings(max_examples=100, deadline=None)
def test_k_regular_gives_everyone_k_opponents(size, seed, data):
    k = data.draw(st.sampled_from([k for k in range(1, size) if k * size % 2 == 0]))
    pairs = k_regular(size, seed, n=k)
    assert len(set(unordered(pairs))) == len(pairs) == k * size // 2
    assert [sum(m in p for p in pairs) for m in range(size)] == [k] * size
    assert max(map(abs, first_minus_second(pairs, size))) <= k % 2
    reached = set()
    border = {0}
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


class Darker(Compares):
    """Whichever is darker; written without a thought for the fields of `Compares`."""

    def __init__(self, margin=0.0):
        self.margin = margin

    def ask(self, asked):
        means = [[sample.media.pixels.mean() for sample in samples] for samples in asked]
        return [Answer(0.5 if abs(a - b) <= self.margin else float(a < b)) for a, b in means]


def test_a_class_with_an_init_of_its_own_compares_every_pair_in_both_orders():
    group = [Sample("p", noise(k, 8, 8)) for k in range(3)]
    means = [sample.media.pixels.mean() for sample in group]
    rates = [sum(mean < other for other in means) / 2 for mean in means]
    assert [answer.value for answer in Darker().score(group)] == rates
    assert [answer.value for answer in Darker(margin=255.0).score(group)] == [0.5] * 3
    assert Darker().is_win_rate
