"""winrate_advantage on every backend, and the trainer's group_advantage, which is plain torch.

Oracles: golden numbers for the settings of three published codebases; NumPy's mean and std per group on random inputs
(any sizes, missing entries, weights); and two properties: a constant group gives exactly 0, and missing values have no
effect.
"""

import random

import numpy as np
import ops_cases
import pytest
import torch
from ops_cases import DEVICE, each_backend, few, seeds, serve

from prefgrpo.objectives.advantages import group_advantage
from prefgrpo.ops import winrate_advantage

R = [[1.0, 2.0, 3.0, 10.0], [0.0, 0.0, 4.0, 4.0]]
GOLDEN = {
    "flow_grpo": ({}, [-0.84850414, -0.56566943, -0.28283471, 1.69700828]),
    "flow_grpo global": ({"std": "global"}, [-0.98636149, -0.65757433, -0.32878716, 1.97272298]),
    "paco": ({"eps": 0.0}, [-0.84852814, -0.56568542, -0.28284271, 1.69705627]),
    "dance": ({"ddof": 1, "eps": 1e-8}, [-0.73484692, -0.48989795, -0.24494897, 1.46969384]),
    "dr": ({"std": "none"}, [-3.0, -2.0, -1.0, 6.0]),
    "rank": ({"rank": True, "eps": 0.0}, [-1.34164079, -0.4472136, 0.4472136, 1.34164079]),
}


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name):
    options, want = GOLDEN[name]
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    got = group_advantage(tensor([R]), **options)
    mixed = group_advantage(tensor([R])[:, :, order].flip(1), **options)
    assert got[0].tolist() == pytest.approx(want, abs=1e-6)
    assert torch.allclose(mixed, got[:, order].flip(0), rtol=0, atol=1e-7)


@seeds
def test_random_groups_against_numpy(cases):
    for seed in cases:
        rng = np.random.default_rng(seed)
        pick = random.Random(seed)
        shape = (pick.randint(1, 3), pick.randint(1, 5), pick.choice([1, 2, 7, 24]))
        rank = pick.random() < 0.5
        combine = pick.choice(["weighted_sum", "weighted_advantage_sum", "geometric_mean"])
        options = {"combine": combine, "std": pick.choice(["group", "global", "none"]), "ddof": pick.randint(0, 1)}
        options |= {"rank": rank, "eps": 1e-4}
        r = rng.choice([0.25, 0.5, 0.5, 1.0, 2.0], shape) if rank else rng.random(shape) + 0.01
        r = r.astype(np.float32).astype(np.float64)
        r[rng.random(shape) < pick.choice([0.0, 0.3, 1.0])] = np.nan
        w = 2.0 ** rng.integers(-2, 2, shape[0]) if rank else rng.random(shape[0]) + 0.1  # ties stay ties
        if shape[0] > 1:
            w[0] = 0.0
            r[0] = np.nan  # a reward of weight 0 may be missing everywhere
        got = group_advantage(tensor(r, pick.choice([torch.float32, torch.float64])), tensor(w), **options)
        assert got.dtype == torch.float32 and got.shape == shape[1:]
        ids = np.arange(shape[1]).repeat(shape[2])
        want = ops_cases.advantage(r.reshape(shape[0], -1), ids, w, **options)
        np.testing.assert_allclose(got.double().cpu().numpy().flatten(), want, rtol=2e-5, atol=2e-6, err_msg=str(seed))


@each_backend
@seeds
def test_random_win_rates_against_numpy(backend, cases):
    for seed in few(backend, cases):
        rng = np.random.default_rng(seed)
        pick = random.Random(seed)
        prompts = pick.randint(0, 9)
        group = pick.choice([0, 1, 2, 5, 9, 33, 64])
        std = pick.choice(["group", "global", "none"])
        ddof = pick.randint(0, 1)
        there = rng.random((prompts, group, group)) >= pick.choice([0.0, 0.5, 1.0])
        counts = rng.integers(0, 3, there.shape) * there
        wins = (rng.random(counts.shape) * counts).astype(np.float32).astype(np.float64)
        dtype = pick.choice([torch.float32, torch.float64])
        with serve(backend):
            rate, adv = winrate_advantage(tensor(wins, dtype), tensor(counts, dtype), std=std, ddof=ddof)
        n = counts.sum(-1)
        want = np.where(n > 0, wins.sum(-1) / np.maximum(n, 1), np.nan)
        np.testing.assert_allclose(rate.double().cpu().numpy(), want, rtol=1e-6, err_msg=str(seed))
        rates = rate.double().cpu().numpy().reshape(-1)  # advantages are of the rates as returned
        want = ops_cases.normalised(rates, np.arange(prompts).repeat(group), std, ddof=ddof)
        np.testing.assert_allclose(adv.double().cpu().numpy().reshape(-1), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1, -7e-30])
def test_a_constant_group_gives_exactly_zero(value):
    r = tensor([[[value] * 7, [0.0, 1.0] * 3 + [0.5]]])
    for std in ("group", "global", "none"):
        got = group_advantage(r, std=std, eps=0.0)
        assert got[0].tolist() == [0.0] * 7 and got[1, :6].abs().min() > 0
    assert group_advantage(r.float(), eps=0.0)[0].tolist() == [0.0] * 7


@each_backend
def test_win_rates_whose_sums_differ_only_in_order_are_equal(backend):
    wins = tensor([[[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.1, 0.3]]])
    counts = tensor([[[1.0] * 3] * 3])
    assert len(set((wins.sum(-1) / 3)[0].tolist())) > 1
    with serve(backend):
        rate, advantage = winrate_advantage(wins, counts, eps=0.0)
    assert rate[0].tolist() == [pytest.approx(0.2)] * 3 and advantage.tolist() == [[0.0] * 3]
