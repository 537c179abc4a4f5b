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

from prefgrpo.report.run import Floats, Rows, Run
from prefgrpo.run.metrics import PARTS_OF_WINS, REWARD

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 34
_MAX_POINTS = 400
_COLOURS = 8


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


def number(value: float) -> str:
    """Three significant digits; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.3g}".replace("-", "−")


def draw(title: str, series: Sequence[Series], unit: str = "", note: str = "") -> Markup:
    """A figure with the last values, curves over training steps and a note; empty if no series has a value."""
    series = [_pooled(s) for s in series if not np.isnan(s.y).all()]
    if not series:
        return Markup("")
    first, last = _limits([s.x for s in series])
    low, high = _limits([v for s in series for v in (s.y, s.low, s.high) if v is not None])

    def place(x: Floats, y: Floats) -> Floats:
        """Points [n, 2] of the picture."""
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return np.stack([across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)], 1)

    body = []
    legend = []
    for value in np.linspace(low, high, 5):
        y = float(place(np.array([first]), np.array([value]))[0, 1])
        body.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        body.append(tag("text", number(value), x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end"))
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


def _limits(arrays: Sequence[Floats]) -> tuple[float, float]:
    """Least and greatest value, apart."""
    values = np.concatenate(arrays)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low, high) if high - low > 1e-12 * max(abs(low), abs(high)) else (low - 1.0, high + 1.0)


def _pooled(s: Series) -> Series:
    """At most _MAX_POINTS points: means of the existing values among consecutive ones."""
    size = -(-len(s.x) // _MAX_POINTS)
    if size <= 1:
        return s
    padded = np.append(s.y, np.full(-len(s.y) % size, np.nan)).reshape(-1, size)
    means = np.ma.masked_invalid(padded).mean(1).filled(np.nan)
    return Series(s.name, s.x[::size], means)


def _path(points: Floats) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points.tolist())


def win_names(rows: Rows) -> list[str]:
    """Names of an evaluation's win rates, the judge's first."""
    names = [n for n in rows.columns if n.startswith("win_") and not n.endswith(PARTS_OF_WINS)]
    return sorted(names, key=lambda n: n != "win_judge")


def curves(run: Run) -> list[Markup]:
    """At most six charts; one without values is left out."""
    train = run.train

    def of(names: dict[str, str], factor: float = 1.0) -> list[Series]:
        return [Series(label, train.steps, factor * train[name]) for name, label in names.items()]

    wins = []
    watched = "dev" if "dev" in run.evals else next(iter(run.evals), "")  # the set evaluated during training
    for name in win_names(run.evals[watched]) if watched else []:
        rows = run.evals[watched]
        y, low, high = (100 * rows[name + end] for end in ("", "_low", "_high"))
        wins.append(Series(f"by {name[4:]}", rows.steps, y, low, high))
    rewards = {n: n.removeprefix("reward/") for n in train.columns if REWARD.fullmatch(n)}
    means = [s for s in of(rewards) if np.nanmax(np.abs(s.y - 0.5)) >= 1e-6]  # else a win rate within the group
    kl = of({"policy/approx_kl": "to the rollout's policy", "policy/kl": "to the initial policy"})
    judge = {"judge/order_inconsistency": "other winner when swapped", "judge/missing": "no verdict"}
    times = {n: n.removeprefix("time/") for n in train.columns if re.fullmatch(r"time/\w+", n)}
    note = f"Held-out prompts ({watched}), against the initial model from the same noise; bands: 95 % intervals."
    charts = [
        draw("Win rate against the initial model", wins, "\u00a0%", note),
        draw("Reward", means, note="Mean over training prompts."),
        draw("Reward: std within a group", of({f"{n}_std": label for n, label in rewards.items()})),
        draw("KL divergence", [s for s in kl if np.nan_to_num(s.y).any()]),
        draw("Judge", of(judge | {"judge/tie_rate": "ties"}, 100.0), "\u00a0%", "Shares of a step's comparisons."),
        draw("Time per step", of(times), "\u00a0s"),
    ]
    return [chart for chart in charts if chart]
