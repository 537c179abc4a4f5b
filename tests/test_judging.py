"""From a recipe to rewards: which judge each asks, with which options, and what does not fit the run.

Why these cases: with several judged rewards the wrong template or server would be asked silently, and a reward that
cannot score what the run makes must be refused before the first image.
"""

from dataclasses import asdict

import pytest
from tiny_run import ALONE, settings, world

from prefgrpo.config.schema import ConfigError, differences, from_dict
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.verdict import PairJudge, Verdict
from prefgrpo.rewards import RewardSpecError, build
from prefgrpo.rewards.base import PointwiseReward, Score
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.run.judging import (
    check_inputs,
    http_config,
    judge_section,
    reward_options,
    shared,
    specs,
    training_scorer,
)

OTHER = f"{__name__}.Other"
EDIT = f"{__name__}.EditScore"


class Constant(PairJudge):
    streams = False

    def judge_group(self, prompt, media, pairs, source=()):
        return [Verdict(0.5) for _ in pairs]


class Other(VlmPairwise):
    template = "think"


class EditScore(PointwiseReward):
    takes = ("image", "video")
    needs_source = True
    meta_keys = ("tag",)

    def score(self, samples):
        return [Score(1.0) for _ in samples]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("judging"))


def config(place, **over):
    return from_dict(settings(place, "x", **over))


def test_each_judged_reward_asks_its_own_server_with_its_own_template(place):
    own = {"judge": {"endpoints": ["http://127.0.0.1:2"], "model": "b"}, "plan": "swiss(2)"}
    c = config(
        place,
        judge={"endpoints": ["http://127.0.0.1:1"], "model": "a", "template": "caption_match", "timeout_s": 9.0},
        reward={"spec": f'{{"vlm_pairwise": 1, "{OTHER}": 0.5}}', "options": {OTHER: own}},
    )
    judge = Constant()
    options = reward_options(c, specs(c)[0], c.reward.options, judge, ALONE)
    assert shared(c) == "vlm_pairwise" and options["vlm_pairwise"]["judge"] is judge
    assert options["vlm_pairwise"]["plan"] == "both_orders" and options[OTHER]["plan"] == "swiss(2)"
    asked = options[OTHER]["judge"]
    assert (asked["endpoints"], asked["model"], asked["template"], asked["timeout_s"]) == (
        ("http://127.0.0.1:2",),
        "b",
        "think",
        9.0,
    )
    alone = config(place, reward={"spec": OTHER})
    assert shared(alone) == OTHER
    assert http_config(judge_section(alone.judge, OTHER, {}), ALONE).template == "think"
    assert asdict(http_config(judge_section(c.judge, "vlm_pairwise", {}), ALONE))["template"] == "caption_match"


def test_options_are_checked_by_name(place):
    c = config(place, reward={"spec": OTHER, "options": {OTHER: {"judge": {"modle": "b"}}}})
    with pytest.raises(ConfigError, match=r"judge: unknown key\(s\) \['modle'\]"):
        reward_options(c, specs(c)[0], c.reward.options, None, ALONE)
    with pytest.raises(RewardSpecError, match=r"unknown reward 'jpeg_compresibility'.*did you mean"):
        build("jpeg_compressibility", {"jpeg_compresibility": {}})
    with pytest.raises(ConfigError, match=r"reward\.options\.clip"):
        config(place, reward={"options": {"clip": 3}})
    changed = differences(config(place), config(place, reward={"options": {"clip": {"device": "cpu"}}}))
    assert changed == {"reward.options.clip.device": (None, "cpu")}


def test_a_reward_that_does_not_fit_the_run_is_refused_with_all_reasons(place):
    c, rewards = config(place), build(f'["{EDIT}"]')
    plain = [Prompt(0, "a cat"), Prompt(1, "a dog", {"tag": "x"})]
    with pytest.raises(ConfigError) as told:
        check_inputs(c, "reward.spec", rewards, plain)
    assert "2 prompt(s) have no source image, the first: 'a cat'" in str(told.value)
    assert "needs the column 'tag', which 1 prompt(s) lack" in str(told.value)
    with pytest.raises(ConfigError, match="no source image"):
        training_scorer(config(place, reward={"spec": f'["{EDIT}"]'}), None, None, plain, ALONE)
