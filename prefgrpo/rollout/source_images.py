"""The source images of edits, resized and centre-cropped to the output size, so that any of them can share a batch.

Each set of files is read once, by a worker thread, and kept while it is among the last KEPT that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt, place_of, read_source
from prefgrpo.data.stored import StoredMedia

KEPT = 256


@dataclass(frozen=True)
class SourceImages:
    """The source images of a prompt at one output size; none for a prompt that is not an edit."""

    files: tuple[str | StoredMedia, ...] = ()
    height: int = 0
    width: int = 0

    def identity(self) -> str:
        """Cache key of the encoded images: paths, sizes and times of the files, and the output size."""
        return repr([place_of(file).identity() for file in self.files] + [self.height, self.width])

    def images(self) -> tuple[Image.Image, ...]:
        """The images, in order. Raises DataError for a file that is not an image."""
        return _reading(self).result() if self.files else ()

    def media(self) -> tuple[Media, ...]:
        """The images as rewards and judges take them. Samples of a prompt share them, so that each is encoded once."""
        return tuple(_in_use.setdefault((self, k), Media(np.asarray(im))) for k, im in enumerate(self.images()))


NONE = SourceImages()
_in_use: WeakValueDictionary[tuple[SourceImages, int], Media] = WeakValueDictionary()
"""The images of the samples that exist."""


def sources_of(prompt: Prompt, sizes: SamplingConfig) -> SourceImages:
    """A prompt's source images at the output size."""
    return SourceImages(prompt.source, sizes.height, sizes.width) if prompt.source else NONE


def as_arrays(of_prompts: Sequence[Sequence[Media]]) -> dict[str, NDArray[Any]]:
    """The source images of P prompts as arrays for a file: `sources` uint8 [n, H, W, 3], one prompt's after another's,
    and `source_counts` [P]; none if no prompt has a source."""
    every = [media.pixels for of_prompt in of_prompts for media in of_prompt]
    counts = np.array([len(of_prompt) for of_prompt in of_prompts])
    return {"sources": np.stack(every), "source_counts": counts} if every else {}


def side_by_side(arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8] | None]:
    """Each prompt's source images, uint8 [H, n · W, 3], from the arrays of `as_arrays`; None for one without."""
    each = np.split(arrays["sources"], np.cumsum(arrays["source_counts"])[:-1])
    return [np.concatenate(list(images), axis=1) if len(images) else None for images in each]


def prefetch(sources: Iterable[SourceImages]) -> None:
    """Start to read images that will be needed soon; does not wait."""
    for one in sources:
        if one.files:
            _reading(one)


@cache
def readers() -> ThreadPoolExecutor:
    """Threads that read and resize files, made at their first use."""
    return ThreadPoolExecutor(4, "images")


@lru_cache(maxsize=KEPT)
def _reading(sources: SourceImages) -> Future[tuple[Image.Image, ...]]:
    return readers().submit(_read, sources)


def _read(sources: SourceImages) -> tuple[Image.Image, ...]:
    size = (sources.width, sources.height)
    return tuple(fit(read_source(file), size) for file in sources.files)


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle of an image at the size (width, height), resized with Lanczos."""
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
