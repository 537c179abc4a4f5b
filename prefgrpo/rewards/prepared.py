"""Options of every reward that preprocess its images, source images and frames, as published code does.

    size: N    resize to N × N, bicubic, ignoring the aspect ratio        jpeg: Q    then compress as JPEG, quality Q

Invariant: the wrapped reward's whole interface shows, and rewards with the same options share the processed image,
which is computed once.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Annotated
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Question, Reward, Sample, answers_of, check_media

_cache: WeakKeyDictionary[Media, dict[tuple[int, int, int | None], Media]] = WeakKeyDictionary()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "prepare")


class PreprocessedReward(Reward):
    """Wraps a reward; resizes and compresses its images first."""

    def __init__(
        self,
        make: Callable[[], Reward],
        size: Annotated[int, Field(ge=0)] = 0,
        jpeg: Annotated[int, Field(ge=0, le=100)] = 0,
    ) -> None:
        """make: constructs the reward. size: pixels per side, 0: unchanged. jpeg: quality 1 to 100 (4:2:0), 0: none."""
        self.size = size
        self.jpeg = jpeg
        self.reward = make()
        for name in (*Reward.__annotations__, "keys", "tally", "close"):
            setattr(self, name, getattr(self.reward, name))

    @property
    def is_win_rate(self) -> bool:
        """The reward's."""
        return self.reward.is_win_rate

    def ask(self, asked: list[Question]) -> list[Answer]:
        """The reward's answers about the processed samples."""
        return answers_of(self.reward, [tuple(map(self._preprocess, samples)) for samples in asked])

    async def ask_one(self, *samples: Sample) -> Answer:
        """The reward's answer about the samples, which are processed in a worker thread."""
        loop = asyncio.get_running_loop()
        processed = [await loop.run_in_executor(_threads(), self._preprocess, sample) for sample in samples]
        return await self.reward.answer(*processed)

    def _preprocess(self, sample: Sample) -> Sample:
        return replace(sample, media=self._media(sample.media), source=tuple(map(self._media, sample.source)))

    def _media(self, media: Media) -> Media:
        """The processed medium (for a clip, the frames that the reward looks at); an invalid one is returned unchanged,
        so that the reward rejects it."""
        try:
            check_media(media)
        except ValueError:
            return media
        known = _cache.setdefault(media, {})
        if (key := (self.size, self.jpeg, self.frames)) not in known:
            frames = [self._pixels(frame.pil) for frame in media.frames(self.frames)]
            whole = len(frames) == len(media.pixels)
            known[key] = (
                Media(np.stack(frames), media.frame_rate if whole else None) if media.clip else Media(frames[0])
            )
        return known[key]

    def _pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        if self.size:
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        if self.jpeg:
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=self.jpeg)
            image = Image.open(buffer)
        return np.asarray(image)
