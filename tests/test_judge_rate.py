"""From verdicts to win rates.

Oracles: without noise, Bradley-Terry recovers the win rates of the full plan from a few pairs; the gradient of the
likelihood (test_judge_bradley_terry.py); by hand: ties, missing and rounded verdicts. The win rates of the rewards are
tested in test_rewards_scorer.py.
"""

import numpy as np
import pytest
from tiny_media import grey

from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.rate import Rating, rate_groups, verdict_table
from prefgrpo.judge.verdict import PairJudge, Verdict
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample

G = 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def asked(plan, quality, bias=0.0, seed=0):
    """All comparisons that a plan requests from a judge with exact Bradley-Terry answers."""
    pairs = get_plan(plan)(len(quality), seed)
    return [(i, j, float(sigmoid(quality[i] - quality[j] + bias))) for i, j in pairs]


def rated(size, groups, rating):
    """Ratings of groups of games (first, second, P(first) or None)."""
    return rate_groups(np.stack([verdict_table(size, games) for games in groups]), rating)


def full_rates(quality):
    p = sigmoid(quality[:, None] - quality)
    return (p.sum(1) - 0.5) / (len(quality) - 1)


@pytest.fixture
def quality():
    return np.random.default_rng(0).permutation(np.linspace(-2, 2, G))


@pytest.mark.parametrize("plan", ["k_regular(4)", "k_regular(6)"])
def test_few_pairs_give_the_rates_of_the_full_plan(plan, quality):
    done = asked(plan, quality)
    strength = rated(G, [done], Rating("bradley_terry")).values[0]
    wins = rated(G, [done], Rating()).values[0]
    error, plain = np.abs(strength - full_rates(quality)), np.abs(wins - full_rates(quality))
    assert error.max() < 0.05 and error.max() < 0.5 * plain.max()
    assert np.array_equal(strength.argsort(), quality.argsort())


def test_ties_and_missing_verdicts():
    judged = [(0, 1, 0.5), (1, 2, None), (2, 3, 0.9), (3, 2, None)]
    by_wins = rated(5, [judged], Rating()).values[0]
    assert by_wins == pytest.approx([0.5, 0.5, 0.9, 0.1, np.nan], nan_ok=True)
    strength = rated(5, [judged], Rating("bradley_terry")).values[0]
    assert strength[0] == pytest.approx(strength[1]) and strength[2] > strength[0] > strength[3]
    assert np.isnan(strength[4]) and strength[:4].mean() == pytest.approx(0.5)
    without = rated(5, [[v for v in judged if v[2] is not None]], Rating("bradley_terry")).values[0]
    assert strength == pytest.approx(without, nan_ok=True)
    nothing = rated(3, [[(0, 1, None)], []], Rating("bradley_terry"))
    assert np.isnan(nothing.values).all()


def test_hard_verdicts_average_the_orders_to_half_when_they_contradict():
    kept = rated(3, [[(0, 1, 0.9), (1, 0, 0.8), (0, 2, 0.6), (2, 0, 0.1), (1, 2, 0.5)]], Rating(verdict="hard"))
    assert kept.wins[0].tolist() == [[0, 0.5, 1], [0.5, 0, 0.5], [0, 0.5, 0]]
    assert kept.counts[0].tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert kept.values[0].tolist() == [0.75, 0.5, 0.25]


def test_many_groups_at_once_are_each_alone():
    rng = np.random.default_rng(1)
    groups = [asked("k_regular(3)", rng.normal(size=G), bias=0.4, seed=k) for k in range(3)]
    for rating in (Rating(), Rating("bradley_terry"), Rating(verdict="hard")):
        alone = [rated(G, [group], rating).values[0] for group in groups]
        np.testing.assert_allclose(rated(G, groups, rating).values, alone, rtol=1e-5)


class Exact(PairJudge):
    """Derives the quality of a member from its pixels."""

    streams, clips = False, False

    def judge_group(self, prompt, media, pairs, source=()):
        level = [float(m.pixels.mean()) / 40 for m in media]
        return [Verdict(float(sigmoid(level[i] - level[j]))) for i, j in pairs]


def test_the_reward_rates_as_its_options_say():
    level = np.random.default_rng(2).permutation(G) * 15
    group = [Sample("p", grey(v, 4)) for v in level]
    options = {"judge": Exact(), "plan": "k_regular(5)", "rate": "bradley_terry"}
    scores = build("vlm_pairwise", {"vlm_pairwise": options})["vlm_pairwise"].score_group(group, seed=3)
    assert np.argsort([s.value for s in scores.scores]).tolist() == np.argsort(level).tolist()
    assert [s.value for s in scores.scores] == pytest.approx(full_rates(level / 40), abs=0.05)
