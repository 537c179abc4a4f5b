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
from report_html import parse

from prefgrpo.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, draw, number, numbers
from prefgrpo.report.page import span

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


@given(st.floats(-1e12, 1e12, allow_subnormal=False))
def test_numbers_are_printed_with_three_digits(value):
    assert abs(read(number(value)) - value) <= 0.00501 * abs(value)


@given(st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=2, max_size=3))
def test_numbers_beside_each_other_have_equal_decimals(values):
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
