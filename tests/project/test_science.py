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


def write(folder, name, seed, accuracy, **changes):
    rows = [[10 * k, 448.0 * k, 5.0 * k, y, y + 0.1, 0.25 + 0.01 * k, 0.1] for k, y in enumerate(accuracy)]
    facts = {"arm": name, "seed": seed, "settings": science.ARMS[name].settings()} | changes
    text = json.dumps(facts | {"columns": science.MEASURED.names, "evaluations": rows})
    (folder / f"{name}_{seed}.json").write_text(text)


@pytest.mark.full
def test_a_run_of_the_world_words_counts_the_calls_of_its_simulated_judge(tmp_path):
    calls.train_words(calls.ARMS["words_grpo_k2"], {"seed": 0}, tmp_path / "run.json", 1, 1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["columns"][:2] == ["step", "calls"]
    assert [row[:2] for row in run["evaluations"]] == [[0, 0.0], [1, 6 * 8.0]]


def test_what_is_read_from_runs(tmp_path, monkeypatch):
    ends = {"ratings": (0.50, 0.54), "win_rates": (0.60, 0.65), "soft": (0.4,)}
    for name, own in ends.items():
        for seed, end in enumerate(own):
            write(tmp_path, name, seed, [0.4, 0.4, 0.45, 0.5, end])
    write(tmp_path, "ratings", 2, [0.4, 0.4, 0.45])  # not finished
    write(tmp_path, "win_rates", 2, [0.4] * 5, settings={"asks": 3})  # has other settings
    assert demo_runs.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4841), abs=1e-3), "t(2) = 4.303, s = 1"
    assert np.isnan(demo_runs.interval([1.0])[1])
    assert science.against("win_rates", "ratings", (0, 1, 2), "accuracy", tmp_path) == pytest.approx([0.1, 0.11])
    rows = science.table("a", (0, 1, 2), tmp_path)
    wanted = "| `win_rates`: win rates | 2 | 0.625 ± 0.318 | 0.725 ± 0.318 | 0.805 ± 0.318 | 0.080 ± 0.000 |"
    assert rows[3].startswith(wanted)
    assert "+0.105 ± 0.064" in rows[3], "expected paired differences, per seed"
    assert "seed 2 of `ratings`, `win_rates`." in science.missing("a", (0, 1, 2), tmp_path)
    assert len(science.table("b", (0,), tmp_path)) == 2 + 3, "arms without runs must be omitted"
    assert science.block("c", (0,), tmp_path) == [science.missing("c", (0,), tmp_path)], "omit empty tables"
    science.draw("a", (0, 1), tmp_path / "a.svg", tmp_path)
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    for seed in (5, 6):
        write(tmp_path, "ratings", seed, [0.4, 0.4, 0.4, 0.5, 0.52])
        write(tmp_path, "win_rates", seed, [0.4, 0.4, 0.4, 0.5, 0.99])
    same = [row for row in science.agreement((0, 1), (5, 6), tmp_path) if "accuracy" in row]
    assert [row.split(" | ")[0] for row in same] == ["| `ratings`", "| `win_rates`"]
    assert same[0].endswith("yes |") and same[1].endswith("no |")


def test_what_is_read_from_a_run_of_calls(tmp_path):
    """Evaluations every 10 steps, at 1000 calls each; goals are interpolated between evaluations."""
    columns = ("step", "calls", "seconds", "accuracy", "diversity")
    for seed, accuracy in enumerate([(0.4, 0.6, 0.8, 0.7, 0.9), (0.4, 0.6, 0.65, 0.6, 0.6)]):
        rows = [[20 * k, 1000.0 * k, 20.0 * k, y, 0.1] for k, y in enumerate(accuracy)]
        run = {"arm": "grpo_k4", "seed": seed, "columns": columns, "evaluations": rows}
        (tmp_path / f"grpo_k4_{seed}.json").write_text(json.dumps(run))
    up, flat = (calls.done("grpo_k4", seed, tmp_path) for seed in (0, 1))
    assert calls.reached(up, "calls", 0.7) == pytest.approx(1500) and calls.reached(flat, "calls", 0.7) is None
    assert calls.largest_fall(up) == pytest.approx(0.1)
    row = calls.table("scenes", tmp_path)[2]
    assert row.startswith(
        "| `grpo` | `k_regular(4)` | 16 | 2 | 80 | 1.5, 1 never | 2.0, 1 never | 3.8, 1 never | 32, 1 never |"
    ), row
    assert calls.progress("scenes", tmp_path) == "2 of 120 runs of the world `scenes` are done."


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
