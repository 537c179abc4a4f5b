"""From verdicts to win rates.

Oracles: without noise, Bradley-Terry recovers the win rates of the full plan from a few pairs, with and without a
position bias; the gradient of the likelihood (test_ops_shaping.py); by hand: ties, missing and rounded verdicts. The
win rates of the rewards are tested in test_rewards_scorer.py.
"""

import numpy as np
import pytest
from tiny_media import grey

from prefgrpo.judge.plans import both_orders, get_plan
from prefgrpo.judge.rate import Rating, position_bias, rate_groups, unbiased
from prefgrpo.judge.verdict import PairJudge, Verdict
from prefgrpo.rewards import RewardSpecError, build
from prefgrpo.rewards.base import Sample

G = 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def asked(plan, quality, bias=0.0, seed=0):
    """All comparisons that a plan requests from a judge with exact Bradley-Terry answers."""
    done = []
    while pairs := plan(len(quality), seed, done):
        done += [(i, j, float(sigmoid(quality[i] - quality[j] + bias))) for i, j in pairs]
    return done


def full_rates(quality):
    p = sigmoid(quality[:, None] - quality)
    return (p.sum(1) - 0.5) / (len(quality) - 1)


@pytest.fixture
def quality():
    return np.random.default_rng(0).permutation(np.linspace(-2, 2, G))


@pytest.mark.parametrize("plan", ["swiss(4)", "k_regular(4)", "budget(30)"])
def test_few_pairs_give_the_rates_of_the_full_plan(plan, quality):
    done = asked(get_plan(plan), quality)
    strength = rate_groups(G, [done], Rating("bradley_terry")).values[0]
    wins = rate_groups(G, [done], Rating()).values[0]
    error, plain = np.abs(strength - full_rates(quality)), np.abs(wins - full_rates(quality))
    assert error.max() < 0.05 and error.max() < 0.5 * plain.max()
    assert np.array_equal(strength.argsort(), quality.argsort())
    assert strength.std() > wins.std() or plan != "swiss(4)"  # swiss pulls win rates towards 0.5


@pytest.mark.parametrize("bias", [1.5, "fit"])
@pytest.mark.parametrize("rate", ["win_rate", "bradley_terry"])
def test_a_position_bias_is_taken_out(rate, bias, quality):
    plan = get_plan("k_regular(5)")
    fair = rate_groups(G, [asked(plan, quality)], Rating(rate)).values
    judged = asked(plan, quality, bias=1.5)
    kept = rate_groups(G, [judged], Rating(rate)).values
    found = rate_groups(G, [judged], Rating(rate, bias=bias))
    assert np.abs(found.values - fair).max() < (1e-5 if bias == 1.5 else 0.03)
    assert np.abs(found.values - fair).max() < 0.3 * np.abs(kept - fair).max()
    assert found.bias[0] == pytest.approx(1.5, abs=1e-9 if bias == 1.5 else 0.3)


def test_both_orders_measure_the_bias(quality):
    judged = asked(both_orders, quality, bias=0.7)
    assert position_bias([judged]) == pytest.approx(0.7)
    assert np.isnan(position_bias([asked(get_plan("round_robin"), quality, bias=0.7)]))


def test_stated_verdicts_do_not_move_but_a_fit_sees_through_them():
    assert unbiased(np.array([0.0, 0.5, 1.0, 0.8]), 2.0)[:3].tolist() == [0.0, 0.5, 1.0]
    assert unbiased(np.array([0.8]), 2.0)[0] == pytest.approx(sigmoid(np.log(4) - 2))
    # The image shown first always wins, so all members are equal; member 0 was shown first most often.
    judged = [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0), (3, 0, 1.0)] * 2 + [(0, 2, 1.0)] * 2
    plain = rate_groups(4, [judged], Rating("bradley_terry")).values[0]
    fitted = rate_groups(4, [judged], Rating("bradley_terry", bias="fit"))
    assert plain.argmax() == 0 and np.ptp(fitted.values[0]) < 0.5 * np.ptp(plain) and fitted.bias[0] > 1.0


def test_ties_and_missing_verdicts():
    judged = [(0, 1, 0.5), (1, 2, None), (2, 3, 0.9), (3, 2, None)]
    by_wins = rate_groups(5, [judged], Rating()).values[0]
    assert by_wins == pytest.approx([0.5, 0.5, 0.9, 0.1, np.nan], nan_ok=True)
    strength = rate_groups(5, [judged], Rating("bradley_terry")).values[0]
    assert strength[0] == pytest.approx(strength[1]) and strength[2] > strength[0] > strength[3]
    assert np.isnan(strength[4]) and strength[:4].mean() == pytest.approx(0.5)
    without = rate_groups(5, [[v for v in judged if v[2] is not None]], Rating("bradley_terry", bias="fit"))
    assert rate_groups(5, [judged], Rating("bradley_terry", bias="fit")).values == pytest.approx(
        without.values, nan_ok=True
    )
    nothing = rate_groups(3, [[(0, 1, None)], []], Rating("bradley_terry", bias="fit"))
    assert np.isnan(nothing.values).all()


def test_hard_verdicts_average_the_orders_to_half_when_they_contradict_and_round_after_the_bias_is_out():
    kept = rate_groups(3, [[(0, 1, 0.9), (1, 0, 0.8), (0, 2, 0.6), (2, 0, 0.1), (1, 2, 0.5)]], Rating(verdict="hard"))
    assert kept.wins[0].tolist() == [[0, 0.5, 1], [0.5, 0, 0.5], [0, 0.5, 0]]
    assert kept.counts[0].tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert kept.values[0].tolist() == [0.75, 0.5, 0.25]
    judged = [(0, 1, 0.6), (1, 0, 0.6), (0, 2, 0.6), (2, 1, 0.55)]
    assert rate_groups(3, [judged], Rating(verdict="hard", bias=1.0)).wins[0].tolist() == [
        [0, 0.5, 0], [0.5, 0, 1], [1, 0, 0],
    ]  # fmt: skip


def test_many_groups_at_once_are_each_alone():
    rng = np.random.default_rng(1)
    groups = [asked(get_plan("swiss(3)"), rng.normal(size=G), bias=0.4, seed=k) for k in range(3)]
    for rating in (Rating(), Rating("bradley_terry"), Rating("bradley_terry", bias="fit"), Rating(bias="fit")):
        alone = [rate_groups(G, [group], rating).values[0] for group in groups]
        np.testing.assert_allclose(rate_groups(G, groups, rating).values, alone, rtol=1e-5)


class Exact(PairJudge):
    """Derives the quality of a member from its pixels."""

    streams, clips = False, False

    def judge_group(self, prompt, media, pairs, source=()):
        level = [float(m.pixels.mean()) / 40 for m in media]
        return [Verdict(float(sigmoid(level[i] - level[j] + 0.8))) for i, j in pairs]


def test_the_reward_rates_as_its_options_say():
    level = np.random.default_rng(2).permutation(G) * 15
    group = [Sample("p", grey(v, 4)) for v in level]
    options = {"judge": Exact(), "plan": "swiss(5)", "rate": "bradley_terry", "bias": "fit"}
    scores = build("vlm_pairwise", {"vlm_pairwise": options})["vlm_pairwise"].score_group(group, seed=3)
    assert np.argsort([s.value for s in scores.scores]).tolist() == np.argsort(level).tolist()
    assert [s.value for s in scores.scores] == pytest.approx(full_rates(level / 40), abs=0.05)


@pytest.mark.parametrize("bad", [{"rate": "elo"}, {"verdict": "firm"}, {"bias": "auto"}, {"bias": float("nan")}])
def test_unknown_options_are_refused(bad):
    with pytest.raises((ValueError, RewardSpecError), match=f"{next(iter(bad))} must be"):
        build("vlm_pairwise", {"vlm_pairwise": {"judge": Exact(), **bad}})
