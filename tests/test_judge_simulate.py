"""The simulation behind `prefgrpo judge plan`.

Oracles: rank correlations counted pair by pair in a plain loop; the moments of the simulated judge; replaying a log
gives the numbers of the verdicts it contains. A further test shows that sparse plans pay off.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.commands.cli import main
from prefgrpo.judge.simulate import (
    Groups,
    JudgeModel,
    best,
    cheapest,
    fit_judge,
    load_judgements,
    measure,
    run_plan,
    simulate_groups,
    spearman,
)
from prefgrpo.judge.verdict import JudgeError, Verdict
from prefgrpo.rewards.base import Comparison
from prefgrpo.rewards.log import log_judgements

values = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0, np.nan]), min_size=7, max_size=7)


def by_hand(a, b):
    """Spearman's rank correlation of two lists without NaN."""
    rank = [[sum(y < x for y in v) + sum(y == x for y in v) / 2 for x in v] for v in (a, b)]
    return np.corrcoef(*rank)[0, 1]


@settings(max_examples=100)
@given(values, values)
def test_rank_correlations_are_those_of_the_plain_loops(a, b):
    kept = [(x, y) for x, y in zip(a, b, strict=True) if not np.isnan(x + y)]
    found = spearman(np.array([a, range(7), range(7)]), np.array([b, range(7), [1, 0, 2, 3, 4, 5, 6]]))
    each = [1.0, by_hand(range(7), [1, 0, 2, 3, 4, 5, 6])]
    if len({x for x, _ in kept}) >= 2 and len({y for _, y in kept}) >= 2:
        each.append(by_hand(*zip(*kept, strict=True)))
    half = 1.96 * np.std(each, ddof=1) / np.sqrt(len(each))
    assert (found.mean, found.half) == pytest.approx((np.mean(each), half)), "constant rows are ignored"


def test_the_simulated_judge_has_the_moments_it_was_given_and_they_are_found_again():
    asked = JudgeModel(noise=0.8, spread=1.5, bias=0.6, missing=0.05)
    groups = simulate_groups(asked, 24, 150, seed=1)
    assert groups.truth.std() == pytest.approx(1.5, rel=0.05)
    logit = np.log(groups.verdicts / (1 - groups.verdicts))
    swapped = (logit + logit.transpose(0, 2, 1)) / 2
    assert np.nanmean(swapped) == pytest.approx(0.6, abs=0.02)
    assert np.nanstd(swapped) == pytest.approx(0.8 / np.sqrt(2), rel=0.05)
    found = fit_judge(simulate_groups(asked, 24, 150, seed=2))
    assert (found.noise, found.spread, found.bias, found.missing) == pytest.approx((0.8, 1.5, 0.6, 0.05), rel=0.15)
    ties = simulate_groups(JudgeModel(ties=0.5), 12, 50, seed=0)
    assert 0.05 < np.mean(ties.verdicts == 0.5) < 0.3
    assert fit_judge(ties).ties == pytest.approx(0.5, rel=0.25)


def test_plans_see_the_same_verdicts_and_the_same_seed_the_same_groups():
    groups, again = (simulate_groups(JudgeModel(), 8, 5, seed=3) for _ in range(2))
    for plan in ("swiss(3)", "round_robin"):
        for verdicts, done in zip(groups.verdicts, run_plan(plan, groups, seed=7)[0], strict=True):
            assert all(p == verdicts[i, j] for i, j, p in done)
    assert measure(groups, ["swiss(3)"], seed=1) == measure(again, ["swiss(3)"], seed=1)


def test_without_noise_every_full_plan_is_perfect_and_with_noise_round_robin_is_not():
    full = ["round_robin", "both_orders"]
    for row in measure(simulate_groups(JudgeModel(noise=0.0), 10, 20, seed=0), full):
        assert row.spearman.mean == pytest.approx(1.0) == row.true_spearman.mean
    once, _, both, _ = measure(simulate_groups(JudgeModel(noise=1.5, bias=0.5), 10, 60, seed=0), full)
    assert both.spearman.mean == pytest.approx(1.0)
    assert once.spearman.mean < 0.99 and once.true_spearman.mean < both.true_spearman.mean


def test_the_goal_of_24_members_is_met_by_swiss_rounds_and_bradley_terry():
    groups = simulate_groups(JudgeModel(noise=1.0, spread=2.0, bias=0.5), 24, 60, seed=0)
    plain, strength = measure(groups, ["swiss(9)"])
    assert strength.calls == 108 <= 0.4 * 276 and strength.rounds == 9
    assert strength.spearman.mean - strength.spearman.half > 0.95 > plain.spearman.mean
    rows = [plain, strength, *measure(groups, ["swiss(2)", "round_robin"])]
    assert best(rows, 110) is strength and best(rows, 276).plan == "round_robin" and best(rows, 5) is None
    assert cheapest(rows, 0.95) is strength and cheapest(rows, 1.1) is None
    biased = simulate_groups(JudgeModel(noise=0.5, spread=1.0, bias=2.0), 24, 60, seed=0)
    kept, fitted = (measure(biased, ["k_regular(5)"], bias=b)[1].true_spearman for b in (0.0, "fit"))
    assert fitted.mean - fitted.half > kept.mean + kept.half


def log_of(path, groups):
    """Writes judgements.jsonl for groups [N, G, G] judged in both orders (NaN: failed), plus one incomplete group."""
    for k, group in enumerate(groups):
        pairs = [(i, j) for i in range(len(group)) for j in range(len(group)) if i != j]
        verdicts = [Verdict(None, "lost") if np.isnan(group[pair]) else Verdict(float(group[pair])) for pair in pairs]
        comparisons = [Comparison(*pair, verdict) for pair, verdict in zip(pairs, verdicts, strict=True)]
        log_judgements(path, "r", k // 2, k % 2, "p", comparisons)
    log_judgements(path, "r", 9, 0, "p", [Comparison(0, 1, Verdict(0.5))])
    return str(path)


def test_a_log_is_replayed_without_a_last_line_that_has_no_end(capsys, tmp_path):
    groups = simulate_groups(JudgeModel(bias=0.4), 6, 3, seed=5)
    groups.verdicts[1, 2, 3] = np.nan
    path = tmp_path / "judgements.jsonl"
    log_of(path, groups.verdicts)
    whole, out = path.read_bytes(), tmp_path / "rows.json"
    for cut in (0, 1, 7, 40):
        path.write_bytes(whole + whole[:cut])
        np.testing.assert_array_equal(load_judgements(path).verdicts, groups.verdicts)
    plans = ["swiss(2)", "round_robin"]
    assert main(["judge", "plan", "--judgements", str(path), "--plans", *plans, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "3 groups of 6, as with --judge-noise" in text and "true qualities" not in text
    assert f"--position-bias {fit_judge(groups).bias:.2f}" in text
    rows = json.loads(out.read_text())
    assert [(r["plan"], r["calls"]) for r in rows[::2]] == [("swiss(2)", 6), ("round_robin", 15)]
    expected = measure(Groups(groups.verdicts), plans)
    assert [r["spearman"]["mean"] for r in rows] == [r.spearman.mean for r in expected]
    path.write_bytes(b"{\n" + whole)
    with pytest.raises(JudgeError, match=r"expected the judgements\.jsonl of a run"):
        load_judgements(path)
    with pytest.raises(JudgeError, match="has 0 groups judged in both orders"):
        load_judgements(Path(log_of(tmp_path / "short.jsonl", [])))


def test_a_log_of_ties_is_said_to_be_one_and_one_of_failures_is_refused(tmp_path, capsys):
    ties, lost = (log_of(tmp_path / f"{p}.jsonl", np.full((2, 4, 4), p)) for p in (0.5, np.nan))
    assert main(["judge", "plan", "--judgements", ties, "--verdict", "hard"]) == 0
    text = capsys.readouterr().out
    assert "--missing 0.000" in text and "no plan fits" not in text
    assert "both_orders cannot rank any group (all verdicts are ties), so plans" in text
    assert main(["judge", "plan", "--judgements", lost]) == 2
    assert "all comparisons of its 2 groups failed" in capsys.readouterr().err


def test_the_command_prints_a_table_and_a_choice(capsys):
    assert main(["judge", "plan", "--group-size", "9", "--repeats", "20", "--budget", "18", "--verdict", "hard"]) == 0
    text = capsys.readouterr().out
    assert "budget(18)" in text and "k_regular(3)" not in text  # 3 × 9 = 27 is odd
    assert "best for 18 calls: " in text and "fewest calls for 0.95" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("round_robin"))
    assert row[2:4] == ["36", "100%"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--plans", "swis(3)"], "did you mean 'swiss'"),
        (["--group-size", "9", "--plans", "k_regular(3)"], "got G = 9"),
        (["--judge-noise", "-1"], "noise, spread and ties of 0 or more"),
        (["--judgements", "nowhere.jsonl"], "expected the judgements.jsonl of a run"),
        (["--bias", "much"], "bias"),
        (["--budget", "-3"], "expected 0 (40 % of round_robin's calls) or more calls, got -3"),
    ],
)
def test_mistakes_are_named(options, complaint, capsys):
    try:
        assert main(["judge", "plan", "--repeats", "2", *options]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert complaint in capsys.readouterr().err
