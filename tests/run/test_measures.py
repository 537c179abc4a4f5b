"""Measurements of a set of pairs, and their flat names.

Why these cases: missing verdicts must not count; the interval must be over prompts, since images of one prompt are not
independent; what a file has must read as what was measured, also for rewards whose names look like other keys.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefgrpo.run.measures import (
    JUDGE,
    MIN_PROMPTS,
    Comparison,
    Estimate,
    Interval,
    Measure,
    Subject,
    compared,
    flat,
    interval,
    judges_of_step,
    keys_of,
    mean_of,
    quoted,
    read_comparison,
    read_measures,
    rewards_of_step,
    subject_of,
)

NAN = float("nan")


def test_means_leave_missing_ones_out_and_the_interval_is_over_prompts():
    """Ten images of a prompt that always wins count no more than one: the interval for 2 prompts is 0 … 1."""
    assert mean_of(np.array([1.0, NAN, 0.0])) == Estimate(0.5, 1 / 3)
    nothing = compared("x", [0, 1], [{Subject("w"): Measure(wins=NAN)}] * 2)
    assert nothing.metrics() == {"x/win_w": pytest.approx(NAN, nan_ok=True), "x/win_w_missing": 1.0}
    assert nothing.wins[Subject("w")].interval.conclusion == "inconclusive: no verdicts"
    assert interval(np.repeat([0, 1], 10), np.repeat([1.0, 0.0], 10)) == (0.0, 1.0, 2)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """200 simulated studies, 60 prompts × 4 correlated images: 95 % of the intervals contain the true rate."""
    rng, hits, n = np.random.default_rng(0), 0, 200
    for _ in range(n):
        skill = rng.beta(3, 2, size=60)  # mean 0.6
        values = (rng.random((60, 4)) < skill[:, None]).astype(float).ravel()
        low, high, _ = interval(np.repeat(np.arange(60), 4), values)
        hits += low <= 0.6 <= high
    assert 0.90 <= hits / n <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "prompts", "said"),
    [
        (0.51, 0.8, MIN_PROMPTS, "better"), (0.1, 0.49, MIN_PROMPTS, "worse"), (0.5, 0.9, MIN_PROMPTS, "contains"),
        (0.2, 0.5, 999, "contains"), (0.9, 1.0, MIN_PROMPTS - 1, "fewer than"), (np.nan, np.nan, 999, "no verdicts"),
    ],
)  # fmt: skip
def test_what_an_interval_says(low, high, prompts, said):
    found = Interval(low, high, prompts).conclusion
    assert said in found and (said in ("better", "worse")) != found.startswith("inconclusive")


def test_prompts_without_a_verdict_do_not_count_as_prompts():
    """One verdict among 40 prompts is no result, however clear it is."""
    values = np.where(np.arange(80) < 2, 1.0, np.nan)
    found = compared("dev", np.repeat(np.arange(40), 2), [{JUDGE: Measure(wins=value)} for value in values])
    metrics = found.metrics()
    assert metrics["dev/win_judge_low"] == 1.0 and metrics["dev/win_judge_prompts"] == 1
    assert "1.000 [1.000, 1.000] (97.5% missing)" in found.line(3)
    assert found.wins[JUDGE].interval.conclusion == f"inconclusive: fewer than {MIN_PROMPTS} prompts"


# ---- flat names -----------------------------------------------------------------------------------------------------


def test_the_keys_of_a_judge_a_reward_and_its_part():
    """Of two prompts with an image each, one of which lacks a verdict and a part."""
    pairs = [
        {
            JUDGE: Measure(wins=1.0, first=1.0, second=1.0),
            Subject("ocr"): Measure(3.0, 1.0, 1.0),
            Subject("ocr", "exact"): Measure(0.5, 0.25),
        },
        {JUDGE: Measure(wins=NAN, first=NAN, second=0.0), Subject("ocr"): Measure(1.0, 1.0, 0.5)},
    ]
    assert compared("dev", [0, 1], pairs).metrics() == {
        "dev/win_judge": 1.0, "dev/win_judge_missing": 0.5, "dev/win_judge_low": 1.0, "dev/win_judge_high": 1.0,
        "dev/win_judge_prompts": 1.0, "dev/win_judge_first": 1.0, "dev/win_judge_first_missing": 0.5,
        "dev/win_judge_second": 0.5,
        "dev/ocr": 2.0, "dev/ocr_low": 0.0, "dev/ocr_high": 2.0, "dev/ocr_prompts": 2.0, "dev/ocr_before": 1.0,
        "dev/win_ocr": 0.75, "dev/win_ocr_low": 0.5, "dev/win_ocr_high": 1.0,
        "dev/ocr.exact": 0.5, "dev/ocr.exact_missing": 0.5, "dev/ocr.exact_low": 0.25, "dev/ocr.exact_high": 0.25,
        "dev/ocr.exact_prompts": 1.0, "dev/ocr.exact_before": 0.25, "dev/ocr.exact_before_missing": 0.5,
    }  # fmt: skip


WORDS = ["ocr", "win", "first", "second", "before", "missing", "low", "prompts", "judge", "pairs", "std", "reward", "a"]
NAMES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).flatmap(
    lambda words: st.lists(st.sampled_from("_./\"'\n:"), min_size=2, max_size=2).map(
        lambda between: "".join(a + b for a, b in zip(words, [*between, ""], strict=False)).rstrip("_./\n:")
    )
)
ESTIMATES = st.builds(Estimate, st.floats(0, 1), st.sampled_from([0.0, 0.25]))
INTERVALS = st.builds(Interval, st.floats(0, 0.5), st.floats(0.5, 1), st.integers(1, 99))
WITH_INTERVAL = st.builds(replace, ESTIMATES, interval=INTERVALS)
JUDGED = st.builds(Measure, wins=WITH_INTERVAL, first=ESTIMATES, second=ESTIMATES)
VALUED = st.builds(Measure, WITH_INTERVAL, ESTIMATES, WITH_INTERVAL)
PARTS = st.dictionaries(NAMES, st.builds(Measure, WITH_INTERVAL, ESTIMATES), max_size=3)
REWARDS = st.dictionaries(NAMES, st.one_of(st.tuples(JUDGED, st.just({})), st.tuples(VALUED, PARTS)), max_size=5)


def stored(measure):
    """A measure as a row has it: the number of prompts of a win rate only if some are missing."""
    wins = measure.wins
    if wins is None or wins.missing:
        return measure
    return replace(measure, wins=replace(wins, interval=wins.interval._replace(prompts=None)))


@given(REWARDS, st.none() | JUDGED, st.none() | WITH_INTERVAL)
def test_what_is_written_is_read_whatever_rewards_and_parts_are_called(rewards, judge, accuracy):
    measures = {} if judge is None else {JUDGE: judge}
    for reward, (measure, parts) in rewards.items():
        measures[Subject(reward)] = measure
        measures |= {Subject(reward, part): of_part for part, of_part in parts.items()}
    right = None if accuracy is None else replace(accuracy, missing=0.0)
    one = Comparison("dev", measures, right, NAN if right is None else 0.5)
    row = json.loads(json.dumps(one.metrics()))
    found = read_comparison("dev", row | {"kind": "eval", "step": 3, "set": "dev", "time/eval": 1.0})
    assert found.measures == {subject: stored(measure) for subject, measure in measures.items()}
    assert found.accuracy == right and (right is None or found.margin == 0.5)
    assert found.metrics() == row
    assert {subject_of(quoted(name)) for name in rewards} == {Subject(name) for name in rewards}
    step = {f"reward/{quoted(name)}{end}" for name in rewards for end in ("", "_std", "/missing_rate")}
    assert rewards_of_step(step | {"reward/missing", "loss"}).keys() == rewards.keys()


def test_a_name_is_quoted_only_where_it_would_read_as_another():
    plain = ["ocr", "my/rewards.py:red", "tests.rewards.red", "first", "a_b", "winner", "pairs_of_words", "low.x"]
    assert [quoted(name) for name in plain] == plain
    for name in (
        "ocr_first",
        "win_x",
        "judge",
        "missing",
        "x_std",
        "a_before",
        "x_low",
        "win",
        "pairs",
        "a/missing_rate",
    ):
        assert quoted(name) == f'"{name}"'
    subjects = [Subject("a"), Subject("a.b"), Subject("a", "b"), Subject("a", "b.c"), Subject("a", "d"), JUDGE]
    assert list(keys_of(subjects).values()) == ["a", "a.b", 'a."b"', 'a."b.c"', "a.d", "judge"]
    assert keys_of([Subject("a", "b")]) == {Subject("a", "b"): "a.b"}, "without a reward a.b"


def test_what_is_no_number_is_unknown():
    row = {"x": None, "x_before": "slow", "win_x": 0.5, "win_x_low": True}
    (found,) = read_measures(row).values()
    assert flat({Subject("x"): found}) == {
        "x": pytest.approx(NAN, nan_ok=True), "x_before": pytest.approx(NAN, nan_ok=True), "win_x": 0.5,
    }  # fmt: skip
    assert read_measures({}) == {} and read_measures({"x_missing": None})[Subject("x")].now == Estimate()
    for torn in ('"x', 'a."', '"\\q"', '"a"b"'):
        assert read_measures({torn: 0.5}), "a row by other hands is no error"


def test_each_judge_of_a_step_has_its_keys_and_one_alone_those_of_all():
    assert judges_of_step(["judge/tie_rate", "judge/requests"]) == {"": "judge/"}
    several = ["judge/tie_rate", "judge/a/tie_rate", "judge/my/b/tie_rate", "judge/a/requests"]
    assert judges_of_step(several) == {"a": "judge/a/", "my/b": "judge/my/b/"}
