"""Line charts as inline SVG, coloured by the page's style sheet (so that they follow light, dark and print).

x is always the training step. Invariant: every existing value is visible: gaps interrupt a line, and a point without
neighbours is drawn as a dot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 34
MAX_POINTS = 400
COLOURS = 8
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """One curve: x, y [n] (NaN = missing), and an optional band low … high."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element; `class_` and `stroke_width` become class and stroke-width; text is escaped unless Markup."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), f"{v:.5g}" if isinstance(v, float) else v)
        for key, v in attributes.items()
    )
    if name == "img":
        return Markup("<img{}>").format(pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, Markup("").join(content))


def number(value: float) -> str:
    """Three significant digits: 0.00338, 4.27×10⁻¹⁰."""
    rounded = float(f"{value:.3g}")
    plain = rounded == 0 or 1e-4 <= abs(rounded) < 1e5
    digits, _, power = (f"{rounded:.10g}" if plain else f"{rounded:.3g}").partition("e")
    return digits.replace("-", "−") + (f"×10{str(int(power)).translate(SUPERSCRIPT)}" if power else "")


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` or fewer round values (spaced by 1, 2 or 5 × 10^k) inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-6)
    return [k * step for k in range(first, math.floor(high / step + 1e-6) + 1)]


def draw(
    title: str,
    series: Sequence[Series],
    steps: tuple[float, float],
    unit: str = "",
    note: str = "",
    include: tuple[float, ...] = (0.0,),
) -> Markup:
    """A figure with title, last values, curves over `steps` and a note; empty if no series has a value.

    include: values that the y axis must include.
    """
    series = [_pooled(s) for s in series if not np.isnan(s.y).all()]
    if not series:
        return Markup("")
    drawn = [np.array(include), *(v for s in series for v in (s.y, s.low, s.high) if v is not None)]
    low, high = float(np.nanmin(np.concatenate(drawn))), float(np.nanmax(np.concatenate(drawn)))
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = low - 1.0, high + 1.0
    first, last = steps if steps[1] > steps[0] else (steps[0] - 1, steps[1] + 1)

    def place_x(x: Floats) -> Floats:
        """Picture x."""
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def place_y(y: Floats) -> Floats:
        """Picture y."""
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = []
    for value in ticks(low, high, 5):
        height = float(place_y(np.array(value)))
        body.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height))
        body.append(tag("text", number(value), x=LEFT - 6, y=height + 4, text_anchor="end"))
    for step in ticks(first, last, 6):
        place = float(place_x(np.array(step)))
        body.append(tag("text", f"{step:g}", x=place, y=HEIGHT - BOTTOM + 16, text_anchor="middle"))
    body.append(tag("text", "training step", x=WIDTH - RIGHT, y=HEIGHT - 4, text_anchor="end"))
    legend = []
    for k, s in enumerate(series):
        colour = f"c{k % COLOURS}"
        band = None if s.low is None or s.high is None else (place_y(s.low), place_y(s.high))
        body += _curve(place_x(s.x), place_y(s.y), band, colour)
        newest = number(s.y[~np.isnan(s.y)][-1]) + unit
        legend.append(tag("span", tag("i", class_=colour), s.name, " ", tag("b", newest)))
    svg = tag("svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title} over training steps")
    head = tag("figcaption", tag("h3", title), tag("div", *legend, class_="legend"))
    return tag("figure", head, svg, tag("p", note, class_="note"), class_="chart")


def _curve(x: Floats, y: Floats, band: tuple[Floats, Floats] | None, colour: str) -> list[Markup]:
    """Bands, lines and single points, in picture coordinates."""
    out = []
    for part in _runs(~np.isnan(y)):
        if band is not None and not np.isnan(band[0][part] + band[1][part]).any():
            around = np.concatenate([band[0][part], band[1][part][::-1]])
            out.append(tag("path", class_=f"band {colour}", d=_path(np.concatenate([x[part], x[part][::-1]]), around)))
        if part.stop - part.start > 1:
            out.append(tag("path", class_=f"line {colour}", d=_path(x[part], y[part])))
        else:
            out.append(tag("circle", class_=colour, cx=float(x[part][0]), cy=float(y[part][0]), r=2.5))
    return out


def _pooled(s: Series) -> Series:
    """At most MAX_POINTS points: means of consecutive points, and minimum and maximum for a band."""
    size = -(-len(s.x) // MAX_POINTS)
    if size <= 1:
        return s
    starts = range(0, len(s.x), size)

    def pool(values: Floats, how: np.ufunc) -> Floats:
        return np.array([how.reduce(values[k : k + size]) for k in starts])

    counts = pool((~np.isnan(s.y)).astype(np.float64), np.add)
    mean = np.where(counts > 0, pool(np.nan_to_num(s.y), np.add) / np.maximum(counts, 1), np.nan)
    low, high = (None if v is None else pool(v, how) for v, how in ((s.low, np.fmin), (s.high, np.fmax)))
    return Series(s.name, s.x[::size], mean, low, high)


def _runs(known: NDArray[np.bool_]) -> list[slice]:
    """Slices of consecutive True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    return [slice(a, b) for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
