"""The report's charts, read back as SVG.

A chart must not mislead: every existing value is drawn inside the plot, whatever its magnitude, and a gridline is at
the value of its label.
"""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from report_html import parse

from prefgrpo.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, draw, number

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


def test_gridlines_are_labelled_with_what_they_mark():
    series = [Series(f"s{k}", np.array([5.0]), np.array([y])) for k, y in enumerate((0.2, 0.8))]
    figure = parse(str(draw("c", series)))
    marks = {t.text: float(t.attributes["y"]) for t in figure.all("text") if t.attributes.get("text-anchor") == "end"}
    for circle, name in zip(figure.all("circle"), ("0.2", "0.8"), strict=True):
        assert abs(marks[name] - 4 - float(circle.attributes["cy"])) < 0.2
