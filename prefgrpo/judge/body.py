"""Request bodies for OpenAI chat completions with images, and a record of which images a server already holds.

Each medium is encoded and base64-encoded once. Its id is the hash of the encoded bytes, so an id always stands for the
same pixels. The rubric precedes the images, and labels follow a prefill, so that the server's prefix cache gets hits.
Invariants: the joined parts are valid JSON for any prompt; the first request with a medium carries its data and later
ones refer to it by id; a request that waits for a medium is not uploading one, so requests cannot deadlock.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.judge.template import SOURCE, Template

FRAMES = 8
"""Number of frames of a clip shown to the judge, evenly spaced from first to last."""
_KNOWN_MEDIA = 8192
_MIN_MISSES = 16
_GRACE_S = 0.1
T = TypeVar("T")


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

    def part(self, carried: Collection[str] | None) -> bytes:
        """The content parts: data only if `carried` is None; data and id if it contains our uuid; else id only."""
        if carried is None:
            return b",".join(data + b"}" for _, data in self.images)
        by_id = b'{"type":"image_url","image_url":null'
        shown = [(uuid, data if self.uuid in carried else by_id) for uuid, data in self.images]
        return b",".join(b'%s,"uuid":"%s"}' % (data, uuid.encode()) for uuid, data in shown)


def encode(media: Media, image_format: str, max_pixels: int = 0) -> Encoded:
    """Encode an image in one of FORMATS (all lossless except jpeg), or a clip as a sequence of FRAMES images.

    max_pixels: larger images are downscaled; 0: never. Raises ValueError for media without pixels or frames.
    """
    if 0 in media.pixels.shape:
        raise ValueError(f"it has no {'frames or ' if media.clip else ''}pixels: its shape is {media.pixels.shape}")
    images = []
    for frame in media.frames(FRAMES):
        data = FORMATS[image_format](_downscale(frame, max_pixels))
        url = b'{"type":"image_url","image_url":{"url":"data:image/%s;base64,%s"}'
        images.append((_uuid(data), url % (image_format.encode(), base64.b64encode(data))))
    uuid = _uuid(b"".join(uuid.encode() for uuid, _ in images)) if media.clip else images[0][0]
    return Encoded(uuid, tuple(images))


class EncodeError(RuntimeError):
    """A medium that could not be encoded; the message says why."""


class Encodings(Generic[T]):
    """Encodes each medium once, in a worker thread; the result is kept as long as the medium."""

    def __init__(self, encode: Callable[[Media], T]) -> None:
        self._encode = encode
        self.futures: WeakKeyDictionary[Media, asyncio.Future[T]] = WeakKeyDictionary()

    async def get(self, media: Media) -> T:
        """The medium's encoding. Raises EncodeError."""
        if media not in self.futures:
            self.futures[media] = asyncio.get_running_loop().run_in_executor(None, self._encode, media)
        try:
            return await asyncio.shield(self.futures[media])
        except (OSError, ValueError, TypeError, SystemError) as error:  # raised by PIL for pixels it cannot write
            raise EncodeError(f"an image could not be encoded ({type(error).__name__}: {error})") from error


def _uuid(data: bytes) -> str:
    return "sha256-" + hashlib.sha256(data).hexdigest()


def _downscale(image: Media, max_pixels: int) -> Media:
    """The image with at most `max_pixels` pixels and the same aspect ratio."""
    height, width = image.pixels.shape[:2]
    if not max_pixels or height * width <= max_pixels:
        return image
    scale = (max_pixels / (height * width)) ** 0.5
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    return Media(np.asarray(image.pil.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)))


def chat_body(
    model: str,
    template: Template,
    texts: Mapping[str, str],
    media: Sequence[bytes],
    source: Sequence[bytes] = (),
    options: Mapping[str, Any] | None = None,
) -> bytes:
    """Build the request from a template, its texts by marker name, and the content parts of media and source images.

    options: other fields of the request.
    """
    parts: list[bytes] = []
    for part in template.parts(texts):
        if part == SOURCE:
            parts += source
        else:
            parts.append(media[part] if isinstance(part, int) else _text(part))
    head = b'{"model":' + _json(model) + b',"messages":[{"role":"user","content":['
    tail = _tail(template)
    if options:
        tail = tail[:-1] + b"," + _json(options)[1:]
    return head + b",".join(parts) + b"]" + tail


@lru_cache(maxsize=32)
def _tail(template: Template) -> bytes:
    """Everything after the user's content: prefill, sampling, logprobs."""
    fields: dict[str, Any] = {"max_tokens": template.max_tokens, "temperature": 0, "seed": 0}
    turn = b"}]"
    if template.prefill:
        turn = b"}," + _json({"role": "assistant", "content": template.prefill}) + b"]"
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if template.answer == "soft":
        fields |= {"logprobs": True, "top_logprobs": 20}
    return turn + b"," + _json(fields)[1:]


@lru_cache(maxsize=32)
def _text(text: str) -> bytes:
    """A text as a content part, cached because all pairs of a group share it. Lone surrogates, which tokenizers reject,
    become U+FFFD."""
    valid = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _json({"type": "text", "text": valid})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class MediaIds:
    """Which media one server holds, so that later requests refer to them by id instead of resending the data.

    A server has a medium once it has read the request that carries it, long before it answers that request. Other
    requests with the medium are therefore sent `grace_s` after the first, or on its answer if that comes sooner, and
    are repeated with data if the server did not know the medium yet.
    """

    def __init__(self) -> None:
        self.grace_s = _GRACE_S
        self.known: OrderedDict[str, bool] = OrderedDict()
        """Media that the server holds (True), or that are sent without id (False)."""
        self.requests = 0
        self.misses = 0
        self._uploads: dict[str, asyncio.Event] = {}

    def enabled(self, supported: bool) -> bool:
        """Whether to send ids instead of data: not to a server that loses media (several API processes on one port)."""
        unreliable = self.misses >= _MIN_MISSES and self.misses > 0.2 * self.requests
        return supported and not unreliable

    def trusts(self, media: Collection[str]) -> bool:
        """Whether a request with these media may have ids."""
        return bool(media) and all(self.known.get(uuid, True) for uuid in media)

    def distrust(self, media: Collection[str]) -> None:
        """Send these media without their ids from now on."""
        self._set(media, False)

    def busy(self, media: Collection[str]) -> list[asyncio.Event]:
        """For each medium that another request is uploading: the event after which it may be referred to by id."""
        return [event for uuid in media if (event := self._uploads.get(uuid)) and not event.is_set()]

    async def uploaded(self, media: Collection[str]) -> None:
        """Wait until no other request is uploading any of these media."""
        while events := self.busy(media):
            await events[0].wait()

    def claim(self, media: Collection[str]) -> tuple[set[str], bool]:
        """(media that this request must carry, whether it names others before their upload is answered).

        The caller must send the request at once, then call `finish`.
        """
        early = any(uuid in self._uploads for uuid in media)
        carried = {uuid for uuid in media if uuid not in self.known and uuid not in self._uploads}
        for uuid in carried:
            self._uploads[uuid] = asyncio.Event()
            asyncio.get_running_loop().call_later(self.grace_s, self._uploads[uuid].set)
        return carried, early

    def finish(self, carried: Collection[str], success: bool) -> None:
        """Call when the request that carried these media has ended; wakes the requests that wait for them."""
        self._set(carried if success else (), True)
        for uuid in carried:
            self._uploads.pop(uuid).set()

    def count(self, missed: bool, early: bool) -> None:
        """Count a request that used ids. A miss of one that came early doubles the grace period instead."""
        if missed and early:
            self.grace_s *= 2
        else:
            self.requests += 1
            self.misses += missed

    def _set(self, media: Collection[str], held: bool) -> None:
        for uuid in media:
            self.known[uuid] = held
            self.known.move_to_end(uuid)
        while len(self.known) > _KNOWN_MEDIA:
            self.known.popitem(last=False)
