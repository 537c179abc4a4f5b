"""`scenes`: the programmatic scorer of the demo's scenes, for evaluation only (never used as a training reward).

value = mean of the three hits (colour, shape, place); part `all` = 1 if all three are right
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Question, Reward, Sample
from prefgrpo.tiny.scenes import COMBOS, caption, hits

PARTS = ("colour", "shape", "place")


class Scenes(Reward):
    """Fraction of the caption's attributes that a scene shows."""

    probe: ClassVar[dict[str, Any]] = {"prompt": caption(COMBOS[0])}

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample; missing if the prompt is not one of the demo's captions."""
        return [self._one(sample) for (sample,) in asked]

    def _one(self, sample: Sample) -> Answer:
        image = torch.from_numpy(np.ascontiguousarray(sample.media.pixels)).permute(2, 0, 1)[None].float() / 255.0
        try:
            hit = [float(h) for h in hits(image, [sample.prompt])[0]]
        except ValueError as error:
            return Answer(None, str(error))
        return Answer(sum(hit) / 3.0, parts=dict(zip(PARTS, hit, strict=True)) | {"all": float(all(hit))})
