"""`make science`: the simulated judge behaves as documented, the arms of an experiment cost the same and differ in one
setting, and the error bars are Student's t intervals.

Ground truth is checked on scenes that the demo world renders, intervals against textbook values.
"""

import json

import numpy as np
import pytest
import torch

from benchmarks.experiments import calls, demo_runs, science
from benchmarks.experiments.simulated_judge import (
    Ratings,
    SimulatedJudge,
    WinRates,
    WordsJudge,
    brightness,
    truth,
)
from prefgrpo.config.loading import load
from prefgrpo.data.media import Media
from prefgrpo.objectives import OBJECTIVES
from prefgrpo.rewards.base import Sample
from prefgrpo.tiny.scenes import COMBOS, caption, hits, render
from scripts.demo_world import text

CAPTIONS = [caption(combo) for combo in COMBOS]


def drawn(count=None):
    pictures = render(COMBOS[:count], torch.Generator().manual_seed(0))
    return list((pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()), CAPTIONS[:count]


def group(size=8):
    """Images of different scenes, all with the first one's caption."""
    images, captions = drawn(size)
    return [Sample(captions[0], Media(image)) for image in images]


def test_truth_is_that_of_the_world():
    images, captions = drawn()
    shifted = captions[1:] + captions[:1]
    right, wrong = truth(images, captions), truth(images, shifted)
    assert min(right) > 0.8 and np.mean(right) > 0.95
    tensors = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    share = hits(tensors, shifted).float().mean(1).numpy()
    assert np.abs(np.array(wrong) - share).max() < 0.25 and np.abs(np.array(wrong) - share).mean() < 0.05
    assert max(truth([np.zeros((32, 32, 3), np.uint8)], captions[:1])) < 0.05, "a black image"


def test_the_flaw_is_brightness_and_noise_is_addressed():
    images, captions = drawn(8)
    flawed = SimulatedJudge(flaw=2.0).opinion(images, captions) - SimulatedJudge().opinion(images, captions)
    assert flawed == pytest.approx(2 * (np.array(brightness(images, captions)) - 0.25))
    ways = [(1, 0), (0, 1), (1, 0)]
    members = [Sample(captions[0], one.media) for one in group()]
    pairs = [(members[i], members[j]) for i, j in ways]
    ask = lambda judge: [answer.value for answer in WinRates(judge).ask(pairs)]  # noqa: E731
    logits = lambda judge: [judge.temperature * np.log(p / (1 - p)) for p in ask(judge)]  # noqa: E731
    again = ask(SimulatedJudge(noise=1.0, temperature=1.0))
    assert again == ask(SimulatedJudge(noise=1.0, temperature=1.0)), "equal questions, unequal answers"
    assert again[0] == again[2] != pytest.approx(1 - again[1]), "noise must depend on the order"
    biased, fair = (logits(SimulatedJudge(noise=0, bias=b, temperature=1.0)) for b in (0.3, 0))
    assert np.array(biased) - fair == pytest.approx(0.3) and fair[0] == pytest.approx(-fair[1])


def test_ratings_are_unbiased_whole_numbers():
    sharp, rough = (Ratings(SimulatedJudge(noise=noise), asks) for noise, asks in ((0.0, 1), (0.3, 200)))
    exact = 3 + 5 * SimulatedJudge().opinion([s.media.pixels for s in group()], [CAPTIONS[0]] * 8)
    assert [s.value for s in sharp.score(group())] == pytest.approx(np.round(exact))
    assert [s.value for s in rough.score(group())] == pytest.approx(exact, abs=0.4)


@pytest.mark.parametrize("key", "abcd")
def test_arms_of_an_experiment_have_one_judge_and_as_many_calls(key):
    arms = [science.ARMS[name] for name in science.EXPERIMENTS[key].arms]
    assert len({json.dumps(dict(arm.judge)) for arm in arms}) == 1
    asked = set()
    for arm in arms:
        judge = SimulatedJudge(**arm.judge)
        reward = Ratings(judge, arm.asks) if arm.asks else WinRates(judge, **arm.pairs)
        scores = reward.score(group())
        assert all(score.value is not None for score in scores)
        asked.add(judge.calls)
    assert asked == {{"a": 56, "b": 56, "c": 24, "d": 16}[key]}


@pytest.mark.full
def test_a_run_of_the_world_words_counts_the_calls_of_its_simulated_judge(tmp_path):
    calls.train_words(calls.ARMS["words_grpo_k2"], {"seed": 0}, tmp_path / "run.json", 1, 1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["columns"][:2] == ["step", "calls"]
    assert [row[:2] for row in run["evaluations"]] == [[0, 0.0], [1, 6 * 8.0]]


def test_error_bars_and_the_calls_that_reach_a_goal():
    """A goal lies between two evaluations; every number of the pages is rendered again in test_benchmarks."""
    assert demo_runs.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4841), abs=1e-3), "t(2) = 4.303, s = 1"
    assert np.isnan(demo_runs.interval([1.0])[1])
    columns = ("step", "calls", "seconds", "accuracy", "diversity")
    rows = [[20 * k, 1000.0 * k, 20.0 * k, y, 0.1] for k, y in enumerate((0.4, 0.6, 0.8, 0.7, 0.9))]
    run = {"columns": columns, "evaluations": rows}
    assert calls.reached(run, "calls", 0.7) == pytest.approx(1500) and calls.reached(run, "calls", 0.95) is None
    assert calls.largest_fall(run) == pytest.approx(0.1)


def test_arms_of_calls():
    assert {arm.recipe for arm in calls.ARMS.values()} == {*OBJECTIVES, "few_calls_grpo"}
    assert all(load(demo_runs.recipe(name)).train.objective == name for name in OBJECTIVES)
    assert [calls.calls_per_group(calls.ARMS[f"grpo_{plan}"]) for plan in ("both_orders", "k4", "k1")] == [56, 16, 4]
    # 8 denoising steps; a window of 3 replayed, or 2 draws of the policy and of its anchor
    assert [calls.forwards_per_image(calls.ARMS[f"{name}_k2"]) for name in ("grpo", "soft_dpo", "nft")] == [11, 12, 12]
    then = calls.ARMS["few_calls_grpo"]
    assert calls.config(then.after).train.objective == "soft_dpo" and calls.config(then).train.objective == "grpo"
    assert then.total == 200 and calls.forwards(then, 70) == 48 * (60 * 12 + 10 * 11)
    words = calls.config(calls.ARMS["words_soft_dpo_k2"])
    assert (words.train.objective, words.train.objective_options["beta"], words.rollout.width) == ("soft_dpo", 5.0, 64)


def test_the_judge_of_words_counts_letters():
    images, codes = text.draw("dev", 8, torch.Generator().manual_seed(0))
    pixels = list((images.permute(0, 2, 3, 1) * 255).round().byte().numpy())
    right = WordsJudge().opinion(pixels, [text.prompt(word) for word in text.decode(codes)])
    assert right.tolist() == [1.0] * 8
    assert WordsJudge().opinion(pixels, [text.prompt("BEN")] * 8).mean() < 0.5
