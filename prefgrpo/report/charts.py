"""Line and area charts as inline SVG, coloured by the page's style sheet (so that they follow light, dark and print).

x is always the training step. Invariant: every existing value is visible: gaps interrupt a line, and a point without
neighbours is drawn as a dot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 22, 34
MAX_POINTS = 400
SMOOTH_FROM = 60
COLOURS = 8
TINY = 1e-30
"""Smaller values are drawn as 0."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """One curve: x, y [n] (NaN = missing), an optional band low … high, and its colour 0 … 7."""

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    low: Floats | None = None
    high: Floats | None = None
    marks: bool = False
    """Draw points with error bars and no line."""


@dataclass(frozen=True)
class Chart:
    """Content of a figure; values are already in `unit`, or are fractions if `percent`."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    note: str = ""
    percent: bool = False
    stacked: bool = False
    log: bool = False
    """Logarithmic y axis if the values are positive and span more than a factor of 100."""
    include: tuple[float, ...] = ()
    """Values that the y axis must include."""
    lines: tuple[tuple[float, str], ...] = ()
    """Horizontal lines with their labels, drawn where they fall inside the axis."""

    @property
    def has_data(self) -> bool:
        """Whether any series has a value."""
        return any(not np.isnan(s.y).all() for s in self.series)

    @property
    def is_flat(self) -> bool:
        """Whether no series' mean changes between the first and the last third by more than the largest of: twice its
        scatter, two percentage points, 10 % of its largest value."""
        return not any(self._has_trend(y) for s in self.series if len(y := s.y[~np.isnan(s.y)]))

    def _has_trend(self, y: Floats) -> bool:
        third = -(-len(y) // 3)
        first, last = y[:third], y[-third:]
        allowed = max(0.02 if self.percent else 0.1 * np.abs(y).max(), 2 * max(first.std(), last.std()))
        return bool(abs(last.mean() - first.mean()) > allowed)


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element; `class_` and `stroke_width` become class and stroke-width; text is escaped unless Markup."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), f"{v:.5g}" if isinstance(v, float) else v)
        for key, v in attributes.items()
    )
    if name == "img":
        return Markup("<img{}>").format(pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, Markup("").join(content))


@dataclass(frozen=True)
class Axes:
    """Maps data to picture coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False
    scale: float = 1.0
    """Factor from stored values to the unit: 100 for %, 1000 for ms."""
    power: int = 0
    """The tick labels are multiples of 10 to this power."""

    def x(self, value: Floats | float) -> Floats:
        """Picture x."""
        return LEFT + (np.asarray(value) - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: Floats | float) -> Floats:
        """Picture y."""
        low, high, v = self.y0, self.y1, np.asarray(value)
        if self.log:
            low, high, v = math.log10(low), math.log10(high), np.log10(v)
        return HEIGHT - BOTTOM - (v - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` or fewer round values (spaced by 1, 2 or 5 × 10^k) inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-6)
    return [k * step for k in range(first, math.floor(high / step + 1e-6) + 1)]


def label(value: float) -> str:
    """A tick's text: short, with a true minus sign."""
    return f"{value + 0.0:{'.10g' if abs(value) < 1e5 else '.3g'}}".replace("-", "−")


def _power(exponent: int) -> str:
    return f"10{str(exponent).translate(SUPERSCRIPT)}"


def number(value: float) -> str:
    """Three significant digits: 0.00338, 4.27×10⁻¹⁰. `page.js` formats the values under the pointer the same way."""
    rounded = float(f"{value:.3g}")
    plain = rounded == 0 or 1e-4 <= abs(rounded) < 1e5
    digits, _, power = (f"{rounded:.10g}" if plain else f"{rounded:.3g}").partition("e")
    return digits.replace("-", "−") + (f"×{_power(int(power))}" if power else "")


def draw(chart: Chart, steps: tuple[float, float]) -> Markup:
    """The figure: title, legend with last values, SVG, note; empty if no series has a value."""
    series = [s for s in chart.series if not np.isnan(s.y).all()]
    if not series:
        return Markup("")
    most = 150 if chart.stacked else MAX_POINTS
    longest, note = max(len(s.x) for s in series), chart.note
    if longest > most:
        note += f" Each point stands for {-(-longest // most)} steps."
    series = [_shrink(replace(s, name=s.name or chart.title, colour=s.colour % COLOURS), most) for s in series]
    drawn = _stack(series) if chart.stacked else series
    axes, unit = _axes(chart, drawn, steps)
    suffix = f" {unit}" if unit else ""
    body = [_grid(axes, unit, chart), *(_area(axes, s) if chart.stacked else _curve(axes, s) for s in drawn)]
    body += [
        tag("text", text, class_="rule", x=WIDTH - RIGHT, y=float(axes.y(value)) - 4, text_anchor="end")
        for value, text in chart.lines
        if axes.y0 <= value <= axes.y1
    ]
    cursor = tag("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM)
    name, box = f"{chart.title} over training steps", f"0 0 {WIDTH} {HEIGHT}"
    svg = tag("svg", *body, cursor, viewBox=box, role="img", aria_label=name)
    legend, points = [], []
    for s in series:  # on hover, the page's script updates the legend's values
        mark = tag("i", class_=f"c{s.colour} round" if s.marks else f"c{s.colour}")
        last = number(s.y[~np.isnan(s.y)][-1] * axes.scale) + suffix
        legend.append(tag("span", mark, s.name, " ", tag("b", last)))
        y = [None if math.isnan(v) else float(f"{v * axes.scale:.4g}") for v in s.y.tolist()]
        points.append([[float(f"{v:.6g}") for v in s.x.tolist()], y])
    title = tag("figcaption", tag("h3", chart.title), tag("div", *legend, class_="legend"))
    data = {"box": [LEFT, WIDTH - RIGHT, axes.x0, axes.x1], "w": WIDTH, "u": suffix, "s": points}
    described = json.dumps(data, separators=(",", ":"))
    return tag("figure", title, svg, tag("p", note.strip(), class_="note"), class_="chart", data_chart=described)


def _shrink(s: Series, most: int) -> Series:
    """Reduce to at most `most` points: means of consecutive points, and minimum and maximum for a band."""
    size = -(-len(s.x) // most)
    if size <= 1:
        return s

    def pooled(values: Floats, pool: Callable[[Floats], Any]) -> Floats:
        parts = [values[k : k + size] for k in range(0, len(values), size)]
        return np.array([np.nan if np.isnan(p).all() else pool(p) for p in parts])

    low, high = (v if v is None else pooled(v, pool) for v, pool in ((s.low, np.nanmin), (s.high, np.nanmax)))
    return replace(s, x=pooled(s.x, np.mean), y=pooled(s.y, np.nanmean), low=low, high=high)


def _stack(series: list[Series]) -> list[Series]:
    """Stacked bands between cumulative sums, from the bottom up; an isolated point gets some width."""
    x = series[0].x
    wide = len(x) == 1
    x = np.array([x[0] - 0.4, x[0] + 0.4]) if wide else x
    below, out = np.zeros(len(x)), []
    for s in series:
        y = np.nan_to_num(np.repeat(s.y, 2) if wide else s.y)
        out.append(replace(s, x=x, y=below + y, low=below, high=below + y))
        below = below + y
    return out


def _axes(chart: Chart, series: list[Series], steps: tuple[float, float]) -> tuple[Axes, str]:
    """Axes that include all the data, and the unit for tick labels and legend."""
    drawn = [v for s in series for v in (s.y, s.low, s.high) if v is not None]
    values = np.concatenate([np.array(chart.include), *drawn])
    values = values[~np.isnan(values)]
    values[np.abs(values) < TINY] = 0.0
    low, high = float(values.min()), float(values.max())
    x0, x1 = steps if steps[1] > steps[0] else (steps[0] - 1, steps[1] + 1)
    if chart.log and low > TINY and high / low > 100:
        return Axes(x0, x1, low * 0.8, high * 1.25, log=True), chart.unit
    if chart.stacked:
        low = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        empty = 0.01 if chart.percent else 1.0
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, empty)
    margin = 0.05 * (high - low)
    inside = chart.include + ((0.0,) if low >= 0 else ())
    y0 = low if low in inside else low - margin
    y1 = high if chart.percent and high == 1.0 else high + margin
    if chart.percent:
        return Axes(x0, x1, y0, y1, scale=100.0), "%"
    top = max(abs(low), abs(high))
    if chart.unit == "s" and top < 0.5:
        return Axes(x0, x1, y0, y1, scale=1000.0), "ms"
    power = math.floor(math.log10(top)) if top > 0 and not 1e-2 <= top < 1e5 else 0
    return Axes(x0, x1, y0, y1, power=power), chart.unit


def _grid(axes: Axes, unit: str, chart: Chart) -> Markup:
    """Grid lines, tick labels, the x title and the chart's reference lines, whose labels are above the curves."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    if axes.log:
        powers = range(math.ceil(math.log10(axes.y0)), math.floor(math.log10(axes.y1)) + 1)
        rows = [(10.0**p, _power(p)) for p in powers][:: -(-len(powers) // 5) or 1]
    else:
        shown = axes.scale * 10.0**-axes.power
        rows = [(t / shown, label(t)) for t in ticks(axes.y0 * shown, axes.y1 * shown, 5)]
    out = []
    for value, text in rows:
        y = float(axes.y(value))
        out.append(tag("line", class_="grid", x1=LEFT, x2=right, y1=y, y2=y))
        out.append(tag("text", text, x=LEFT - 6, y=y + 4, text_anchor="end"))
    for step in ticks(axes.x0, axes.x1, 6):
        if step == round(step):
            x = float(axes.x(step))
            out.append(tag("line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            out.append(tag("text", label(step), x=x, y=bottom + 16, text_anchor="middle"))
    out.append(tag("line", class_="axis", x1=LEFT, x2=right, y1=bottom, y2=bottom))
    if unit := (f"×{_power(axes.power)} " if axes.power else "") + unit:
        out.append(tag("text", unit.strip(), class_="unit", x=4, y=11))
    out.append(tag("text", "training step", class_="x", x=right, y=HEIGHT - 4, text_anchor="end"))
    for value, _ in chart.lines:
        if axes.y0 <= value <= axes.y1:
            y = float(axes.y(value))
            out.append(tag("line", class_="rule", x1=LEFT, x2=right, y1=y, y2=y))
    return tag("g", *out)


def _runs(ok: NDArray[np.bool_]) -> list[slice]:
    """Slices of consecutive True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], ok, [False]]).astype(np.int8)))
    return [slice(a, b) for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _between(x: Floats, low: Floats, high: Floats) -> str:
    """Outline of the area between two curves."""
    return _path(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])) + "Z"


def _area(axes: Axes, s: Series) -> Markup:
    assert s.low is not None
    return tag("path", class_=f"area c{s.colour}", d=_between(axes.x(s.x), axes.y(s.y), axes.y(s.low)))


def _curve(axes: Axes, s: Series) -> Markup:
    """Band, line (faint behind its running mean if noisy), and dots for few or isolated points."""
    out, known = [], ~np.isnan(s.y)
    x, y = axes.x(s.x), axes.y(s.y)
    if s.low is not None and s.high is not None:
        low, high = axes.y(s.low), axes.y(s.high)
        for part in _runs(~np.isnan(s.low) & ~np.isnan(s.high)):
            if s.marks or part.stop - part.start == 1:
                for k in range(part.start, part.stop):
                    ends = np.array([low[k], high[k]])
                    out.append(tag("path", class_=f"bar c{s.colour}", d=_path(x[[k, k]], ends)))
            else:
                out.append(tag("path", class_=f"band c{s.colour}", d=_between(x[part], low[part], high[part])))
    smooth = _smoothed(s)
    for part in _runs(known):
        if part.stop - part.start > 1 and not s.marks:
            faint = "" if smooth is None else " faint"
            out.append(tag("path", class_=f"line c{s.colour}{faint}", d=_path(x[part], y[part])))
            if smooth is not None:
                out.append(tag("path", class_=f"line c{s.colour}", d=_path(x[part], axes.y(smooth[part]))))
    look = {"class_": f"mark c{s.colour}", "r": 3.5} if s.marks else {"class_": f"c{s.colour}", "r": 2.5}
    for part in _runs(known):
        if known.sum() <= 30 or s.marks or part.stop - part.start == 1:
            out += [tag("circle", cx=float(x[k]), cy=float(y[k]), **look) for k in range(part.start, part.stop)]
    return tag("g", *out)


def _smoothed(s: Series) -> Floats | None:
    """Centred running mean over existing points; None for series that are short or have a band."""
    if len(s.x) < SMOOTH_FROM or s.low is not None:
        return None
    known, kernel = ~np.isnan(s.y), np.ones(max(5, len(s.x) // 25) | 1)
    total = np.convolve(np.nan_to_num(s.y), kernel, "same")
    return np.where(known, total / np.maximum(np.convolve(known.astype(np.float64), kernel, "same"), 1.0), np.nan)
