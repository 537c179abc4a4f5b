"""The judge's verdicts on one group as a G × G picture: row beats column, sorted by win rate.

Colour is blue where the row's image wins and orange where it loses; its strength is the distance from ½. Hatched:
no verdict. Invariant: a missing verdict never looks like a tie.
"""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from prefgrpo.report.charts import tag
from prefgrpo.report.media import SMALL, data_uri
from prefgrpo.report.run import Group

CELL, GAP, BAR = 40, 2, 84


def draw_group(group: Group, ident: str) -> Markup:
    """The figure of one group; `ident` is unique on the page."""
    rates = np.nan_to_num(group.rates, nan=-1.0)
    order = np.argsort(-rates, kind="stable").tolist()
    size = len(order)
    width, height = (size + 1) * CELL + BAR, (size + 1) * CELL
    body = [_images(group, order, ident)]
    for row, i in enumerate(order):
        y = (row + 1) * CELL
        body += [_cell(group, i, j, (column + 1) * CELL, y, size <= 12) for column, j in enumerate(order) if i != j]
        body += [tag("rect", class_="self", x=y, y=y, width=CELL - GAP, height=CELL - GAP), _rate(group, i, size, y)]
    svg = tag("svg", *body, viewBox=f"0 0 {width} {height}", role="img", aria_label=f"verdicts on {group.prompt}")
    caption = tag(
        "figcaption", tag("div", group.prompt, class_="clamp", title=group.prompt), tag("span", f"step {group.step}")
    )
    return tag("figure", caption, svg, class_="group wide" if size > 12 else "group")


def _images(group: Group, order: list[int], ident: str) -> Markup:
    """Every image once in <defs>, used along both axes."""
    side, out, defs = CELL - GAP, [], []
    sharp = "sharp" if max(group.images.shape[1:3]) <= SMALL else "smooth"
    for place, i in enumerate(order):
        name = f"{ident}-{i}"
        picture = tag("image", href=data_uri(group.images[i], 96), width=side, height=side, id=name, class_=sharp)
        defs.append(picture)
        told = tag("title", f"image {i + 1} of {len(order)}, in the order of generation")
        at = (place + 1) * CELL
        out += [tag("use", told, href=f"#{name}", x=0, y=at), tag("use", told, href=f"#{name}", x=at, y=0)]
    return tag("g", tag("defs", *defs), *out)


def _cell(group: Group, i: int, j: int, x: int, y: int, written: bool) -> Markup:
    """Probability that image i beats image j, as colour and (in small groups) as a number."""
    count, side = float(group.counts[i, j]), CELL - GAP
    if not count > 0 or math.isnan(group.wins[i, j]):
        told = tag("title", f"image {i + 1} over image {j + 1}: no verdict")
        return tag("rect", told, class_="missing", x=x, y=y, width=side, height=side, fill="url(#hatch)")
    p = float(group.wins[i, j]) / count
    told = tag("title", f"image {i + 1} over image {j + 1}: {p:.3f}, mean of {count:g}")
    strength = abs(p - 0.5) * 2
    out = [tag("rect", class_="neutral", x=x, y=y, width=side, height=side)]
    out.append(
        tag("rect", told, class_="win" if p > 0.5 else "lose", x=x, y=y, width=side, height=side, fill_opacity=strength)
    )
    if written:
        inside = "number strong" if strength > 0.55 else "number"
        out.append(tag("text", f"{p:.2f}", class_=inside, x=x + side / 2, y=y + side / 2 + 4, text_anchor="middle"))
    return Markup("").join(out)


def _rate(group: Group, i: int, size: int, y: int) -> Markup:
    """Win rate at the row's end, as a bar and a number."""
    rate, x, middle = float(group.rates[i]), (size + 1) * CELL + 4, y + CELL / 2 - 1
    if math.isnan(rate):
        return tag("text", "missing", x=x, y=middle + 4)
    long = BAR - 44
    bars = [
        tag("rect", class_=kind, x=x, y=middle - 5, width=w, height=10)
        for kind, w in (("rest", long), ("rate", rate * long))
    ]
    return tag("g", *bars, tag("text", f"{rate:.2f}", x=x + long + 6, y=middle + 4))
