"""Bradley-Terry strengths.

Oracles: at the fitted strengths the gradient of the penalised likelihood is 0 (a property of the optimum, whatever the
iteration); if all pairs are compared, they rank members as win rates do.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.judge.bradley_terry import bradley_terry
from prefgrpo.ops import group_advantage, winrate_advantage


def games(seed, prompts, group, density):
    rng = np.random.default_rng(seed)
    played = np.triu((rng.random((prompts, group, group)) < density) * rng.integers(1, 3, (prompts, group, group)), 1)
    upper = rng.random(played.shape) * played
    counts = played + played.transpose(0, 2, 1)
    wins = upper + np.triu(played - upper, 1).transpose(0, 2, 1)
    return torch.tensor(wins), torch.tensor(counts)


@settings(max_examples=25)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(2, 9), st.sampled_from([0.2, 0.6, 1.0]), st.floats(0.2, 3.0))
def test_strengths_are_the_optimum(seed, prompts, group, density, prior):
    wins, counts = games(seed, prompts, group, density)
    theta = bradley_terry(wins, counts, prior=prior).double()
    lost = counts.sum(-1) == 0
    assert torch.equal(torch.isnan(theta), lost)
    t = theta.nan_to_num(0.0)
    expected = counts * torch.sigmoid(t[:, :, None] - t[:, None, :])
    gradient = wins.sum(-1) - expected.sum(-1) + prior * (0.5 - torch.sigmoid(t))
    assert gradient[~lost].abs().max() < 1e-9 if (~lost).any() else True


@pytest.mark.parametrize("kind", ["chain", "one wins all", "ring of upsets", "stated both orders"])
def test_one_sided_sparse_games_reach_the_optimum(kind):
    """Here 100 iterations of Hunter's MM algorithm were off by whole logits; the likelihood is strictly concave."""
    group = 10
    first, shown = torch.zeros(2, 1, group, group, dtype=torch.float64)
    for i in range(group - 1):
        shown[0, i, i + 1] = 1.0
        first[0, i, i + 1] = {"ring of upsets": 0.0 if i == 4 else 0.97}.get(kind, 1.0)
    if kind == "one wins all":
        shown[0, 0, 1:], first[0, 0, 1:] = 1.0, 1.0
    if kind == "stated both orders":
        shown[0] = 1.0 - torch.eye(group)
        first = torch.triu(shown)
    wins, counts = first + (shown - first).mT, shown + shown.mT
    theta = bradley_terry(wins, counts, prior=0.3)
    expected = counts * torch.sigmoid(theta[:, :, None] - theta[:, None, :])
    assert (wins.sum(-1) - expected.sum(-1) + 0.3 * (0.5 - torch.sigmoid(theta))).abs().max() < 1e-9


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


def test_an_undefeated_member_is_finite_and_a_full_plan_ranks_like_win_rates():
    wins, counts = games(3, 2, 8, 1.0)
    counts = torch.ones_like(counts) - torch.eye(8)
    wins = torch.triu(torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1)
    wins = wins + torch.tril(counts - wins.transpose(1, 2), -1)
    wins[0, 0], wins[0, :, 0] = counts[0, 0], 0.0
    theta, (rate, _) = bradley_terry(wins, counts), winrate_advantage(wins, counts)
    assert torch.isfinite(theta).all() and theta[0].argmax() == 0
    assert torch.equal(theta.argsort(1), rate.argsort(1))
    ids = torch.arange(2).repeat_interleave(8)
    assert group_advantage(theta.reshape(1, -1), ids).view(2, 8).sum(1).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [{"prior": 0.0}, {"prior": float("nan")}, {"wins": torch.zeros(2, 3, 4)}])
def test_bad_input(bad):
    given = {"wins": torch.zeros(2, 3, 3), "counts": torch.zeros(2, 3, 3), **bad}
    with pytest.raises(ValueError, match="expected"):
        bradley_terry(**given)
