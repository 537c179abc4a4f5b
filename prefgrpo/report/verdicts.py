"""The judge's verdicts on one group as a G × G matrix: P(row beats column), sorted by win rate.

Cells are blue where the row's image wins and orange where it loses, stronger the further from ½. Hatched: no verdict.
Invariant: a missing verdict never looks like a tie.
"""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from prefgrpo.report.media import data_uri, is_small
from prefgrpo.report.run import Group
from prefgrpo.report.svg import tag

CELL, GAP, BAR = 40, 2, 50
IMAGE_PX = 128
SIDE = CELL - GAP


def draw_group(group: Group, ident: str) -> Markup:
    """The figure of one group; `ident` is unique on the page."""
    order = np.argsort(-np.nan_to_num(group.rates, nan=-1.0), kind="stable").tolist()
    size = len(order)
    body = [_images(group, order, ident)]
    for row, i in enumerate(order, 1):
        y = row * CELL
        body += [_cell(group, i, j, column * CELL, y, size <= 12) for column, j in enumerate(order, 1) if i != j]
        rate = "missing" if math.isnan(group.rates[i]) else f"{group.rates[i]:.2f}"
        body.append(tag("text", rate, x=(size + 1) * CELL + 4, y=y + CELL / 2 + 3))
    box = f"0 0 {(size + 1) * CELL + BAR} {(size + 1) * CELL}"
    svg = tag("svg", *body, viewBox=box, role="img", aria_label=f"verdicts on {group.prompt}")
    prompt = tag("div", group.prompt, class_="clamp", title=group.prompt)
    caption = tag("figcaption", prompt, tag("span", f"step {group.step}"))
    return tag("figure", caption, svg, class_="group wide" if size > 12 else "group")


def _images(group: Group, order: list[int], ident: str) -> Markup:
    """Each image once in <defs>, reused along both axes; an edit's source image goes into the corner."""
    uses, defs = [], []
    look = "sharp" if is_small(group.images[0]) else "smooth"
    for place, i in enumerate(order, 1):
        name = f"{ident}-{i}"
        image = data_uri(group.images[i], IMAGE_PX)
        defs.append(tag("image", href=image, width=SIDE, height=SIDE, id=name, class_=look))
        title = tag("title", f"image {i + 1} of {len(order)}, in the order of generation")
        uses += [tag("use", title, href=f"#{name}", x=x, y=y) for x, y in ((0, place * CELL), (place * CELL, 0))]
    if group.source is not None:
        title, look = tag("title", "source"), "sharp" if is_small(group.source) else "smooth"
        source = data_uri(group.source, IMAGE_PX)
        uses.append(tag("image", title, href=source, width=SIDE, height=SIDE, id=f"{ident}-source", class_=look))
    return tag("g", tag("defs", *defs), *uses)


def _cell(group: Group, i: int, j: int, x: int, y: int, written: bool) -> Markup:
    """P(image i beats image j), as a colour and (in small groups) a number."""
    count, place = float(group.counts[i, j]), {"x": x, "y": y, "width": SIDE, "height": SIDE}
    if not count > 0 or math.isnan(group.wins[i, j]):
        title = tag("title", f"image {i + 1} over image {j + 1}: no verdict")
        return tag("rect", title, class_="missing", **place, fill="url(#hatch)")
    p = float(group.wins[i, j]) / count
    title = tag("title", f"image {i + 1} over image {j + 1}: {p:.3f}, mean of {count:g}")
    strength = abs(p - 0.5) * 2
    out = tag("rect", class_="neutral", **place)
    out += tag("rect", title, class_="win" if p > 0.5 else "lose", **place, fill_opacity=strength)
    if written:
        out += tag("text", f"{p:.2f}", class_="number", x=x + SIDE / 2, y=y + SIDE / 2 + 4, text_anchor="middle")
    return tag("g", out)
