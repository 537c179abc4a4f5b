"""The source images of edits, resized and centre-cropped to the output size, so that any of them can share a batch.

Each set of files is read once, by a worker thread, and kept while it is among the last KEPT that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image, ImageOps

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt, read_source

KEPT = 256
_WORKERS = ThreadPoolExecutor(4, "sources")


@dataclass(frozen=True)
class Sources:
    """The source images of a prompt at one output size; none for a prompt that is no edit."""

    files: tuple[str, ...] = ()
    height: int = 0
    width: int = 0

    def identity(self) -> str:
        """What the encoded images are stored under: paths, sizes and times of the files, and the output size."""
        stats = [(file, Path(file).stat()) for file in self.files]
        return repr([(file, s.st_size, s.st_mtime_ns) for file, s in stats] + [self.height, self.width])

    def images(self) -> tuple[Image.Image, ...]:
        """The images, in order. Raises DataError for a file that is not an image."""
        return _reading(self).result() if self.files else ()

    def media(self) -> tuple[Media, ...]:
        """The images as rewards and judges take them. Samples of a prompt share them, so that each is encoded once."""
        return tuple(_in_use.setdefault((self, k), Media(np.asarray(im))) for k, im in enumerate(self.images()))


NONE = Sources()
_in_use: WeakValueDictionary[tuple[Sources, int], Media] = WeakValueDictionary()
"""The images of the samples that exist."""


def sources_of(prompt: Prompt, sizes: SamplingConfig) -> Sources:
    """A prompt's source images at the output size."""
    return Sources(prompt.source, sizes.height, sizes.width) if prompt.source else NONE


def prefetch(sources: Iterable[Sources]) -> None:
    """Start to read images that will be needed soon; does not wait."""
    for one in sources:
        if one.files:
            _reading(one)


@lru_cache(maxsize=KEPT)
def _reading(sources: Sources) -> Future[tuple[Image.Image, ...]]:
    return _WORKERS.submit(_read, sources)


def _read(sources: Sources) -> tuple[Image.Image, ...]:
    size = (sources.width, sources.height)
    return tuple(ImageOps.fit(read_source(file), size, Image.Resampling.LANCZOS) for file in sources.files)
