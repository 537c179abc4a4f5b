"""The report's charts, read back as SVG.

A chart must not mislead: every existing value is drawn inside the plot, whatever its magnitude, and a gridline is at
the value of its label.
"""

import math
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prefgrpo.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, draw, numbers
from prefgrpo.report.page import span
from tests.report.synthetic import STEPS, charts, eval_row, last, parse, report, small_run, train_row

VALUES = st.one_of(st.floats(-1e12, 1e12), st.floats(-1e-9, 1e-9), st.just(np.nan))
SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")


def read(text):
    """Parses a number as the page prints it: 0.00338, −4.27×10⁻¹⁰."""
    digits, _, power = text.translate(SUPERSCRIPT).partition("×10")
    return float(digits) * 10.0 ** int(power or 0)


@given(arrays(np.float64, st.integers(1, 90), elements=VALUES))
def test_no_value_leaves_the_plot_or_gets_lost(y):
    x = np.arange(len(y), dtype=float)
    text = str(draw("c", [Series("s", x, y)]))
    known = int((~np.isnan(y)).sum())
    if not known:
        assert text == ""
        return
    figure = parse(text)
    points = [p for d in figure.all("path") for p in re.findall(r"[ML](-?[\d.e+-]+),(-?[\d.e+-]+)", d.attributes["d"])]
    points += [(c.attributes["cx"], c.attributes["cy"]) for c in figure.all("circle")]
    places = np.array(points, dtype=float)
    assert len(places) == known
    assert (places[:, 0] >= LEFT - 0.1).all() and (places[:, 0] <= WIDTH - RIGHT + 0.1).all()
    assert (places[:, 1] >= TOP - 0.1).all() and (places[:, 1] <= HEIGHT - BOTTOM + 0.1).all()


@given(st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=3))
def test_numbers_have_three_digits_and_beside_each_other_equal_decimals(values):
    texts = numbers(*values)
    assert len({len(text.partition("e")[0].partition(".")[2]) for text in texts}) == 1
    largest = max(map(abs, values))
    assert all(abs(read(text) - value) <= 0.00501 * largest for text, value in zip(texts, values, strict=True))


def test_intervals_and_pairs_as_the_page_writes_them():
    pairs = {
        (0.34, 0.479): "0.340 0.479",
        (0.0382, 0.16): "0.038 0.160",
        (0.9996, 0.2): "1.00 0.20",
        (0, 0): "0.00 0.00",
        (-0.0402, 12.0): "−0.0 12.0",
        (math.nan, 3.0): "– 3.00",
        (152.4, 0.5): "152 0",
        (1.2e-7, 3e-6): "1.20e−07 3.00e−06",
    }
    for values, text in pairs.items():
        assert " ".join(numbers(*values)) == text
    shares = {
        (0.012, 0.2): "1.2–20.0\xa0%",
        (0.34, 0.479): "34–48\xa0%",
        (0.5, 0.995): "50.0–99.5\xa0%",
        (math.nan, 1): "",
    }
    assert {bounds: span(*bounds) for bounds in shares} == shares


@given(st.floats(-1e12, 1e12, allow_subnormal=False), st.floats(-1e12, 1e12, allow_subnormal=False))
def test_gridlines_are_round_and_labelled_with_what_they_mark(a, b):
    """Labels fit the margin (7 characters of 6 pixels), are different, and a value lies where its label says."""
    figure = parse(str(draw("c", [Series("s", np.array([0.0, 1.0]), np.array([a, b]))])))
    texts = [t for t in figure.all("text") if t.attributes.get("text-anchor") == "end" and "step" not in t.text]
    factor = [t.text for t in texts if t.attributes.get("class") == "factor"]
    marks = [t for t in texts if t.attributes.get("class") != "factor"]
    assert all(len(t.text) <= 7 for t in texts) and len({t.text for t in marks}) == len(marks) and 3 <= len(marks) <= 7
    assert LEFT - 6 >= 7 * 6.2
    values = np.array([read(t.text) for t in marks])
    steps = np.diff(values)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert min(abs(steps[0] / 10.0 ** np.floor(np.log10(steps[0]) + 1e-9) - m) for m in (1, 2, 5)) < 1e-6
    assert np.abs(values / steps[0] - np.round(values / steps[0])).max() < 1e-4
    power = read("1" + factor[0]) if factor else 1.0
    y = np.array([float(t.attributes["y"]) - 4 for t in marks])
    line = figure.all("path", "line")[0].attributes["d"]
    for value, (_, at) in zip((a, b), re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", line), strict=True):
        assert abs(np.interp(value / power, values, y) - float(at)) < 0.3


# ---- the curves of a run --------------------------------------------------------------------------------------------


def digits(value):
    """Three significant digits, zeros too."""
    return f"{value:#.3g}".removesuffix(".")


def test_curves_carry_the_logged_values(page):
    found = charts(page)
    assert list(found) == [
        "Win rate against the initial model", "vlm_pairwise: spread", "Judge", "Diversity within a group",
        "KL divergence", "Time per step",
    ]  # fmt: skip
    assert "to the initial policy" not in found["KL divergence"].text  # kl_coef 0: the KL was never computed
    wins = found["Win rate against the initial model"]
    row = train_row(STEPS)
    assert last(wins, "by the judge") == digits(100 * eval_row(STEPS, STEPS, "dev")["dev/win_judge"]) + " %"
    assert not wins.all("path", "band")  # nothing says that there are 30 prompts
    assert last(found["vlm_pairwise: spread"], "std within a group") == digits(row["reward/vlm_pairwise_std"])
    assert last(found["Judge"], "other winner when swapped") == digits(100 * row["judge/order_inconsistency"]) + " %"
    assert last(found["Judge"], "first image wins") == digits(100 * row["judge/position_bias"]) + " %"
    assert last(found["Judge"], "no verdict") == digits(100 * row["judge/failures"] / row["judge/requests"]) + " %"
    assert last(found["Diversity within a group"], "RMS") == digits(row["diversity/pixels"])
    assert last(found["Time per step"], "rollout") == f"{row['time/rollout']:.3g} s"
    assert "images_per_s" not in found["Time per step"].text


def test_every_reward_and_every_judge_has_a_chart_of_its_own(tmp_path):
    """A win rate within the group has the mean ½, so only its spread is drawn."""
    second = {"judge/other/tie_rate": 0.25, "judge/other/requests": 50.0, "judge/other/failures": 10.0}
    rewards = {"reward/clip": 20.0, "reward/clip_std": 1.5, "reward/my/rewards.py:red": 0.1}
    found = charts(report(small_run(tmp_path / "r", [train_row(s) | second | rewards for s in range(1, 5)])))
    assert last(found["clip"], "mean") == "20.0" and len(found["clip"].all("path", "band")) == 1
    assert last(found["rewards.py:red"], "mean") == "0.100" and "vlm_pairwise: spread" in found
    assert "Judge" not in found and last(found["Judge other"], "ties") == "25.0 %"
    assert last(found["Judge other"], "no verdict") == "20.0 %"


def test_a_single_step_shows_as_points(tmp_path):
    found = charts(report(small_run(tmp_path / "r", [train_row(1)])))
    assert last(found["Time per step"], "update") == f"{train_row(1)['time/update']:.3g} s"
    assert len(found["Time per step"].all("circle")) == 3 and not found["Time per step"].all("path")


def test_missing_keys_nulls_and_text_in_numbers_are_gaps(tmp_path):
    rows = [train_row(s) | {"policy/approx_kl": None} for s in range(1, 6)]
    rows[2]["time/rollout"] = None
    del rows[3]["judge/tie_rate"]
    rows[1]["time/update"] = "slow"
    found = charts(report(small_run(tmp_path / "r", [*rows, {"kind": "train", "step": None}, {"kind": "train"}, [1]])))
    assert "KL divergence" not in found
    lines = found["Time per step"].all(
        "path", "line"
    )  # rollout in two parts, judge_wait whole, update in a dot and one
    assert len(lines) == 4 and len(found["Time per step"].all("circle")) == 1
    assert all("nan" not in p.attributes["d"] for f in found.values() for p in f.all("path"))
