"""Request bodies for OpenAI chat completions with images.

Each medium is encoded and base64-encoded once. Its id is the hash of the encoded bytes, so an id always stands for the
same pixels. The rubric precedes the images, and labels follow a prefill, so that the server's prefix cache gets hits.
Invariant: the joined parts are valid JSON for any prompt.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.judge.template import FRAMES, MAX_PIXELS, SOURCE, Template

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


def chat_body(
    model: str,
    template: Template,
    texts: Mapping[str, str],
    media: Sequence[bytes],
    source: Sequence[bytes] = (),
    space: int | None = None,
) -> bytes:
    """Build the request from a template, its texts by marker name, and the content parts of media and source images.

    space: token that the server must write before the label (prefill.py).
    """
    parts: list[bytes] = []
    for part in template.parts(texts):
        if part == SOURCE:
            parts += source
        else:
            parts.append(media[part] if isinstance(part, int) else _text(part))
    head = b'{"model":' + _json(model) + b',"messages":[{"role":"user","content":['
    return head + b",".join(parts) + b"]" + _tail(template, space)


@lru_cache(maxsize=32)
def _tail(template: Template, space: int | None) -> bytes:
    """Everything after the user's content: prefill, sampling, logprobs, and the template's own fields."""
    fields: dict[str, Any] = {"max_tokens": template.max_tokens, "temperature": 0, "seed": 0}
    turn = b"}]"
    if template.prefill:
        turn = b"}," + _json({"role": "assistant", "content": template.prefill}) + b"]"
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if template.answer in ("soft", "word"):
        fields |= {"logprobs": True, "top_logprobs": 20}
    own = json.loads(template.request)
    if "max_completion_tokens" in own:
        del fields["max_tokens"]
    if space is not None:
        longest = "max_completion_tokens" if "max_completion_tokens" in own else "max_tokens"
        own |= {longest: 2, "allowed_token_ids": [space]}
    return turn + b"," + _json({key: value for key, value in (fields | own).items() if value is not None})[1:]


@lru_cache(maxsize=32)
def _text(text: str) -> bytes:
    """A text as a content part, cached because all pairs of a group share it. Lone surrogates, which tokenizers reject,
    become U+FFFD."""
    valid = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _json({"type": "text", "text": valid})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
