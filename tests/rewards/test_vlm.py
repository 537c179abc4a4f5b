"""Rewards that query a vision-language model, against a real HTTP server that decodes the images.

Why these cases: each formula is checked by hand or by a loop written here; a value that the answer does not state is
missing, never 0 or a mean; the same question about the same image is sent once; independent questions run concurrently.
"""

import itertools
import math

import pytest
from ranks import free_port
from reward_cases import clip, grid
from servers import JudgeServer, images, judge, speak, text_of
from world import grey

from prefgrpo.data.answer import Answer
from prefgrpo.judge.http import JudgeError
from prefgrpo.rewards import build, load_class
from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.scorer import Scorer

B = [40 / 255, 130 / 255, 250 / 255]


@pytest.fixture
def server():
    with JudgeServer() as running:
        running.answer = speak
        yield running


def samples(*levels, prompt="a cat", source=(), **meta):
    return [Sample(prompt, grey(level), source, meta) for level in levels]


def make(server, spec, **options):
    names = spec if isinstance(spec, list) else [spec]
    return build(names, {n: {"judge": judge(server), **options} for n in names})


def one(server, name, **options):
    return make(server, name, **options)[name]


def values(scores):
    return [s.value for s in scores]


def say(answer):
    return lambda bright, text: answer


S = 200 / 255
EDIT = "unifiedreward_edit_pointwise_"
FORMULAS = [
    ("unifiedreward_alignment", {}, lambda b: 1 + 4 * b),
    ("unifiedreward_style", {}, lambda b: 5 - 4 * b),
    ("unifiedreward_coherence", {}, lambda b: 1 + 2 * b),
    ("unifiedreward_sglang", {}, lambda b: (1 + 4 * b) / 5),
    ("qwenvl", {}, lambda b: (1 + round(4 * b)) / 5),
    (EDIT + "instruction_following", {"weights": {"success": 3}}, lambda b: 25 * (3 * b + S) / 4),
    (EDIT + "image_quality", {"weights": {"artifacts": 0}}, lambda b: 25 * b),
    ("consistency_for_editing", {}, lambda b: math.sqrt((1 - abs(S - b)) * b)),
]


@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS)
def test_one_by_one(server, name, options, formula):
    """Three grey images, edits of one source; the prompt asks for a grid and for a change."""
    group = samples(40, 130, 250, source=(grey(200),), prompt="a 2x3 grid, made dark")
    assert values(one(server, name, **options).score(group)) == pytest.approx([formula(b) for b in B], abs=0.01)
    needs = load_class(name).needs_source
    assert {len(images(r)) for r in server.requests if "naturalness" not in text_of(r)} <= {1 + needs}
    if needs:
        assert "source image" in one(server, name, **options).score(samples(40))[0].reason


NUMBERS = ["I cannot say.", "Final Score: 1-5", "Final Score: 6", "<Score>N</Score>", ""]
PAIRS = ['{"score": [20]}', '{"score": [-1, 3]}', "20, 3", '{"score": "20, 3"}']
UNREADABLE = [("unifiedreward_sglang", NUMBERS), ("qwenvl", NUMBERS), (EDIT + "image_quality", PAIRS),
              ("consistency_score", [{"Hm": 1.0}])]  # fmt: skip


@pytest.mark.parametrize(("name", "answers"), UNREADABLE)
def test_what_the_answer_does_not_state_is_missing(server, name, answers):
    reward = one(server, name)
    for answer in answers:
        server.answer = say(answer)
        (score,) = reward.score(samples(40, prompt="a 2x2 grid", source=(grey(200),)))
        assert score.value is None and score.reason, answer


def test_three_axes_of_unifiedreward_cost_one_request_per_image(server):
    axes = ["unifiedreward_alignment", "unifiedreward_style", "unifiedreward_coherence"]
    server.delay_s = 0.05
    with Scorer(make(server, axes), 3) as scorer:
        scorer.begin(0, [0])
        for member, sample in enumerate(samples(40, 130, 250)):
            scorer.add(0, member, sample)
        found = scorer.finish()
    assert len(server.requests) == 3
    parts = found.scores[axes[0]][0][1].parts
    assert parts == pytest.approx({"alignment": 3.04, "style": 2.96, "coherence": 2.02})
    server.answer = say("Alignment Score (1-5): 3\nCoherence Score (1-5): 7")
    for name, reward in make(server, axes).items():
        (score,) = reward.score(samples(41))
        axis = name.removeprefix("unifiedreward_")
        assert score.value == 3 if axis == "alignment" else f"no readable {axis}" in score.reason


def test_rewards_of_edits_refuse_odd_weights(server):
    names = [EDIT + "instruction_following", EDIT + "image_quality"]
    group = samples(40, 250, source=(grey(200),), prompt="make it dark")
    scores = [reward.score(group) for reward in make(server, names).values()]
    assert len(server.requests) == 4, "two questions × two edits"
    assert sorted("make it dark" in text_of(r) for r in server.requests) == [False, False, True, True]
    assert scores[1][0].parts == pytest.approx({"naturalness": 25 * B[0], "artifacts": 25 - 25 * B[0]}, abs=0.01)
    for weights in ({"beauty": 1}, {"naturalness": 0, "artifacts": 0}):
        with pytest.raises(RewardError, match="not all 0"):
            one(server, names[1], weights=weights)


def pairs_mean(levels, scale=1.0):
    found = [scale * (1 - abs(a - b) / 255) for a, b in itertools.combinations(levels, 2)]
    return sum(min(max(p, 0.001), 0.999) for p in found) / len(found)


def test_consistency_is_the_mean_over_pairs_of_cells(server):
    levels = (40, 60, 90, 130)
    criteria = {"Identity": {"a": "same cat"}, "Style": {"a": "same style", "b": "same light"}}
    sample = Sample("A 2x2 grid of cats.", grid(*levels), (), {"criteria": criteria})
    scores = one(server, "consistency_score").score(
        [sample, Sample("one cat", grey(40)), Sample("a 64x64 grid", grey(40))]
    )
    assert scores[0].value == pytest.approx(pairs_mean(levels), abs=1e-6)
    assert len(server.requests) == 6, "criteria with equal questions must share a request per pair"
    assert all(len(images(r)) == 2 and r["max_tokens"] == 1 for r in server.requests)
    assert [s.value for s in scores[1:]] == [None, None] and "no grid" in scores[1].reason


def test_consistency_by_criteria_averages_dimensions_of_criteria_of_pairs(server):
    levels = (40, 60, 90, 130, 200, 220)
    criteria = {"Identity": {"a": "strict"}, "Style": {"a": "loose", "b": "strict"}}
    sample = Sample("A 3x2 grid.", grid(*levels), (), {"criteria": criteria})
    reward = one(server, "consistency_score", template="consistency_criterion")
    loose, strict = pairs_mean(levels), pairs_mean(levels, 0.5)
    score = reward.score([sample])[0]
    assert score.parts == pytest.approx({"Identity": strict, "Style": (loose + strict) / 2}, abs=1e-6)
    assert score.value == pytest.approx((strict + (loose + strict) / 2) / 2, abs=1e-6)
    assert len(server.requests) == 2 * 15, "dimensions with equal texts must share a request per pair"
    assert sum(p["image_url"] is not None for r in server.requests for p in images(r)) == 6, "a cell is sent again"
    for meta in ({}, {"criteria": "x"}, {"criteria": {}}, {"criteria": {"Style": 3}}, {"grid": "axb"}):
        score = reward.score([Sample("A 3x2 grid.", grid(*levels), (), meta)])[0]
        assert score.value is None and ("criteria" in score.reason or "grid" in score.reason)


def test_no_further_question_is_asked_about_an_image_that_is_missing(server):
    server.answer = lambda bright, text: {"Yes": 1.0} if "first" in text else "no probabilities"
    asked = [["the first?", "Yes"], ["the second?", "Yes"], ["the third?", "Yes"]]
    score = one(server, "soft_tifa").score([Sample("p", grey(40), meta={"vqa_list": asked})])[0]
    assert score.value is None and score.reason and len(server.requests) == 2


def test_a_pair_that_fails_counts_for_nothing(server):
    levels = (40, 60, 90, 130)
    server.answer = lambda b, text: {"Hm": 1.0} if max(b) > 0.5 else speak(b, "Yes or No Theme:")
    score = one(server, "consistency_score").score([Sample("2x2 grid", grid(*levels))])[0]
    assert score.value == pytest.approx(pairs_mean(levels[:3]), abs=1e-6)


def test_consistency_for_editing_asks_both_at_once(server):
    server.delay_s = 0.2
    group = samples(40, 250, source=(grey(200), grey(10)), prompt="brighter")
    server.version = "0.31.2"  # takes no ids, with which requests wait for the first upload
    asks = {"judge": judge(server)}
    scores = build("consistency_for_editing", {"consistency_for_editing": asks})["consistency_for_editing"].score(group)
    assert server.peak == 4
    parts = [{"consistency": 1 - abs(S - b), "following": b} for b in (B[0], B[2])]
    assert [s.parts for s in scores] == [pytest.approx(p, abs=1e-4) for p in parts]
    assert all(len(images(r)) == 3 for r in server.requests), "expected both sources and the edit"


def win_rates(levels, first_wins):
    found = []
    for i, a in enumerate(levels):
        won = [first_wins(a, b) for j, b in enumerate(levels) if i != j]
        found.append(sum(won) / len(won))
    return found


@pytest.mark.parametrize("media", [grey, clip], ids=["image", "video"])
@pytest.mark.parametrize("name", ["unifiedreward_think", "unifiedreward_flex"])
def test_judges_of_pairs_see_images_and_eight_even_frames(server, name, media):
    levels = (40, 130, 200, 90)
    group = [Sample("a cat", media(level)) for level in levels]
    found = one(server, name).score(group)
    rate = win_rates(levels, lambda a, b: float(a > b))
    if name.endswith("flex"):
        overall = rate
        parts = found[0].parts
        want = []
        for r in overall:  # the three categories: one agrees with the verdict, one contradicts it, one ties
            categories = (1.0 * r + 0.7 * (1 - r) + 0.7 * 0.5) / (1.0 + 0.7 + 0.7)
            want.append((0.3 * r + 0.7 * categories) / (0.3 + 0.7))
        rate = want
        assert "category/mood" not in parts and parts["overall"] == overall[0]
        assert parts["category/alignment"] == overall[0] and len([p for p in parts if p.startswith("category/")]) == 3
    assert values(found) == pytest.approx(rate)
    pair = [r for r in server.requests if "a cat" in text_of(r)]
    assert len(pair) == 12 and {len(images(r)) for r in pair} == {2 if media is grey else 16}
    assert all(("Video 1" in text_of(r)) == (media is clip) for r in pair)


def test_flex_weights(server):
    levels = (40, 130, 200)
    group = [Sample("a cat", grey(level)) for level in levels]
    rate = win_rates(levels, lambda a, b: float(a > b))
    only = one(server, "unifiedreward_flex", overall_weight=0, category_weights=[0, 1, 0]).score(group)
    assert values(only) == pytest.approx([1 - r for r in rate])
    none = one(server, "unifiedreward_flex", category_weight=0).score(group)
    assert values(none) == pytest.approx(rate)
    with pytest.raises(RewardError, match="overall_weight"):
        one(server, "unifiedreward_flex", overall_weight=0, category_weight=0)


def test_flex_categories_by_name_whatever_their_numbering(server):
    said = iter(["A. Look", "look", "1) LOOK ", "Category B: look", "c. look", "Look"])
    server.answer = lambda b, text: (
        f'{{"winner": "tie", "categories": [{{"name": "{next(said)}", "cat_winner": "Image {1 if b[0] > b[1] else 2}"}}'
        ', {"name": "x", "cat_winner": 7}]}'
    )
    reward = one(server, "unifiedreward_flex")
    found = reward.score([Sample("a cat", grey(level)) for level in (40, 130, 200)])
    assert [s.parts for s in found] == [{"overall": 0.5, "category/look": r, "categories": r} for r in (0.0, 0.5, 1.0)]
    said = [({"look": 1.0, "light": 1.0}, (0, 1)), ({"light": 1.0}, (1, 0))]  # the second answer lacks a category
    scores = reward.tally(2, {pair: Answer(1.0, parts=parts) for parts, pair in said}).members
    assert [s.parts["category/light"] for s in scores] == [0.5, 0.5], "its other category counts"


def test_edit_pairwise_shows_the_source(server):
    levels, source = (40, 130, 250), 150
    group = [Sample("less red", grey(level), (grey(source),)) for level in levels]
    found = one(server, "unifiedreward_edit_pairwise", plan="round_robin").score(group)
    want = win_rates(levels, lambda a, b: float(abs(a - source) < abs(b - source)))
    assert values(found) == pytest.approx(want)
    pair = [r for r in server.requests if "less red" in text_of(r)]
    assert len(pair) == 3 and {len(images(r)) for r in pair} == {3}
    assert all(round(255 * server.media[images(r)[0]["uuid"]]) == source for r in pair)
    alone = one(server, "unifiedreward_edit_pairwise").score(samples(40, 130))
    assert {"needs a source image" in s.reason for s in alone} == {True}


def test_what_does_not_fit_is_refused(server, tmp_path):
    for name in ("unifiedreward_style", "unifiedreward_think"):
        with pytest.raises(JudgeError, match="not reachable"):
            build(name, {name: {"judge": {"endpoints": [f"http://127.0.0.1:{free_port()}"], "deadline_s": 0.1}}})
    with pytest.raises(JudgeError, match="which a judge in this process does not write"):
        build("qwenvl", {"qwenvl": {"judge": {"endpoints": [], "model": "x"}}})
    with pytest.raises(JudgeError, match=r"unknown marker \{source\}"):
        one(server, "qwenvl", template="edit_done")
    path = tmp_path / "t.yaml"
    path.write_text("user: '{prompt}{media_1}'\nanswer: scores\nscores: {Beauty: [0, 1]}\npattern: '{name}: {value}'")
    with pytest.raises(RewardError, match="asks for beauty: expected weights of these"):
        one(server, "unifiedreward_alignment", template=str(path))
    assert one(server, "unifiedreward_sglang", template=str(path)).question.name == str(path)
