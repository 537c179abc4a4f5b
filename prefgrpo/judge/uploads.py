"""Media on their way to a server: each is encoded once, uploaded once, and then named by its id.

The id is the hash of the encoded bytes, so it always stands for the same pixels. The first request with a medium
carries its data. Others with it wait for that answer, at most _GRACE_S: a server has a medium once it has read the
request, long before it answers. Invariant: a request whose images the server may not have, or may have confused, is
sent with data.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.judge.http import Failure
from prefgrpo.judge.template import FRAMES, MAX_PIXELS

T = TypeVar("T")
IDS_FROM = (0, 32)
"""First vLLM to which images are sent by id: it recovers if its API process and engine disagree on which they hold
(vLLM pull request 46747); before, such an image could stop the engine. Tested with 0.32. Can go when servers
before 0.32 are refused."""
_MISS = ("Cache miss for", "Failed to apply")
"""vLLM's refusals of a request that names a medium that it does not hold."""
_GRACE_S = 0.25
_MISSES = 3
_MISS_SHARE = 0.05
"""Number and share of misses; beyond both, a server gets no more ids: servers behind a load balancer do not share
images."""


# ---- encoding --------------------------------------------------------------------------------------------------------


def png(media: Media) -> bytes:
    """PNG, fast."""
    buffer = io.BytesIO()
    media.pil.save(buffer, "PNG", compress_level=1)  # the default level takes ten times as long as a lossless WebP
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Media], bytes]] = {"jpeg": lambda m: m.jpeg, "webp": lambda m: m.webp, "png": png}


@dataclass(frozen=True, eq=False)
class Encoded:
    """An image, or the frames of a clip, ready to be sent."""

    uuid: str
    """'sha256-…' of the encoded bytes."""
    images: tuple[tuple[str, bytes], ...]
    """(id, JSON content part with its data, lacking the closing brace) of the image or of each frame."""

    def part(self, carried: set[Encoded] | None) -> bytes:
        """The content parts: data only if `carried` is None; data and id if we are among them; else id only."""
        if carried is None:
            return b",".join(data + b"}" for _, data in self.images)
        by_id = b'{"type":"image_url","image_url":null'
        shown = [(uuid, data if self in carried else by_id) for uuid, data in self.images]
        return b",".join(b'%s,"uuid":"%s"}' % (data, uuid.encode()) for uuid, data in shown)


def encode(media: Media, image_format: str, frames: int = FRAMES, max_pixels: int = MAX_PIXELS) -> Encoded:
    """Encode an image in one of FORMATS (all lossless except jpeg), or a clip as a sequence of images.

    frames: maximum number of frames of a clip, evenly spaced. max_pixels: larger images are downscaled. Raises
    ValueError for media without pixels or frames.
    """
    if 0 in media.pixels.shape:
        raise ValueError(f"it has no {'frames or ' if media.clip else ''}pixels: its shape is {media.pixels.shape}")
    images = []
    for frame in media.frames(frames):
        data = FORMATS[image_format](downscale(frame, max_pixels))
        url = b'{"type":"image_url","image_url":{"url":"data:image/%s;base64,%s"}'
        images.append((_uuid(data), url % (image_format.encode(), base64.b64encode(data))))
    uuid = _uuid(b"".join(uuid.encode() for uuid, _ in images)) if media.clip else images[0][0]
    return Encoded(uuid, tuple(images))


class EncodeError(RuntimeError):
    """A medium that could not be encoded; the message says why."""


class Encodings(Generic[T]):
    """Encodes each medium once per way, in threads of its own (those of the event loop resolve host names, so requests
    would wait for images); the result is kept as long as the medium."""

    def __init__(self, encode: Callable[..., T]) -> None:
        self._encode = encode
        self._threads = ThreadPoolExecutor(2, "encode")
        self.futures: WeakKeyDictionary[Media, dict[tuple[Any, ...], asyncio.Future[T]]] = WeakKeyDictionary()

    async def get(self, media: Media, *how: Any) -> T:
        """encode(media, *how). Raises EncodeError."""
        known = self.futures.setdefault(media, {})
        if how not in known:
            known[how] = asyncio.get_running_loop().run_in_executor(self._threads, self._encode, media, *how)
        try:
            return await asyncio.shield(known[how])
        except (OSError, ValueError, TypeError, SystemError) as error:  # raised by PIL for pixels it cannot write
            raise EncodeError(f"an image could not be encoded ({type(error).__name__}: {error})") from error


def _uuid(data: bytes) -> str:
    return "sha256-" + hashlib.sha256(data).hexdigest()


def downscale(image: Media, max_pixels: int) -> Media:
    """The image with at most `max_pixels` pixels and the same aspect ratio."""
    height, width = image.pixels.shape[:2]
    if height * width <= max_pixels:
        return image
    scale = (max_pixels / (height * width)) ** 0.5
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    return Media(np.asarray(image.pil.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)))


# ---- ids -------------------------------------------------------------------------------------------------------------


class NotHeld(Exception):
    """The server does not hold a medium that a request named."""


class MediaIds:
    """Which media one server holds; used on the event loop only."""

    def __init__(self) -> None:
        self.supported = False
        self.requests = 0
        """Requests by id."""
        self.misses = 0
        """Those for an image that the server did not hold."""
        self.sent: WeakKeyDictionary[Encoded, asyncio.Event] = WeakKeyDictionary()
        """Medium → set when it may be named."""
        self.unnamed: WeakSet[Encoded] = WeakSet()
        """Media of failed or cancelled requests, which are sent with data and without id from then on: vLLM's API
        process may believe that the engine has an image that it does not have, and would drop data sent with the same
        id."""

    @asynccontextmanager
    async def sending(self, media: set[Encoded]) -> AsyncIterator[set[Encoded] | None]:
        """Inside it, a request with these media is sent and answered: with the data of those that it yields, and the
        ids of all; None: with data only. Raises NotHeld for the server's refusal of an id: send it again with data."""
        carried = await self._claim(media)
        if carried is None:
            yield None
            return
        answered = False
        try:
            yield carried
            answered = True
        except Failure as failure:
            if any(text in str(failure) for text in _MISS):
                self.misses += 1
                raise NotHeld(str(failure)) from failure
            raise
        finally:
            if not answered:  # failed, or cancelled at the step's deadline
                self.unnamed.update(media)
            self._release(carried, answered)

    async def _claim(self, media: set[Encoded]) -> set[Encoded] | None:
        """The media whose data a request must carry; None: all, without ids."""
        while waiting := [self.sent[m] for m in media if m in self.sent and not self.sent[m].is_set()]:
            await waiting[0].wait()
        off = self.misses > max(_MISSES, _MISS_SHARE * self.requests)
        if off or not self.supported or not self.unnamed.isdisjoint(media):
            return None
        self.requests += 1
        carried = {m for m in media if m not in self.sent}
        for medium in carried:
            self.sent[medium] = asyncio.Event()
            asyncio.get_running_loop().call_later(_GRACE_S, self.sent[medium].set)
        return carried

    def _release(self, carried: set[Encoded], answered: bool) -> None:
        """The request that carried these media has ended."""
        for medium in carried:
            event = self.sent.get(medium)
            if event:
                event.set()
            if not answered:
                self.sent.pop(medium, None)


def takes_ids(version: bytes) -> bool:
    """Whether a reply of /version is from a vLLM that may get images by id (IDS_FROM)."""
    try:
        major, minor, *_ = json.loads(version)["version"].split(".")
        return (int(major), int(minor)) >= IDS_FROM
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
