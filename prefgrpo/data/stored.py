"""Location of an image or a clip: a file of its own, a cell of a parquet table, or an array of a run.

Only the part of a table that was read last is cached: pixels are decoded whenever they are needed. Invariant:
every image is 8-bit sRGB, upright, on white, whatever the file contains (`media.rgb`).
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from prefgrpo.data.media import UNREADABLE, Media, rgb
from prefgrpo.data.tables import DataError, known_as

CLIPS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif")
TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""


class Shape(NamedTuple):
    """Shape of an image (upright) or a clip."""

    height: int
    width: int
    frames: int | None = None
    """None: an image."""
    rate: float | None = None
    """A clip's frames per second; None: unknown."""


@dataclass(frozen=True)
class StoredMedia:
    """Location of an image or a clip; equal for equal locations."""

    file: str
    part: tuple[str | int, ...] = ()
    """Inside the file: (column, row, …) of a parquet table, rows counting from 0, or (array, index, …) of an npz; …: an
    index within that. () for a file of its own."""

    def __str__(self) -> str:
        return f"{self.file}{list(self.part)}" if self.part else self.file

    def read(self) -> Media:
        """The pixels. Raises DataError if they cannot be read."""
        if not self.part:
            return read_media(Path(self.file))
        return Media(np.asarray(self.image()))

    def image(self) -> Image.Image:
        """The pixels as an image. Raises DataError if they cannot be read, or are a clip."""
        try:
            with self._open() as image:
                return rgb(image)
        except UNREADABLE as error:
            raise DataError(f"{self}: {_why(error)}") from error

    def shape(self, decode: bool) -> Shape:
        """Height, width, and of a clip frames and rate; decode: read all pixels, not only an image's header. Raises
        DataError if they cannot be read."""
        if not self.part and Path(self.file).suffix.lower() in CLIPS:
            if find_spec("imageio_ffmpeg") is None:
                raise DataError(f"{self}: reading clips needs imageio-ffmpeg (pip install imageio-ffmpeg)")
            clip = self.read()
            frames, height, width, _ = clip.pixels.shape
            return Shape(height, width, frames, clip.frame_rate)
        try:
            with self._open() as image:
                width, height = image.size
                turned = image.getexif().get(ExifTags.Base.Orientation) in TURNED
                if decode:
                    image.draft("L", (1, 1))  # decodes a JPEG at the smallest scale, which is enough for the check
                    image.load()
        except UNREADABLE as error:
            raise DataError(f"{self}: {_why(error)}") from error
        return Shape(width, height) if turned else Shape(height, width)

    def content(self) -> str:
        """Equal for equal contents (of a large file, at 16 places), whatever the names."""
        if not self.part:
            return file_digest(self.file)
        if self.file.endswith(".npz"):
            return repr(self)
        return hashlib.sha256(self._bytes()).hexdigest()

    def identity(self) -> tuple[str | int, ...]:
        """Cache key of what is made from the pixels: the file with its size and time, and the part."""
        stat = Path(self.file).stat()
        return (self.file, stat.st_size, stat.st_mtime_ns, *self.part)

    def _open(self) -> Image.Image:
        """The undecoded image. Raises one of UNREADABLE."""
        if not self.part:
            return Image.open(self.file)
        if self.file.endswith(".npz"):
            name, *index = self.part
            return Image.fromarray(_array(self.file, str(name))[tuple(map(int, index))])
        return Image.open(io.BytesIO(self._bytes()))

    def _bytes(self) -> bytes:
        """Content of a cell of a parquet table."""
        name, row, *within = self.part
        value = _cell(self.file, str(name), int(row))
        for index in within:
            value = value[index]
        content: bytes = value["bytes"] if isinstance(value, dict) else value
        return content


def file_digest(path: str | Path) -> str:
    """Hex digest of a file's size and content; of more than 256 KiB, of 16 parts of 16 KiB, evenly spaced."""
    size = Path(path).stat().st_size
    parts = 16 if size > 2**18 else 1
    found = hashlib.sha256(str(size).encode())
    with Path(path).open("rb") as file:
        for k in range(parts):
            file.seek((size - 2**14) * k // max(parts - 1, 1) if parts > 1 else 0)
            found.update(file.read(2**14 if parts > 1 else size))
    return found.hexdigest()


def read_media(file: Path) -> Media:
    """The pixels of an image or clip. Raises DataError if the file cannot be read."""
    try:
        if not file.stat().st_size:
            raise ValueError("it is empty: 0 bytes")
        if file.suffix.lower() in CLIPS:
            return _read_clip(file)
        with Image.open(file) as image:
            return Media(np.array(rgb(image)))
    except UNREADABLE as error:
        raise DataError(f"{file.name} cannot be read ({_why(error)})") from error


def _why(error: Exception) -> str:
    """First line of the error: ffmpeg's further lines contain memory addresses."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _read_clip(file: Path) -> Media:
    """All frames of a clip, uint8 [F, H, W, 3], and the frame rate that the file states."""
    import imageio.v3 as imageio  # needs imageio-ffmpeg; the caller checks that it is installed

    frames = [np.asarray(frame) for frame in imageio.imiter(file)]
    if not frames:
        raise DataError(f"{file.name} has no frames")
    rate = imageio.immeta(file).get("fps")
    if rate is None:  # of a GIF, whose frames each last some ms
        lasting = sum(imageio.immeta(file, index=k).get("duration", 0) for k in range(len(frames)))
        rate = 1000 * len(frames) / lasting if lasting else None
    return Media(np.stack(frames)[..., :3].astype(np.uint8, copy=False), rate)


@lru_cache(maxsize=2)
def _array(file: str, name: str) -> NDArray[Any]:
    """An array of an npz."""
    with np.load(file, allow_pickle=False) as arrays:
        return arrays[name]


def _cell(file: str, column: str, row: int) -> Any:
    """A cell of a parquet table; the row group that was read last is cached."""
    for group, (first, count) in enumerate(_row_groups(file)):
        if row < first + count:
            return _column_of(file, group, column)[row - first].as_py()
    raise ValueError(f"{file} has no row {row + 1}")


@lru_cache(maxsize=64)
def _row_groups(file: str) -> tuple[tuple[int, int], ...]:
    """(first row, number of rows) of every row group of a parquet table."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.ParquetFile(file).metadata
    counts = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
    return tuple(zip(accumulate(counts, initial=0), counts, strict=False))


@lru_cache(maxsize=4)
def _column_of(file: str, group: int, column: str) -> Any:
    """A column of a row group, as an arrow array; column: as `tables.rows` calls it."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    name = next(name for name in table.schema_arrow.names if known_as(name) == column)
    return table.read_row_group(group, columns=[name]).column(0)
