"""The rewards that need no checkpoint, and the generic pairwise judge."""

import atexit
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge_server import JudgeServer
from PIL import Image, ImageDraw, ImageFont
from reward_case import Case

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample
from prefgrpo.tiny import scenes


def nothing(_: Path) -> dict[str, Any]:
    return {}


def judged(_: Path) -> dict[str, Any]:
    """A judge that prefers the brighter picture."""
    server = JudgeServer()
    atexit.register(server.__exit__)
    return {"judge": {"endpoints": [server.__enter__().url]}}


def noise() -> list[Sample]:
    """Pictures of different detail."""
    rng = np.random.default_rng(0)
    return [Sample("a picture", Media(rng.integers(0, 2**k, (48, 48, 3), np.uint8))) for k in (2, 5, 8)]


def drawn() -> list[Sample]:
    """One right caption, one wrong."""
    combos = [scenes.COMBOS[0], scenes.COMBOS[-1]]
    images = scenes.render([combos[0], combos[0]], torch.Generator().manual_seed(0))
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Sample(scenes.caption(c), Media(p)) for c, p in zip(combos, pixels, strict=True)]


def sign(text: str) -> np.ndarray:
    image = Image.new("RGB", (288, 224), "white")
    ImageDraw.Draw(image).text((16, 16), text, fill="black", font=ImageFont.load_default(40))
    return np.asarray(image)


def signs() -> list[Sample]:
    """The text that the prompt quotes, other text, and a prompt that quotes nothing."""
    prompts = ['a sign "Tea Room"', 'a sign "Harbour"', "a sign"]
    return [Sample(p, Media(sign("TEA ROOM"))) for p in prompts]


def signs_in_clips() -> list[Sample]:
    return [Sample(s.prompt, Media(np.stack([s.media.pixels] * 3))) for s in signs()]


def group() -> list[Sample]:
    """One prompt's pictures, from dark to bright."""
    return [Sample("a bright day", Media(np.full((32, 32, 3), level, np.uint8))) for level in (40, 120, 200)]


CASES = {
    "jpeg_compressibility": Case(nothing, noise),
    "jpeg_incompressibility": Case(nothing, noise),
    "scenes": Case(nothing, drawn),
    "ocr": Case(nothing, signs, needs="rapidocr_onnxruntime"),
    "video_ocr": Case(nothing, signs_in_clips, needs="rapidocr_onnxruntime"),
    "vlm_pairwise": Case(judged, group, group=True),
}
