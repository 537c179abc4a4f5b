"""The metrics of a step's rewards against plain NumPy.

Why these cases: a metric that counts missing rewards as zero misleads whoever tunes the run.
"""

import pickle

import numpy as np
import pytest

from prefgrpo.data.answer import Answer
from prefgrpo.data.metric import Metric
from prefgrpo.rewards.log import judge_metrics
from prefgrpo.run.targets import (
    RewardsMissing,
    check_missing,
    missing_shares,
    pixel_distance,
    reduced,
    reward_metrics,
    thumbnail,
)

NAN = float("nan")


def test_reward_means_leave_missing_ones_out():
    rewards = np.array([[1.0, NAN], [3.0, NAN], [5.0, NAN], [NAN, NAN]])
    found = reward_metrics(["a", "b"], rewards, 2)
    assert found == {"reward/a": 3.0, "reward/a_std": 1.0}, "the second group has a missing member"


def test_missing_rewards():
    rewards = np.array([[1.0, NAN], [NAN, 1.0], [1.0, 1.0], [1.0, 1.0]])
    none = np.zeros((2, 2))
    assert missing_shares(rewards, np.array([1.0, 1.0]), none) == {"reward/missing": 0.5}
    assert missing_shares(rewards, np.array([1.0, 0.0]), none) == {"reward/missing": 0.25}, "a monitor may be missing"
    assert missing_shares(rewards, np.array([0.0, 0.0]), none) == {"reward/missing": 0.0}
    with pytest.raises(RewardsMissing, match=r"50% of the rewards.*judge.max_missing = 10%\. Reasons: timeout; html$"):
        check_missing({"reward/missing": 0.5}, 0.1, ["timeout", "html", "timeout"])
    with pytest.raises(RewardsMissing, match="none was given"):
        check_missing({"reward/missing": 0.5}, 0.1, [])


def test_lost_comparisons_count_as_well_as_members():
    """Every member still has one of its six verdicts, so no member is missing although comparisons are."""
    whole, asked = np.ones((8, 3)), np.array([[20.0, 12.0], [100.0, 0.0], [0.0, 0.0]])
    shares = missing_shares(whole, np.array([1.0, 1.0, 1.0]), asked)
    assert shares == {"reward/missing": 0.0, "judge/missing": 0.6}, "expected the worst reward's share, not the mean"
    with pytest.raises(RewardsMissing, match="60% of the comparisons are missing"):
        check_missing(shares, 0.1, [])
    assert missing_shares(whole, np.array([0.0, 1.0, 1.0]), asked)["judge/missing"] == 0.0, "weight 0: not counted"
    assert check_missing({"reward/missing": 0.0, "judge/missing": 0.04}, 0.1, []) == ""
    assert "5% of the comparisons are missing" in check_missing({"reward/missing": 0.0, "judge/missing": 0.05}, 0.1, [])
    assert "7% of the rewards" in check_missing({"reward/missing": 0.07, "judge/missing": 0.05}, 0.1, [])


def judge_step(count, retries):
    verdicts = [Answer(0.5 if k else 1.0, retries=retries) for k in range(count)]
    waited = {"judge/wait_s": Metric(2.0, "max", timed=True)}
    return judge_metrics([{(0, k): v for k, v in enumerate([*verdicts, Answer(None, "lost")])}]) | waited


def test_every_metric_is_reduced_over_ranks_as_its_producer_says():
    """Counts are summed, waiting times take the maximum, rates are averaged, weighted by their
    denominators; a metric may exist on one rank only."""
    a, b = judge_step(2, 1) | {"reward/x": 0.25}, judge_step(1, 2) | {"only/b": 7.0}
    found = reduced([a, b])
    assert (found["judge/requests"], found["judge/failures"], found["time/judge/retries"]) == (5, 2, 2 + 2)
    assert found["time/judge/wait_s"] == 2.0
    assert found["judge/tie_rate"] == pytest.approx(1 / 3), "expected one tie in the three verdicts of both ranks"
    assert found["reward/x"] == 0.25 and found["only/b"] == 7.0
    assert {name for name in found if name.startswith("time/")} == {"time/judge/retries", "time/judge/wait_s"}
    assert reduced([{}]) == {}
    assert pickle.loads(pickle.dumps(a["judge/requests"])).reduction == "sum"


def test_the_distance_of_images_is_that_of_all_pairs():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)
    pairs = [((a / 255 - b / 255) ** 2).mean() for i, a in enumerate(images) for b in images[:i]]
    assert pixel_distance(images) == pytest.approx(np.mean(pairs) ** 0.5, rel=1e-5)
    assert pixel_distance(images[:1].repeat(3, 0)) == 0.0


@pytest.mark.parametrize(("shape", "small"), [
    ((48, 64, 3), (48, 64, 3)), ((200, 130, 3), (100, 65, 3)), ((9, 128, 192, 3), (4, 64, 96, 3)),
    ((2, 16, 16, 3), (2, 16, 16, 3)),
])  # fmt: skip
def test_a_thumbnail_holds_the_means_of_boxes(shape, small):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    made = thumbnail(pixels)
    factor = shape[-3] // small[-3]
    assert made.shape == small and made.dtype == np.uint8
    frames = pixels.reshape(-1, *shape[-3:])[[0, 2, 5, 8] if len(shape) == 4 and shape[0] > 4 else slice(None)]
    boxes = frames.reshape(-1, small[-3], factor, small[-2], factor, 3).mean((2, 4)).reshape(small)
    assert np.abs(made - boxes).max() <= 0.51
