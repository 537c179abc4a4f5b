"""The report's charts, read back as SVG.

A chart must not mislead: every existing value is drawn inside the plot, whatever its magnitude; a tick is at the value
of its label; smoothing keeps the level of a curve; pooling a long run keeps the extremes of a band.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from report_html import parse

from prefgrpo.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, SMOOTH_FROM, TOP, WIDTH, Chart, Series, draw, ticks

VALUES = st.one_of(st.floats(-1e12, 1e12), st.floats(-1e-9, 1e-9), st.just(np.nan))


@given(arrays(np.float64, st.integers(1, 90), elements=VALUES), st.booleans(), st.booleans())
def test_no_value_leaves_the_plot_or_gets_lost(y, log, percent):
    x = np.arange(len(y), dtype=float)
    chart = Chart("c", [Series("s", x, y)], log=log, percent=percent)
    text = str(draw(chart, (0.0, float(len(y) - 1))))
    known = int((~np.isnan(y)).sum())
    if not known:
        assert text == ""
        return
    figure = parse(text)
    points = [p for d in figure.all("path") for p in re.findall(r"[ML](-?[\d.e+-]+),(-?[\d.e+-]+)", d.attributes["d"])]
    dots = [(c.attributes["cx"], c.attributes["cy"]) for c in figure.all("circle")]
    places = np.array([*points, *dots], dtype=float)
    assert (places[:, 0] >= LEFT - 0.1).all() and (places[:, 0] <= WIDTH - RIGHT + 0.1).all()
    assert (places[:, 1] >= TOP - 0.1).all() and (places[:, 1] <= HEIGHT - BOTTOM + 0.1).all()
    drawn = {round(float(a), 1) for a, _ in points + dots}
    assert len(drawn) >= min(known, 80) * 0.9
    assert sum(v is not None for v in json.loads(figure.all("figure")[0].attributes["data-chart"])["s"][0][1]) == known


SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")


def read(text):
    """Parses a number as the page prints it: 0.00338, −4.27×10⁻¹⁰, 93 %, 12 ms."""
    digits, _, power = text.translate(SUPERSCRIPT).removesuffix(" %").removesuffix(" ms").partition("×10")
    return float(digits) * 10.0 ** int(power or 0)


@given(st.floats(1e-20, 1e20) | st.floats(-1e3, -1e-9), st.booleans(), st.sampled_from(["", "%", "s"]))
def test_legend_and_pointer_say_the_value_itself(value, log, unit):
    """They do so whichever power of ten the axis uses."""
    y = np.array([value / 3, value])
    chart = Chart("c", [Series("s", np.arange(2.0), y)], unit=unit if unit == "s" else "", log=log, percent=unit == "%")
    figure = parse(str(draw(chart, (0.0, 1.0))))
    legend = figure.all("b")[0].text
    factor = 100.0 if unit == "%" else 1000.0 if legend.endswith(" ms") else 1.0
    legend = legend.removesuffix(" s")
    assert read(legend) == pytest.approx(value * factor, rel=6e-3)
    pointer = json.loads(figure.all("figure")[0].attributes["data-chart"])["s"][0][1]
    np.testing.assert_allclose(pointer, y * factor, rtol=1e-3)


def test_small_values_of_a_run_are_written_with_their_power():
    for value, text in {3.38e-3: "0.00338", 4.27e-10: "4.27×10⁻¹⁰", 1344.0: "1340", 2.5e7: "2.5×10⁷", 0.0: "0"}.items():
        chart = Chart("c", [Series("s", np.arange(3.0), np.full(3, value))])
        assert parse(str(draw(chart, (0.0, 2.0)))).all("b")[0].text == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 8))
def test_ticks_are_round_evenly_spaced_and_inside(low, span, count):
    assume(span >= 1e-8 * abs(low))  # any closer, tick spacing would be rounding error
    high = low + span
    found = ticks(low, high, count)
    assert 1 <= len(found) <= count + 1
    assert all(low - 1e-6 * span <= t <= high + 1e-6 * span for t in found)
    if len(found) > 1:
        step = found[1] - found[0]
        mantissa = step / 10 ** np.floor(np.log10(step * (1 + 1e-6)))
        assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-3


def test_ticks_label_what_they_mark():
    y = np.array([0.2, 0.8])
    figure = parse(str(draw(Chart("c", [Series("s", np.array([0.0, 10.0]), y)], include=(0.0,)), (0.0, 10.0))))
    marks = {t.text: float(t.attributes["y"]) for t in figure.all("text") if t.attributes.get("text-anchor") == "end"}
    dots = sorted((float(c.attributes["cx"]), float(c.attributes["cy"])) for c in figure.all("circle"))
    for (_, place), name in zip(dots, ("0.2", "0.8")):
        assert abs(marks[name] - 4 - place) < 0.2


def test_running_mean_keeps_a_level_and_gaps():
    n = SMOOTH_FROM
    y = np.full(n, 3.0)
    y[10] = np.nan
    figure = parse(str(draw(Chart("c", [Series("s", np.arange(n, dtype=float), y)], include=(0.0,)), (0.0, n - 1.0))))
    faint = figure.all("path", "faint")
    bold = [p for p in figure.all("path", "c0") if p not in faint]
    assert [p.attributes["d"] for p in faint] == [p.attributes["d"] for p in bold] and len(bold) == 2


def test_long_bands_keep_their_extremes():
    n = 4000
    low, high = np.full(n, 0.9), np.full(n, 1.1)
    low[1234], high[3210] = 0.0, 2.0
    s = Series("s", np.arange(n, dtype=float), np.ones(n), 0, low, high)
    figure = parse(str(draw(Chart("c", [s]), (0.0, n - 1.0))))
    ys = [float(v) for v in re.findall(r",([\d.]+)", figure.all("path", "band")[0].attributes["d"])]
    assert max(ys) - min(ys) > 0.85 * (HEIGHT - TOP - BOTTOM)
