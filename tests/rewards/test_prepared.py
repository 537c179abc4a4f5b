"""The options `size` and `jpeg`, which every reward takes.

Why these cases: what was not processed would be scored without a complaint, so the rewards here answer with what they
get. Pairs are processed as single samples are, in process, streamed and behind HTTP.
"""

import threading

import numpy as np
import pytest
from servers import JudgeServer, images, serving
from world import noise

from prefgrpo.data.answer import Answer
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.prepared import PreprocessedReward
from prefgrpo.rewards.scorer import Scorer
from tests.rewards.test_scorer import LEVELS, level, run, sample

WIDER = f"{__name__}:wider"


def wider(prompt, image_a, image_b):
    """P(image_a is better) from the sides of both images."""
    return image_a.shape[0] / (image_a.shape[0] + 3 * image_b.shape[0])


class Echo(Reward):
    """Answers at once with the size and the level of what it gets."""

    streams = True

    async def ask_one(self, *samples):
        (media,) = [sample.media for sample in samples]
        return Answer(float(level(media)), parts={"side": float(len(media.pixels))})


def test_preprocessing_does_not_hold_up_the_rollout(monkeypatch):
    go = threading.Event()
    resize = PreprocessedReward._pixels
    monkeypatch.setattr(PreprocessedReward, "_pixels", lambda self, image: go.wait(60) and resize(self, image))
    reward = PreprocessedReward(Echo, size=4)
    answers = [loop_thread().submit(reward.answer(sample(k))) for k in LEVELS]
    assert not any(a.done() for a in answers)
    go.set()
    assert [a.result(60) for a in answers] == [Answer(float(k), parts={"side": 4.0}) for k in LEVELS]
    monkeypatch.setattr(PreprocessedReward, "_pixels", lambda self, image: (_ for _ in ()).throw(OSError("too large")))
    result = run(Scorer({"echo": PreprocessedReward(Echo, jpeg=50)}, 4), LEVELS, groups=(7,))
    assert result.reasons == {"echo: the reward raised OSError: too large": 4}


@pytest.mark.parametrize("place", ["in process", "size here", "size there"])
def test_both_images_of_a_pair_are_resized(place):
    """Unequal sides give other win rates than equal ones; the client's and the server's `size` are the same."""
    given = [Sample("p", noise(0, 16, 16)), Sample("p", noise(1, 32, 32))]
    (plain,) = build([WIDER], {WIDER: {"plan": "both_orders"}}).values()
    unequal = [answer.value for answer in plain.score(given)]
    if place == "in process":
        found = build([WIDER], {WIDER: {"size": 8}})[WIDER].score(given)
    else:
        there = {"size": 8} if place == "size there" else {}
        here = {"size": 8} if place == "size here" else {}
        with serving(WIDER, there) as url:
            found = build([WIDER], {WIDER: {"url": url} | here})[WIDER].score(given)
    assert [answer.value for answer in found] == [0.5, 0.5] != unequal


def test_a_judge_of_pairs_sees_the_frames_that_it_asks_for_resized():
    given = [Sample("p", noise(k, 40, 48, frames=20)) for k in range(2)]
    with JudgeServer() as server:
        options = {"judge": {"endpoints": [server.url], "image_format": "png"}, "frames": 3, "size": 16, "jpeg": 75}
        (reward,) = build(["vlm_pairwise"], {"vlm_pairwise": options}).values()
        assert (reward.frames, reward.streams, reward.compares, reward.judged) == (3, True, True, True)
        assert reward.is_win_rate, "the update may use its wins and counts"
        server.requests.clear()
        result = run_pair(reward, given)
        assert {len(images(request)) for request in server.requests} == {6} and len(server.media) == 6
    assert result.metrics["judge/failures"] == 0 and np.isfinite(result.values["r"]).all()


def run_pair(reward, given):
    scorer = Scorer({"r": reward}, 2, deadline_s=60)
    scorer.begin(0, [0])
    for member, one in enumerate(given):
        scorer.add(0, member, one)
    return scorer.finish()
