"""Several rewards at once: streamed and in process, some failing.

Why these cases: a mixed spec is where a missing value of one reward can leak into the advantages of others, where a
slow streaming reward can hold up the rest, and where a monitor of weight 0 can stop a run. Oracles: advantages in
numpy over the members that have every reward; the same groups without failures.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from prefgrpo.data.media import Media
from prefgrpo.ops import group_advantage
from prefgrpo.rewards.base import GroupwiseReward, PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.flight import LATE
from prefgrpo.rewards.scorer import Scorer

EPS = 1e-4


class Level(PointwiseReward):
    """The grey level of the first pixel."""

    def score(self, samples):
        return [Score(float(s.media.pixels[0, 0, 0])) for s in samples]


class Flaky(PointwiseReward):
    """The level of the second pixel, from another thread; fails for the samples named in their columns."""

    streams = True

    def __init__(self):
        self.pool = ThreadPoolExecutor(4)

    def score(self, samples):
        return [self.submit(s).result() for s in samples]

    def submit(self, sample):
        value = Score(None, "no luck") if sample.meta["fails"] else Score(float(sample.media.pixels[0, 1, 0]))
        return self.pool.submit(lambda: value)

    def close(self):
        self.pool.shutdown()


def scores(levels, fails, rewards, deadline_s=30):
    """Values per reward [n, G] of groups whose samples have two levels [n, G, 2]."""
    groups, size = levels.shape[:2]
    with Scorer(rewards, size, deadline_s=deadline_s) as scorer:
        scorer.begin(0, range(groups))
        for g in range(groups):
            for m in range(size):
                pixels = np.broadcast_to(levels[g, m][None, :, None], (1, 2, 3)).astype(np.uint8)
                scorer.add(g, m, Sample("p", Media(pixels), meta={"fails": bool(fails[g, m])}))
        return scorer.finish()


def advantages(values, weights, combine):
    rewards = np.stack([v.ravel() for v in values])
    ids = torch.arange(values[0].shape[0]).repeat_interleave(values[0].shape[1])
    found = group_advantage(torch.from_numpy(rewards), ids, torch.tensor(weights), combine=combine, eps=EPS)
    return found.view(values[0].shape).numpy()


def by_hand(members, weights, combine):
    """Advantages of one group's members [k, R] that have every reward."""
    if combine == "weighted_sum":
        total = members @ weights
        return (total - total.mean()) / (total.std() + EPS)
    return ((members - members.mean(0)) / (members.std(0) + EPS)) @ weights


@pytest.mark.parametrize("combine", ["weighted_sum", "weighted_advantage_sum"])
def test_a_reward_that_fails_for_one_in_twenty_does_not_bias_the_others(combine):
    rng, weights = np.random.default_rng(0), np.array([0.7, 0.3])
    levels = rng.integers(100, 200, (600, 8, 2))
    fails = rng.random((600, 8)) < 0.05
    result = scores(levels, fails, {"level": Level(), "flaky": Flaky()})
    values = [result.values["level"], result.values["flaky"]]
    assert np.array_equal(values[0], levels[..., 0]) and np.array_equal(np.isnan(values[1]), fails)
    assert result.reasons == {"flaky: no luck": fails.sum()}
    assert result.metrics["reward/flaky/missing_rate"] == pytest.approx(fails.mean())
    got = advantages(values, weights, combine)

    assert (got[fails] == 0).all(), "a sample that lacks a reward trains nothing"
    for g in range(600):
        have = ~fails[g]
        np.testing.assert_allclose(got[g, have], by_hand(levels[g, have], weights, combine), rtol=1e-4, atol=1e-5)

    whole = advantages([levels[..., 0] * 1.0, levels[..., 1] * 1.0], weights, combine)
    touched = ~fails & fails.any(1)[:, None]
    assert np.array_equal(got[~fails.any(1)], whole[~fails.any(1)]), "groups without a failure are as they were"
    shift = (got - whole)[touched]
    assert abs(shift.mean()) < 4 * shift.std() / len(shift) ** 0.5, "failures elsewhere shift nobody on average"
    zeros = advantages([values[0], np.nan_to_num(values[1])], weights, combine)
    biased = (zeros - whole)[touched]
    assert biased.mean() > 8 * biased.std() / len(biased) ** 0.5, "this would show a failure that counts as 0"


def test_a_monitor_that_fails_changes_no_advantage():
    levels = np.random.default_rng(1).integers(100, 200, (4, 6, 2))
    values = scores(levels, np.ones((4, 6), bool), {"level": Level(), "flaky": Flaky()}).values
    got = advantages([values["level"], values["flaky"]], np.array([1.0, 0.0]), "weighted_sum")
    np.testing.assert_allclose(got, [by_hand(g[:, :1], np.ones(1), "weighted_sum") for g in levels], rtol=1e-4)


class Streaming(PointwiseReward):
    """Answers when it is told to."""

    streams = True

    def __init__(self):
        self.seen, self.waiting, self.complete = [], [], threading.Event()

    def score(self, samples):
        raise AssertionError("a streaming reward is not called in bulk")

    def submit(self, sample):
        self.seen.append(int(sample.media.pixels[0, 0, 0]))
        self.waiting.append(Future())
        if len(self.seen) == 6:
            self.complete.set()
        return self.waiting[-1]


def test_streaming_rewards_get_samples_at_once_and_the_others_run_meanwhile():
    """The in-process reward answers only after the streaming one saw every sample: in series this would hang."""
    streaming, levels = Streaming(), np.arange(12).reshape(2, 3, 2)

    class Slow(Level):
        def score(self, samples):
            assert streaming.complete.wait(600)
            for future, value in zip(streaming.waiting[::-1], streaming.seen[::-1], strict=True):
                future.set_result(Score(value * 2.0))
            return super().score(samples)

    result = scores(levels, np.zeros((2, 3)), {"slow": Slow(), "streaming": streaming})
    assert streaming.seen == levels[..., 0].ravel().tolist()
    assert np.array_equal(result.values["streaming"], levels[..., 0] * 2.0)
    assert {"reward/slow/latency_p50", "reward/streaming/latency_p95"} <= set(result.metrics)


def test_what_a_streaming_reward_does_not_answer_is_missing_at_the_deadline():
    result = scores(np.zeros((1, 2, 2)), np.zeros((1, 2)), {"level": Level(), "silent": Streaming()}, deadline_s=0.2)
    assert np.isnan(result.values["silent"]).all() and not np.isnan(result.values["level"]).any()
    assert result.reasons == {f"silent: {LATE}": 2}


class Raises(PointwiseReward):
    """Raises for a dark sample, as a library out of memory does; what it gives for a bright one is to be set."""

    gives = Score(1.0)

    def score(self, samples):
        if any(s.media.pixels[0, 0, 0] < 120 for s in samples):
            raise RuntimeError("out of memory")
        return [self.gives for _ in samples]


class RaisesGroups(GroupwiseReward):
    """Raises for every group."""

    def score_group(self, group, seed):
        raise RuntimeError("no such kernel")


def test_a_reward_that_raises_is_missing_where_it_does(capfd):
    levels = np.array([[[130, 1], [110, 2], [150, 3]]])
    result = scores(levels, np.zeros((1, 3), bool), {"level": Level(), "raises": Raises(), "groups": RaisesGroups()})
    np.testing.assert_array_equal(result.values["raises"], [[1.0, np.nan, 1.0]])
    assert np.isnan(result.values["groups"]).all() and not np.isnan(result.values["level"]).any()
    assert result.reasons == {
        "raises: the reward raised RuntimeError: out of memory": 1,
        "groups: the reward raised RuntimeError: no such kernel": 3,
    }
    assert capfd.readouterr().err.count("Traceback") == 2, "where it happened can be read"


@pytest.mark.parametrize("gives", [1.0, None])
def test_what_is_no_score_is_told(gives):
    odd = Raises()
    odd.gives = gives
    with pytest.raises(
        RewardError, match=f"'odd': expected one Score for each of 2 samples, got 2 of {type(gives).__name__}"
    ):
        scores(np.full((1, 2, 2), 200), np.zeros((1, 2), bool), {"odd": odd})
