"""The policy's metrics of a step against plain NumPy.

Why these cases: a metric that averages over batches instead of samples, or hides the worst ratio, misleads whoever
tunes the run.
"""

import numpy as np
import pytest
import torch
from world import ALONE

from prefgrpo.ops import METRICS
from prefgrpo.update.metrics import FACTS, policy_metrics

NAN = float("nan")


def row(update, samples, loss, **values):
    return torch.tensor([update, samples, NAN, loss, *(values.get(name, 0.0) for name in METRICS)])


def test_policy_figures_are_over_samples_and_the_worst_ratio_shows():
    rows = [
        row(0, 3, 0.5, clip_fraction=1.0, ratio_min=0.9, ratio_mean=1.0, ratio_max=1.0, kl=2.0),
        row(0, 1, 0.25, clip_fraction=0.0, ratio_min=1.0, ratio_mean=2.0, ratio_max=1.3, kl=6.0),
        row(1, 4, 0.25, clip_fraction=0.5, ratio_min=0.5, ratio_mean=1.0, ratio_max=1.9, kl=0.0),
    ]
    found = policy_metrics(rows, ALONE)
    assert found["loss"] == 1.0 and found["policy/clip_fraction"] == 5 / 8 and found["policy/kl"] == 12 / 8
    assert found["policy/ratio_min"] == 0.5 and found["policy/ratio_max"] == pytest.approx(1.9)
    assert found["policy/ratio_mean"] == 9 / 8
    assert found["policy/on_policy_error"] == pytest.approx(0.3), "first update only, largest |ratio - 1|"
    assert set(found) == {"loss", "policy/on_policy_error", *(f"policy/{n}" for n in METRICS)}
    assert FACTS == ("update", "samples", "k", "loss")


def test_the_spread_of_all_ratios_is_that_of_their_forwards_together():
    """Forwards of one sample have none of their own (NaN)."""
    ratios = [np.array([0.9, 1.1, 1.3]), np.array([1.05]), np.array([0.7, 0.8])]
    rows = [row(0, len(r), 0.0, ratio_mean=r.mean(), ratio_std=r.std(ddof=1) if len(r) > 1 else np.nan) for r in ratios]
    whole = np.concatenate(ratios).std(ddof=1)
    assert policy_metrics(rows, ALONE)["policy/ratio_std"] == pytest.approx(whole, rel=1e-5)
    assert "policy/ratio_std" not in policy_metrics(rows[1:2], ALONE), "one ratio has no spread"


def test_a_step_without_training_has_figures_without_nan():
    found = policy_metrics([], ALONE)
    assert found["loss"] == found["policy/on_policy_error"] == 0.0 and "policy/ratio_max" not in found
    assert all(np.isfinite(v) for v in found.values())
