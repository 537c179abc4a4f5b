"""The demo's scenes: one coloured shape on a dark 32x32 background, its captions and its scorer.

120 combinations (8 colours x 3 shapes x 5 places) x 3 caption templates. Shapes are soft-edged
signed-distance fields with jittered position, area, colour and background. The combinations are split
by (colour + 2 shape + 3 place) mod 5 into test (0), dev (1) and train (2, 3, 4): 24 / 24 / 72.
Invariant: nothing here is learned. `read` finds background, mask, colour, shape and place by fixed
rules and is correct on rendered scenes (tests/tiny/test_scenes.py), so it can score generated images.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 32
PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.75, 0.15),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.90, 0.10),
    "purple": (0.60, 0.10, 0.80),
    "cyan": (0.10, 0.85, 0.90),
    "orange": (1.00, 0.50, 0.05),
    "white": (0.97, 0.97, 0.97),
}
COLOURS: tuple[str, ...] = tuple(PALETTE)
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
PLACES: dict[str, tuple[float, float]] = {  # caption phrase -> centre (x, y) in pixels
    "on the left": (8.5, 15.5),
    "on the right": (22.5, 15.5),
    "at the top": (15.5, 8.5),
    "at the bottom": (15.5, 22.5),
    "in the centre": (15.5, 15.5),
}
PHRASES: tuple[str, ...] = tuple(PLACES)
TEMPLATES: tuple[str, ...] = ("{}", "a picture of {}", "there is {}")
COUNTS: tuple[int, int, int] = (len(COLOURS), len(SHAPES), len(PHRASES))
UNREADABLE = -1  # returned by `read` for an attribute that it cannot determine

_RGB = torch.tensor(list(PALETTE.values()))  # [8, 3]
_CENTRES = torch.tensor(list(PLACES.values()))  # [5, 2] x, y
_YY, _XX = torch.meshgrid(torch.arange(SIZE).float(), torch.arange(SIZE).float(), indexing="ij")
_AREA_PX = (80.0, 140.0)  # drawn area
_READABLE_PX = (45.0, 260.0)  # areas that count as one shape
_MASK_CONTRAST = 0.22  # a pixel belongs to the shape if it differs this much from the background
_MAX_COLOUR_DISTANCE = 0.35
_MIN_SHAPE_IOU = 0.7
_MAX_PLACE_PX = 4.5
_TRIANGLE_BASE = 1.1  # base / height


class Combo(NamedTuple):
    """A scene's attributes, as indices into COLOURS, SHAPES and PHRASES."""

    colour: int
    shape: int
    place: int


COMBOS: list[Combo] = [Combo(c, s, p) for c in range(COUNTS[0]) for s in range(COUNTS[1]) for p in range(COUNTS[2])]


def _split_of(combo: Combo) -> str:
    residue = (combo.colour + 2 * combo.shape + 3 * combo.place) % 5
    return {0: "test", 1: "dev"}.get(residue, "train")


SPLITS: dict[str, list[Combo]] = {
    name: [combo for combo in COMBOS if _split_of(combo) == name] for name in ("train", "dev", "test")
}


def caption(combo: Combo, template: int = 0) -> str:
    """The caption of `combo` in one of the three TEMPLATES, e.g. 'a red circle on the left'."""
    colour = COLOURS[combo.colour]
    article = "an" if colour[0] in "aeiou" else "a"
    thing = f"{article} {colour} {SHAPES[combo.shape]} {PHRASES[combo.place]}"
    return TEMPLATES[template].format(thing)


_BY_CAPTION: dict[str, Combo] = {caption(combo, t): combo for combo in COMBOS for t in range(len(TEMPLATES))}
WORDS: list[str] = sorted({word for text in _BY_CAPTION for word in text.split()})


def parse_caption(text: str) -> Combo:
    """The combination that a caption names; ValueError if it is not one of the demo's captions."""
    combo = _BY_CAPTION.get(" ".join(text.split()).lower())
    if combo is None:
        raise ValueError(f"expected one of the demo's captions, such as {caption(COMBOS[0])!r}, got {text!r}")
    return combo


def prompts(split: str) -> list[str]:
    """All captions of a split ('train', 'dev' or 'test'), combination by combination."""
    return [caption(combo, t) for combo in SPLITS[split] for t in range(len(TEMPLATES))]


def _distances(centre: Tensor, area: Tensor) -> Tensor:
    """Signed distance (< 0 inside) from each pixel to each shape with the given centroid and area.

    centre [n, 2] (x, y), area [n] -> [n, 3 shapes, 32, 32]. The triangle points up.
    """
    x0, y0, a = (v[:, None, None] for v in (centre[:, 0], centre[:, 1], area))
    dx = _XX - x0
    dy = _YY - y0
    circle = (dx**2 + dy**2).sqrt() - (a / math.pi).sqrt()
    square = torch.maximum(dx.abs(), dy.abs()) - a.sqrt() / 2
    height = (2 * a / _TRIANGLE_BASE).sqrt()
    norm = math.hypot(1, _TRIANGLE_BASE / 2)
    side = (dx.abs() - _TRIANGLE_BASE / 2 * (dy + 2 * height / 3)) / norm
    triangle = torch.maximum(dy - height / 3, side)
    return torch.stack([circle, square, triangle], 1)


def render(combos: Sequence[Combo] | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one random scene per combination -> float32 [n, 3, 32, 32] in [0, 1]."""
    colour, shape, place = torch.as_tensor(combos, dtype=torch.long).unbind(1)
    n = len(colour)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    centre = _CENTRES[place] + 3 * (uniform(n, 2) - 0.5)
    area = _AREA_PX[0] + (_AREA_PX[1] - _AREA_PX[0]) * uniform(n)
    distance = _distances(centre, area)[torch.arange(n), shape]
    inside = torch.sigmoid(-2.5 * distance)[:, None]
    ground = 0.08 + 0.3 * uniform(n, 1, 1, 1) + 0.06 * (uniform(n, 3, 1, 1) - 0.5)
    ink = (_RGB[colour] + 0.1 * (uniform(n, 3) - 0.5)).clamp(0, 1)[:, :, None, None]
    return (ground * (1 - inside) + ink * inside).clamp(0, 1)


def _to_world_size(images: Tensor) -> Tensor:
    images = images.detach().float().cpu().nan_to_num(0.0).clamp(0, 1)
    height, width = images.shape[2:]
    if (height, width) == (SIZE, SIZE):
        return images
    if min(height, width) >= SIZE:
        return F.interpolate(images, (SIZE, SIZE), mode="area")
    return F.interpolate(images, (SIZE, SIZE), mode="bilinear", align_corners=False)


class Evidence(NamedTuple):
    """How close n images are to every possible attribute; all float32."""

    colour: Tensor
    """[n, 8] distance of the shape's colour from each of COLOURS, in RGB of 0 … 1."""
    shape: Tensor
    """[n, 3] intersection over union with each of SHAPES at the same centroid and area."""
    place: Tensor
    """[n, 5] distance of the centroid from each of PHRASES, in pixels of 32 x 32."""
    pixels: Tensor
    """[n] size of the shape in pixels of 32 x 32."""


def evidence(images: Tensor) -> Evidence:
    """The measurements behind `read`, for images [n, 3, H, W] in [0, 1]."""
    x = _to_world_size(images)
    border = torch.cat([x[:, :, 0], x[:, :, -1], x[:, :, :, 0], x[:, :, :, -1]], 2)
    ground = border.median(2).values[:, :, None, None]
    contrast = (x - ground).abs().amax(1)  # [n, 32, 32]
    mask = (contrast > _MASK_CONTRAST).float()
    pixels = mask.sum((1, 2))
    area = pixels.clamp(min=1)
    centroid = torch.stack([(mask * _XX).sum((1, 2)), (mask * _YY).sum((1, 2))], 1) / area[:, None]

    core = mask * (contrast > 0.6 * contrast.amax((1, 2), keepdim=True))
    ink = (x * core[:, None]).sum((2, 3)) / core.sum((1, 2)).clamp(min=1)[:, None]
    ideal = (_distances(centroid, area) < 0).float()  # each shape at this centroid and area
    union = torch.maximum(ideal, mask[:, None]).sum((2, 3)).clamp(min=1)
    iou = (ideal * mask[:, None]).sum((2, 3)) / union
    return Evidence(torch.cdist(ink, _RGB), iou, torch.cdist(centroid, _CENTRES), pixels)


def read(images: Tensor) -> Tensor:
    """Attributes of images [n, 3, H, W] in [0, 1] -> long [n, 3] (colour, shape, place; -1: unreadable)."""
    seen = evidence(images)
    colour_distance, colour = seen.colour.min(1)
    iou, shape = seen.shape.max(1)
    place_distance, place = seen.place.min(1)
    sure = torch.stack(
        [colour_distance < _MAX_COLOUR_DISTANCE, iou > _MIN_SHAPE_IOU, place_distance < _MAX_PLACE_PX], 1
    )
    sized = (seen.pixels > _READABLE_PX[0]) & (seen.pixels < _READABLE_PX[1])
    return torch.where(sure & sized[:, None], torch.stack([colour, shape, place], 1), UNREADABLE)


def hits(images: Tensor, captions: Sequence[str]) -> Tensor:
    """Which of (colour, shape, place) each image gets right -> bool [n, 3].

    images: float [n, 3, H, W] in [0, 1]; captions: n of the demo's captions.
    """
    asked = torch.tensor([parse_caption(text) for text in captions]).view(-1, 3)
    return read(images) == asked
