"""The metrics of a step's rewards against plain NumPy, and the targets of several processes against those of one.

Why these cases: a metric that counts missing rewards as zero, or those of one process only, misleads whoever tunes the
run.
"""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config, JudgeConfig, SamplingConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.metric import Metric
from prefgrpo.parallel.world import World
from prefgrpo.rewards.log import judge_metrics
from prefgrpo.rewards.pairs import both_orders, pair_table, rate_groups
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log
from prefgrpo.run.targets import (
    RewardsMissing,
    StepTargets,
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


@dataclass(frozen=True)
class Share(World):
    """One of several processes, which are threads."""

    met: threading.Barrier = field(kw_only=True)
    found: tuple[list[object], ...] = field(kw_only=True)

    def gather_items(self, mine):
        self.found[self.rank][:] = mine
        self.met.wait(30)
        return [item for of_share in self.found for item in of_share]


def judged_groups(groups, size=3):
    """The scores of these groups, of which odd ones lack half of their answers, under a judge and a grade."""
    answers = []
    for group in groups:
        p = np.random.default_rng(group).uniform(size=(size, size))
        lost = {pair for k, pair in enumerate(both_orders(size, 0)) if group % 2 and k % 2}
        answers.append({pair: Answer(None if pair in lost else p[pair]) for pair in both_orders(size, 0)})
    p = np.stack([pair_table(size, ((pair, answer.value) for pair, answer in of.items())) for of in answers])
    rates, wins, counts = rate_groups(p)
    grades = np.array([[group / 10 + member for member in range(size)] for group in groups])
    values = {"judge": rates, "grade": grades}
    return StepScores({}, values, {}, {"judge": answers}, {"judge": np.stack([wins, counts], 1)}, {}, {})


@pytest.mark.parametrize("size", [2, 4])
def test_targets_and_shares_are_those_of_all_processes(size, tmp_path):
    """The first one has only groups whose answers are complete."""
    names = {"judge": 0.7, "grade": 0.3}
    config = Config(
        rewards=tuple(RewardEntry(name, weight=weight) for name, weight in names.items()),
        rollout=SamplingConfig(group_size=3, prompts_per_step=6),
        judge=JudgeConfig(max_missing=0.9),
    )
    rewards = {name: SimpleNamespace(part_weights={}, is_win_rate=name == "judge") for name in names}
    log = Log(RunFolder(tmp_path), 1, 0, active=False)

    def computed(world):
        groups = list(world.slots(6))
        targets = StepTargets(config, rewards, world, log)
        return targets.compute(SimpleNamespace(step=0), judged_groups(groups), np.array(groups, np.float64))

    cpu = torch.device("cpu")
    want, metrics = computed(World(0, 1, cpu))
    assert metrics["judge/missing"] == 0.25
    shared = {"met": threading.Barrier(size), "found": tuple([] for _ in range(size))}
    with ThreadPoolExecutor(size) as pool:
        processes = list(pool.map(computed, [Share(rank, size, cpu, **shared) for rank in range(size)]))
    for targets, seen in processes:
        assert seen == metrics
        for mine, whole in zip(targets, want, strict=True):
            assert (mine is None and whole is None) or torch.equal(mine, whole)


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
