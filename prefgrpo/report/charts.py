"""The page's few curves as inline SVG, coloured by its style sheet; TensorBoard and wandb show all metrics.

Invariant: every existing value is visible: gaps interrupt a line, and a point without neighbours is drawn as a dot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from prefgrpo.report.read import Floats, Run, short
from prefgrpo.run.measures import Estimate, judges_of_step, rewards_of_step

WIDTH, HEIGHT = 400, 220
LEFT = 56
RIGHT = 12
TOP = 20
BOTTOM = 34
_MAX_POINTS = 400
_COLOURS = 8
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, Markup("").join(content))


def numbers(*values: float) -> list[str]:
    """The values with equal decimals, three significant digits of the largest; a dash for NaN."""
    largest = max((abs(v) for v in values if not math.isnan(v)), default=0.0)
    size = math.floor(math.log10(float(f"{largest:.2e}"))) if largest else 0
    form = f".{max(2 - size, 0)}f" if -5 < size < 6 else ".2e"
    return ["–" if math.isnan(v) else f"{v:{form}}".replace("-", "−") for v in values]


def number(value: float) -> str:
    """Three significant digits; a dash for NaN."""
    return numbers(value)[0]


def draw(title: str, series: Sequence[Series], unit: str = "", note: str = "") -> Markup:
    """A figure with the last values, curves over training steps and a note; empty if no series has a value."""
    series = [_pooled(s) for s in series if not np.isnan(s.y).all()]
    if not series:
        return Markup("")
    steps = np.concatenate([s.x for s in series])
    first = float(steps.min())
    last = float(steps.max())
    if first == last:
        first = first - 1
        last = last + 1
    ticks, labels, factor = axis(np.concatenate([v for s in series for v in (s.y, s.low, s.high) if v is not None]))

    def place(x: Floats, y: Floats) -> Floats:
        """Points [n, 2] of the picture."""
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        up = (y - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)
        return np.stack([across, HEIGHT - BOTTOM - up], 1)

    body = [tag("text", factor, x=LEFT - 6, y=10, text_anchor="end", class_="factor")] if factor else []
    legend = []
    for value, label in zip(ticks, labels, strict=True):
        y = float(place(np.array([first]), np.array([value]))[0, 1])
        body.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        body.append(tag("text", label, x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end"))
    for step, anchor, x in ((first, "start", LEFT), (last, "end", WIDTH - RIGHT)):
        body.append(tag("text", f"step {step:g}", x=x, y=HEIGHT - BOTTOM + 18, text_anchor=anchor))
    for k, s in enumerate(series):
        colour = f"c{k % _COLOURS}"
        for part in np.ma.clump_unmasked(np.ma.masked_invalid(s.y)):  # slices of existing values
            if s.low is not None and s.high is not None and not np.isnan(s.low[part] + s.high[part]).any():
                around = [place(s.x[part], s.low[part]), place(s.x[part], s.high[part])[::-1]]
                body.append(tag("path", class_=f"band {colour}", d=_path(np.concatenate(around))))
            points = place(s.x[part], s.y[part])
            if len(points) > 1:
                body.append(tag("path", class_=f"line {colour}", d=_path(points)))
            else:
                x, y = points[0].tolist()
                body.append(tag("circle", class_=colour, cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5))
        latest = s.y[~np.isnan(s.y)][-1]
        legend.append(tag("span", tag("i", class_=colour), s.name, " ", tag("b", number(latest) + unit)))
    svg = tag("svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title} over training steps")
    head = tag("figcaption", tag("h3", title), tag("div", *legend, class_="legend"))
    return tag("figure", head, svg, tag("p", note, class_="note"), class_="chart")


def axis(values: Floats) -> tuple[Floats, list[str], str]:
    """Round values around these, their labels of at most seven characters, and a power of ten that all labels share."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-3 * largest, 1e-99):  # equal, or equal in the digits that a label has
        half = 0.1 * largest if largest > 1e-99 else 1.0
        low = low - half
        high = high + half
    power = math.floor(math.log10((high - low) / 4))
    multiple = next(m for m in (1, 2, 5, 10) if high - low <= 5 * m * 10.0**power)
    step = multiple * 10.0**power
    ticks = step * np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64)
    size = math.floor(math.log10(np.abs(ticks).max()))
    shared = 0 if -3 <= size < 5 else size
    labels = [f"{t / 10.0**shared:.{max(shared - power, 0)}f}".replace("-", "−") for t in ticks]
    return ticks, labels, f"×10{str(shared).translate(_RAISED)}" if shared else ""


def _pooled(s: Series) -> Series:
    """At most _MAX_POINTS points: means of the existing values among consecutive ones."""
    size = -(-len(s.x) // _MAX_POINTS)

    def pool(values: Floats) -> Floats:
        padded = np.append(values, np.full(-len(values) % size, np.nan)).reshape(-1, size)
        return np.asarray(np.ma.masked_invalid(padded).mean(1).filled(np.nan))

    if size <= 1:
        return s
    low, high = (None if edge is None else pool(edge) for edge in (s.low, s.high))
    return Series(s.name, s.x[::size], pool(s.y), low, high)


def _path(points: Floats) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points.tolist())


def curves(run: Run) -> list[Markup]:
    """The charts; one without values is left out. Every reward has one of its own."""
    train = run.train

    def of(names: dict[str, str], factor: float = 1.0) -> list[Series]:
        return [Series(label, train.steps, factor * train[name]) for name, label in names.items()]

    def rates(of_set: str, label: str, found: list[Estimate]) -> Series:
        """A curve of rates in percent, with a band if the last one has an interval."""
        table = 100 * np.array([(one.value, one.interval.low, one.interval.high) for one in found])
        y, low, high = table.T
        few = run.interval(of_set, found[-1]).few
        return Series(label, run.evals[of_set].steps, y, *(() if few else (low, high)))

    wins = []
    ranked = of({"pairs/accuracy": "pairs of the step"}, 100.0)
    watched = "dev" if "dev" in run.evals else next(iter(run.evals), "")  # the set evaluated during training
    if watched:
        evals = run.evals[watched]
        wins = [rates(watched, f"by {run.label(s)}", evals.of(s, "wins")) for s in evals.subjects("wins")]
        ranked.append(rates(watched, "held-out pairs", [one.accuracy or Estimate() for one in evals.comparisons]))
    note = f"Held-out prompts ({watched}), against the initial model from the same noise; bands: 95 % intervals."
    charts = [draw("Win rate against the initial model", wins, "\u00a0%", note)]
    note = "Share of judged pairs whose better image has the higher implicit reward; before training 50 %."
    charts.append(draw("Pairs ranked rightly", ranked, "\u00a0%", note))
    for name, key in rewards_of_step(train.columns).items():
        label = short(name)
        mean = train[key]
        std = train[f"{key}_std"]
        if np.nanmax(np.abs(mean - 0.5)) < 1e-6:
            note = "Win rates within a group have the mean ½; their spread is what the policy learns from."
            charts.append(draw(f"{label}: spread", [Series("std within a group", train.steps, std)], note=note))
        else:
            note = "Mean over training prompts; band: ± the std within a group."
            charts.append(draw(label, [Series("mean", train.steps, mean, mean - std, mean + std)], note=note))
    for name, judge in judges_of_step(train.columns).items():
        lost = 100 * train[f"{judge}failures"] / train[f"{judge}requests"]
        shares = {"order_inconsistency": "other winner when swapped", "position_bias": "first image wins"}
        series = of({judge + n: label for n, label in (shares | {"tie_rate": "ties"}).items()}, 100.0)
        title = f"Judge {short(name)}" if name else "Judge"
        note = "Shares of a step's comparisons. Without position bias, the first image wins half of those without ties."
        charts.append(draw(title, [*series, Series("no verdict", train.steps, lost)], "\u00a0%", note))
    alike = of({"diversity/pixels": "RMS distance of two images"})
    kl = of({"policy/approx_kl": "to the rollout's policy", "policy/kl": "to the initial policy"})
    times = {n: n.removeprefix("time/") for n in train.columns if re.fullmatch(r"time/(?!mfu|.*_per_s)\w+", n)}
    charts += [
        draw("Diversity within a group", alike, note="Pixels in 0 … 1; 0: all images of a prompt are the same."),
        draw("KL divergence", [s for s in kl if np.nan_to_num(s.y).any()]),
        draw("Time per step", of(times), "\u00a0s"),
    ]
    return [chart for chart in charts if chart]
