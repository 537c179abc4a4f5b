"""Cases of the registry test, which runs every registered reward: those without a checkpoint, and the CLIP family.

tiny_rewards.py makes checkpoints; reward_cases_vlm.py has the rewards that query a judge, reward_cases_own.py those
that need a separate environment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge_server import JudgeServer
from PIL import Image, ImageDraw, ImageFont
from tiny_media import grey
from tiny_rewards import MAKERS

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample
from prefgrpo.tiny import scenes

GRID = 'Two cats, a 1x2 grid. Warm light. [LEFT]: a cat that says "hi." [RIGHT]: another cat sleeps.'


@dataclass(frozen=True)
class Case:
    """How to build a reward without downloads, and samples for it to score."""

    options: Callable[[Path], dict[str, Any]]
    """Creates a tiny checkpoint in the folder (or starts a server) and returns the reward's options."""
    samples: Callable[[], list[Sample]]
    """The samples to score."""
    needs: str = ""
    """Optional library; the case is skipped if it is not installed."""


def nothing(_: Path) -> dict[str, Any]:
    return {}


def judged(_: Path) -> dict[str, Any]:
    """Options with a judge that prefers the brighter image."""
    return {"judge": {"endpoints": [JudgeServer().__enter__().url]}}


def noise() -> list[Sample]:
    """Images with different amounts of detail."""
    rng = np.random.default_rng(0)
    return [Sample("a picture", Media(rng.integers(0, 2**k, (48, 48, 3), np.uint8))) for k in (2, 5, 8)]


def drawn() -> list[Sample]:
    """One image with the right caption, one with a wrong caption."""
    combos = [scenes.COMBOS[0], scenes.COMBOS[-1]]
    images = scenes.render([combos[0], combos[0]], torch.Generator().manual_seed(0))
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Sample(scenes.caption(c), Media(p)) for c, p in zip(combos, pixels, strict=True)]


def sign(text: str) -> np.ndarray:
    image = Image.new("RGB", (288, 224), "white")
    ImageDraw.Draw(image).text((16, 16), text, fill="black", font=ImageFont.load_default(40))
    return np.asarray(image)


def signs() -> list[Sample]:
    """An image of the quoted text, one of other text, and a prompt that quotes nothing."""
    prompts = ['a sign "Tea Room"', 'a sign "Harbour"', "a sign"]
    return [Sample(p, Media(sign("TEA ROOM"))) for p in prompts]


def signs_in_clips() -> list[Sample]:
    """The same in clips, cropped to the line of text, which needs no detection."""
    return [Sample(s.prompt, Media(np.stack([s.media.pixels[12:64, 8:280]] * 3))) for s in signs()]


def group() -> list[Sample]:
    """Images of one prompt, from dark to bright."""
    return [Sample("a bright day", grey(level)) for level in (40, 120, 200)]


def picture(seed: int, high: int = 40, wide: int = 56) -> Media:
    """A smooth image, which stays distinguishable from others after resizing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (high // 8, wide // 8, 3), np.uint8)
    return Media(coarse.repeat(8, 0).repeat(8, 1))


def pictures() -> list[Sample]:
    """Two images of one prompt, one of another."""
    return [Sample(p, picture(k)) for k, p in enumerate(["a red cat", "a red cat", "two dogs on a hill"])]


def edits() -> list[Sample]:
    """Two edits of the same source image, and one edit of two source images."""
    source = (picture(8),)
    more = Sample("add both", picture(2), (picture(8), picture(9)))
    return [Sample("add a hat", picture(0), source), Sample("add a hat", picture(1), source), more]


def grids() -> list[Sample]:
    """Two samples whose prompt asks for a grid, and one whose prompt does not."""
    return [Sample(GRID, picture(k)) for k in range(2)] + [Sample("a 1920x1080 photo", picture(2))]


SAMPLES = {"image_similarity": edits, "subfig_clipT": grids}


CASES = {
    "jpeg_compressibility": Case(nothing, noise),
    "jpeg_incompressibility": Case(nothing, noise),
    "scenes": Case(nothing, drawn),
    "ocr": Case(nothing, signs, needs="rapidocr"),
    "video_ocr": Case(lambda _: {"detect": False}, signs_in_clips, needs="rapidocr"),
    "vlm_pairwise": Case(judged, group),
} | {name: Case(lambda folder, name=name: MAKERS[name](folder / name), SAMPLES.get(name, pictures)) for name in MAKERS}
