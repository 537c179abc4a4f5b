"""The judge's verdicts: a group as a G × G matrix of P(row beats column), and the judge's answers on single pairs.

Cells are blue where the row's image wins and orange where it loses, stronger the further from ½. Hatched: no verdict;
empty: not compared. A pair's contradiction is the distance between the two orders' probabilities that its second image
is better. Small images are lossless PNG, enlarged by integer factors; large ones are downscaled to WebP, clips loop.
Invariant: a missing verdict never looks like a tie.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.report.charts import tag
from prefgrpo.report.read import Answer, Group, Pair, Run

ROWS = 15
EXTREMES = 3
"""Pairs in a table of answers, and among the largest wins or losses."""
MAX_CHARS = 600
CELL = 40
GAP = 2
BAR = 50
IMAGE_PX = 128
PAIR_PX = 384
SIDE = CELL - GAP

SMALL = 128
"""Images up to this many pixels per side are embedded unchanged and enlarged without smoothing."""
CLIP_PX = 224
"""Longest side of a clip on the page."""


# ---- groups ----------------------------------------------------------------------------------------------------------


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
    uses = []
    defs = []
    for place, i in enumerate(order, 1):
        name = f"{ident}-{i}"
        image = data_uri(group.images[i], IMAGE_PX)
        defs.append(tag("image", href=image, width=SIDE, height=SIDE, id=name, class_=look(group.images[i])))
        title = tag("title", f"image {i + 1} of {len(order)}, in the order of generation")
        uses += [tag("use", title, href=f"#{name}", x=x, y=y) for x, y in ((0, place * CELL), (place * CELL, 0))]
    if group.source is not None:
        title = tag("title", "source")
        source = data_uri(group.source, IMAGE_PX)
        corner = {"width": SIDE, "height": SIDE, "id": f"{ident}-source", "class_": look(group.source)}
        uses.append(tag("image", title, href=source, **corner))
    return tag("g", tag("defs", *defs), *uses)


def _cell(group: Group, i: int, j: int, x: int, y: int, written: bool) -> Markup:
    """P(image i beats image j), as a colour and (in small groups) a number."""
    count = float(group.counts[i, j])
    place = {"x": x, "y": y, "width": SIDE, "height": SIDE}
    if not count > 0 or math.isnan(group.wins[i, j]):
        asked = not group.answers or any({a.first, a.second} == {i, j} for a in group.answers)
        title = tag("title", f"image {i + 1} and image {j + 1}: {'no verdict' if asked else 'not compared'}")
        return tag("rect", title, class_="missing" if asked else "unasked", **place)
    p = float(group.wins[i, j]) / count
    title = tag("title", f"image {i + 1} over image {j + 1}: {p:.3f}, mean of {count:g}")
    strength = abs(p - 0.5) * 2
    out = tag("rect", class_="neutral", **place)
    out += tag("rect", title, class_="win" if p > 0.5 else "lose", **place, fill_opacity=strength)
    if written:
        out += tag("text", f"{p:.2f}", class_="number", x=x + SIDE / 2, y=y + SIDE / 2 + 4, text_anchor="middle")
    return tag("g", out)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def answered(run: Run, pairs: Sequence[Pair]) -> list[tuple[str, list[Pair]]]:
    """(title, pairs) of the pairs with answers: the judge's largest losses and wins among the given ones, the newest,
    and those whose two orders contradict each other most. The newest have one of each prompt before a second one."""
    gains = [(gain(pair, run.judge), pair) for pair in pairs]
    known = [pair for p, pair in sorted(gains, key=lambda item: item[0]) if not math.isnan(p)]
    lost = [pair for pair in known if gain(pair, run.judge) < 0.5]
    won = [pair for pair in reversed(known) if gain(pair, run.judge) > 0.5]
    every = [*_trained_pairs(run), *(p for stored in run.stored.values() for p in stored.pairs if p.answers)]
    newest = max((pair.step for pair in every), default=0)
    turns = Counter[str]()
    recent = list[tuple[int, Pair]]()
    for pair in (pair for pair in every if pair.step == newest):
        recent.append((turns[pair.prompt], pair))
        turns[pair.prompt] += 1
    mixed = [pair for _, pair in sorted(recent, key=lambda item: item[0])]
    worst = sorted((pair for pair in every if contradiction(pair) > 0), key=lambda pair: -contradiction(pair))
    found = {
        "Largest losses among the images above": lost[:EXTREMES],
        "Largest wins among the images above": won[:EXTREMES],
        f"Newest verdicts (step {newest})": mixed[:ROWS],
        "Verdicts that contradict each other most": worst[:ROWS],
    }
    return [(title, some) for title, some in found.items() if some]


def contradiction(pair: Pair) -> float:
    """Distance between the answers of one judge in the two orders; 0 with only one of them."""
    found = [0.0]
    for a, b in combinations(pair.answers, 2):
        if a.judge == b.judge and a.first != b.first and not math.isnan(a.p_first + b.p_first):
            found.append(abs(_second_wins(a) - _second_wins(b)))
    return max(found)


def gain(pair: Pair, judge: str) -> float:
    """Mean P(second image is better) over a judge's answers, NaN without one."""
    found = [_second_wins(a) for a in pair.answers if a.judge == judge and not math.isnan(a.p_first)]
    return sum(found) / len(found) if found else math.nan


def rows(pair: Pair) -> list[tuple[str, str, str]]:
    """(shown first, verdict, text) of every answer."""
    out = []
    for answer in pair.answers:
        p = _second_wins(answer)
        winner = "neither" if p == 0.5 else pair.names[int(p > 0.5)]
        verdict = "no verdict" if math.isnan(p) else f"{winner} ({max(p, 1 - p):.3f})"
        out.append((pair.names[answer.first], verdict, f"{answer.reason} {answer.raw}".strip()[:MAX_CHARS] or "–"))
    return out


def pictures(pair: Pair, most: int = IMAGE_PX) -> list[tuple[str, Markup]]:
    """(name, <img>) of both images; small clips as stills, large images after their source."""
    shown = dict(zip(pair.names, pair.images, strict=True))
    if most == IMAGE_PX:
        shown = {name: still(image) for name, image in shown.items()}
    elif pair.source is not None:
        shown = {"source": pair.source, **shown}
    return [(name, picture(image, f"{pair.prompt}: {name}", most, pair.seconds)) for name, image in shown.items()]


def _second_wins(answer: Answer) -> float:
    """P(image 1 is better), NaN without a verdict."""
    return answer.p_first if answer.first == 1 else 1.0 - answer.p_first


def _trained_pairs(run: Run) -> list[Pair]:
    """Every pair of the kept groups that a judge was asked about."""
    out = []
    for group in run.groups:
        for i, j in combinations(range(len(group.rates)), 2):
            own = [a for a in group.answers if {a.first, a.second} == {i, j}]
            numbered = [replace(a, first=int(a.first == j), second=int(a.first == i)) for a in own]
            if own:
                images = (group.images[i], group.images[j])
                names = (f"image {i + 1}", f"image {j + 1}")
                out.append(Pair(group.step, f"training step {group.step}", group.prompt, names, images, numbered))
    return out


# ---- images ----------------------------------------------------------------------------------------------------------


def look(pixels: NDArray[np.uint8]) -> str:
    """Style of an image [H, W, 3] or a clip [F, H, W, 3]: sharp if it is embedded unchanged, else smooth."""
    return "sharp" if max(pixels.shape[-3:-1]) <= SMALL else "smooth"


def still(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image itself, or the middle frame of a clip [F, H, W, 3]."""
    return media[len(media) // 2] if media.ndim == 4 else media


def data_uri(media: NDArray[np.uint8], most: int, seconds: float = 2.0) -> str:
    """`data:` URI of an image of at most `most` pixels per side, or of a clip that plays for this many seconds."""
    clip = media.ndim == 4
    images = [Image.fromarray(frame) for frame in (media if clip else [media])]
    if max(images[0].size) > max(most := CLIP_PX if clip else most, SMALL):
        for image in images:
            image.thumbnail((most, most), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    kind = "webp"
    if clip:
        options = {"duration": round(1000 * seconds / len(images)), "loop": 0, "quality": 60, "method": 4}
        images[0].save(buffer, "WEBP", save_all=True, append_images=images[1:], **options)
    elif look(media) == "sharp":
        kind = "png"
        images[0].save(buffer, "PNG", optimize=True)
    else:
        images[0].save(buffer, "WEBP", quality=82, method=4)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(media: NDArray[np.uint8], caption: str, most: int, seconds: float) -> Markup:
    """An <img> element for an image or animated clip, with alternative text."""
    height, width = media.shape[-3:-1]
    element = Markup('<img src="{}" alt="{}" class="{}" width="{}" height="{}">')
    return element.format(data_uri(media, most, seconds), caption, look(media), width, height)
