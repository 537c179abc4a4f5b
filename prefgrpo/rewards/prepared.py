"""Options that every pointwise reward takes: its pictures are changed before it sees them.

    size: N    resized to N × N, bicubic, whatever their sides' ratio        jpeg: Q    then saved as JPEG, quality Q

What published rewards do on the way to a reward's server; sources of edits and frames of clips are changed likewise.
Invariant: rewards with the same two options share the changed picture, and it is made once.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score, unusable

_changed: WeakKeyDictionary[Media, dict[tuple[int, int], Media]] = WeakKeyDictionary()


class Prepared(PointwiseReward):
    """A reward whose pictures are resized and compressed before they reach it."""

    def __init__(self, make: Callable[[], PointwiseReward], size: int = 0, jpeg: int = 0) -> None:
        """make: gives the reward. size: pixels a side, 0: as they are. jpeg: quality 1 to 100 (4:2:0), 0: none."""
        if size < 0 or not 0 <= jpeg <= 100:
            raise RewardError(f"expected size of at least 0 and jpeg from 0 to 100, got {size} and {jpeg}")
        self.size, self.jpeg, self.reward = size, jpeg, make()
        for name in ("takes", "needs_source", "meta_keys", "streams", "close"):
            setattr(self, name, getattr(self.reward, name))

    def score(self, samples: list[Sample]) -> list[Score]:
        """The reward's scores of the changed samples."""
        return self.reward.score([self._prepared(s) for s in samples])

    def submit(self, sample: Sample) -> Future[Score]:
        """Send the changed sample without waiting."""
        try:
            return self.reward.submit(self._prepared(sample))
        except (OSError, ValueError) as error:  # what PIL raises for sides that JPEG cannot have
            failed: Future[Score] = Future()
            failed.set_exception(error)
            return failed

    def _prepared(self, sample: Sample) -> Sample:
        return replace(sample, media=self._media(sample.media), source=tuple(map(self._media, sample.source)))

    def _media(self, media: Media) -> Media:
        """The medium changed; one that no reward can score stays as it is, for the reward to refuse."""
        if unusable(media):
            return media
        known = _changed.setdefault(media, {})
        if (key := (self.size, self.jpeg)) not in known:
            frames = [self._pixels(frame.pil) for frame in media.frames()]
            known[key] = Media(np.stack(frames) if media.clip else frames[0])
        return known[key]

    def _pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        if self.size:
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        if self.jpeg:
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=self.jpeg)
            image = Image.open(buffer)
        return np.asarray(image)
