"""From a recipe to rewards: which judge each reward queries, with which options, and which rewards a run refuses.

Why these cases: with several judged rewards, a wrong template or server would go unnoticed, and a reward that cannot
score the run's samples must be refused before the first image.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import ALONE, settings

import prefgrpo
from prefgrpo.config.loading import differences, from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.verdict import PairJudge, Verdict
from prefgrpo.parallel.world import World
from prefgrpo.rewards import RewardSpecError, build, judges
from prefgrpo.rewards.base import PointwiseReward, Score
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.run.judging import check_inputs, connect, judge_config, reward_options, shared, specs, training_scorer

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


def config(place, **over):
    return from_dict(settings(place, "x", **over))


def test_each_judged_reward_asks_its_own_server_with_its_own_template(place):
    own = {"judge": {"endpoints": ["http://127.0.0.1:2"], "model": "b"}, "plan": "k_regular(2)"}
    section = {"endpoints": ["http://127.0.0.1:1"], "model": "a", "template": "caption_match", "timeout_s": 9.0}
    spec = {"spec": f'{{"vlm_pairwise": 1, "{OTHER}": 0.5}}', "options": {OTHER: own}}
    c, judge = config(place, judge=section, reward=spec), Constant()
    options = reward_options(c, specs(c)[0], c.reward.options, judge, ALONE)
    assert shared(c) == "vlm_pairwise" and options["vlm_pairwise"]["judge"] is judge
    assert options["vlm_pairwise"]["plan"] == "both_orders" and options[OTHER]["plan"] == "k_regular(2)"
    asked = {"endpoints": ("http://127.0.0.1:2",), "model": "b", "template": "think"}
    assert options[OTHER]["judge"] == replace(c.judge, **asked), "the judge section, with the reward's own options"
    assert judge_config(c, "vlm_pairwise", {}, ALONE) == c.judge
    alone = config(place, reward={"spec": OTHER})
    assert shared(alone) == OTHER
    assert judge_config(alone, OTHER, {}, ALONE) == replace(alone.judge, template="think")
    assert judge_config(alone, "vlm_pairwise", {}, ALONE).template == "compare"


@pytest.mark.parametrize(("limit", "ranks"), [(64, 8), (10, 4), (3, 8)])
def test_ranks_share_the_limit(place, limit, ranks):
    def shares(prompts):
        c = config(place, judge={"concurrency": limit}, rollout={"prompts_per_step": prompts})
        judges = [judge_config(c, "vlm_pairwise", {}, World(k, ranks, torch.device("cpu"))) for k in range(ranks)]
        return [judge.concurrency for judge in judges]

    for asked in (shares(42), shares(2)[:2]):
        assert min(asked) >= 1 and max(asked) - min(asked) <= 1 and sum(asked) == max(limit, len(asked))
    assert shares(2)[2:] == [1] * (ranks - 2), "only two ranks have a group to judge"


def test_options_are_checked_by_name_and_type(place):
    for own, message in (
        ({"modle": "b"}, rf"reward\.options\.{OTHER}\.judge\.modle: unknown key; did you mean 'judge\.model'"),
        ({"endpoints": "http://h"}, rf"reward\.options\.{OTHER}\.judge\.endpoints: expected a list"),
        ({"backend": "local", "model": "m"}, "expected backend http, got local"),
    ):
        c = config(place, reward={"spec": OTHER, "options": {OTHER: {"judge": own}}})
        with pytest.raises(ConfigError, match=message):
            reward_options(c, specs(c)[0], c.reward.options, None, ALONE)
    with pytest.raises(ConfigError, match=r"judge\.modle: unknown key"):
        build("vlm_pairwise", {"vlm_pairwise": {"judge": {"modle": "b"}}})["vlm_pairwise"]
    with pytest.raises(RewardSpecError, match=r"unknown reward 'jpeg_compresibility'.*did you mean"):
        build("jpeg_compressibility", {"jpeg_compresibility": {}})
    changed = differences(config(place), config(place, reward={"options": {"clip": {"device": "cpu"}}}))
    assert changed == {"reward.options.clip.device": (None, "cpu")}


def test_a_local_judge_keeps_to_the_least_label_mass_of_its_configuration(place):
    local = {"backend": "local", "model": str(Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge")}
    local |= {"template": "caption_match", "min_label_mass": 0.5}
    assert connect(config(place, judge=local).judge, False, ALONE)[0].min_label_mass == 0.5
    assert judges.open_judge(local).min_label_mass == 0.5


def test_a_reward_that_does_not_fit_the_run_is_refused_with_all_reasons(place):
    c, edits = config(place), build(f'["{EDIT}"]')
    plain = [Prompt(0, "a cat"), Prompt(1, "a dog", {"tag": "x"})]
    with pytest.raises(ConfigError) as told:
        check_inputs(c, "reward.spec", edits, plain)
    assert "2 prompt(s) have no source image, the first: 'a cat'" in str(told.value)
    assert "needs the column 'tag', which 1 prompt(s) lack, the first: 'a cat' (its columns: none)" in str(told.value)
    with pytest.raises(ConfigError, match="no source image"):
        training_scorer(config(place, reward={"spec": f'["{EDIT}"]'}), None, None, plain, ALONE)
