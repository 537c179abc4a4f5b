"""Eight ranks send one server all questions of a shipped recipe's step at once: none is lost and no answer is wasted.

The time limits of the recipes are checked for a judge of 8 B parameters, whose tokens per second are shared among the
answers being written.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from judge_server import JudgeServer
from tiny_media import noise

from prefgrpo.config.loading import load
from prefgrpo.judge import http
from prefgrpo.judge.http import HttpJudge
from prefgrpo.judge.template import load_template
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, load_class
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.run.judging import judge_config

RANKS, TOKENS = 8, 1500
CATEGORIES = [
    {"name": name, "analysis": "", "cat_winner": "Image 1"} for name in ("Alignment", "Quality", "Aesthetics")
]
SAYS = {
    "think": "<think>so</think><answer>Image 1 is better</answer>",
    "flex": json.dumps({"categories": CATEGORIES, "reason": "", "winner": "Image 1"}),
}


@pytest.mark.parametrize(("recipe", "rate"), [("lora_think_flux", 2800), ("lora_flex_flux2_klein", 4700)])
def test_a_loaded_judge_of_eight_ranks_loses_nothing(recipe, rate):
    """With the recipe's own values, as after an instantaneous rollout. rate: tokens per second of the judge."""
    config = load(f"scripts/unifiedreward/{recipe}.yaml")
    name, rollout, section = config.reward.spec.split(":")[0], config.rollout, config.judge
    template, scorers = load_class(name).template, []
    with JudgeServer(delay_s=0.25) as server:
        server.answer = lambda bright, text: SAYS[template]
        for rank in range(RANKS):
            own = judge_config(config, name, {}, World(rank, RANKS, torch.device("cpu")))
            assert own.template == template
            http._clients.clear()  # ranks are separate processes and share no client
            judge = HttpJudge(replace(own, endpoints=(server.url,), model=server.model))
            reward = build(name, {name: {"judge": judge, "plan": section.plan}})
            scorers.append(Scorer(reward, rollout.group_size, section.deadline_s, config.seed))
        for rank, scorer in enumerate(scorers):
            groups = range(rank, rollout.prompts_per_step, RANKS)
            scorer.begin(0, groups)
            for group in groups:
                for member in range(rollout.group_size):
                    scorer.add(group, member, Sample("a red circle", noise(100 * group + member, 16, 16)))
        found = [scorer.finish() for scorer in scorers]
    asked = rollout.prompts_per_step * rollout.group_size * (rollout.group_size - 1) // 2
    assert sum(f.metrics["judge/requests"] for f in found) == len(server.requests) == asked
    assert sum(f.metrics["judge/failures"] for f in found) == 0
    assert not any(np.isnan(f.values[name]).any() for f in found)
    assert all(f.metrics["judge/wasted_share"] == 0 for f in found)
    assert server.peak == section.concurrency, "one limit for all ranks together, which keeps the server busy"
    assert section.concurrency * TOKENS / rate < (section.timeout_s or load_template(template).timeout_s)
    assert asked * TOKENS / rate < min(scorer.deadline_s for scorer in scorers)
