"""Request bodies of an OpenAI chat completion with images, and which images a server already holds.

Each medium is encoded and base64-encoded once, and its id is the hash of the encoded bytes, so an id never names other
pixels. The rubric stands before the images and labels are asked for by prefill, so that servers reuse their prefixes.
Invariants: the joined parts are valid JSON for any prompt; a medium's first request to a server carries its data and
the others name it; who waits for a medium carries none yet, so waits cannot form a ring.
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
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.judge.template import SOURCE, Template

FRAMES = 8
"""Frames of a clip that a judge sees, evenly spread from the first to the last."""
_KNOWN_MEDIA = 8192
_MIN_MISSES = 16
_GRACE_S = 0.1


def _png(media: Media) -> bytes:
    buffer = io.BytesIO()
    media.pil.save(buffer, "PNG", compress_level=1)  # the default level costs ten times a lossless WebP
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Media], bytes]] = {"jpeg": lambda m: m.jpeg, "webp": lambda m: m.webp, "png": _png}


@dataclass(frozen=True, eq=False)
class Encoded:
    """An image, or the frames of a clip, ready to be sent."""

    uuid: str
    """'sha256-…' of the encoded bytes."""
    images: tuple[tuple[str, bytes], ...]
    """(id, content part with its data and an open end) of the image or of each frame."""

    def part(self, carried: Collection[str] | None) -> bytes:
        """The content parts: without ids if `carried` is None, else with data if it holds the uuid, else by id."""
        if carried is None:
            return b",".join(data + b"}" for _, data in self.images)
        by_id = b'{"type":"image_url","image_url":null'
        shown = [(uuid, data if self.uuid in carried else by_id) for uuid, data in self.images]
        return b",".join(b'%s,"uuid":"%s"}' % (data, uuid.encode()) for uuid, data in shown)


def encode(media: Media, image_format: str, max_pixels: int = 0) -> Encoded:
    """Encode an image as one of FORMATS (all but jpeg are lossless), a clip as FRAMES images one after another.

    max_pixels: larger images are made smaller, 0: never. Raises ValueError for media without pixels or frames.
    """
    if 0 in media.pixels.shape:
        raise ValueError(f"it has no {'frames or ' if media.clip else ''}pixels: its shape is {media.pixels.shape}")
    images = []
    for frame in media.frames(FRAMES):
        data = FORMATS[image_format](_shrunk(frame, max_pixels))
        url = b'{"type":"image_url","image_url":{"url":"data:image/%s;base64,%s"}'
        images.append((_uuid(data), url % (image_format.encode(), base64.b64encode(data))))
    uuid = _uuid(b"".join(uuid.encode() for uuid, _ in images)) if media.clip else images[0][0]
    return Encoded(uuid, tuple(images))


def _uuid(data: bytes) -> str:
    return "sha256-" + hashlib.sha256(data).hexdigest()


def _shrunk(image: Media, max_pixels: int) -> Media:
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
    label_ids: tuple[int, ...] | None = None,
) -> bytes:
    """The request for a template's texts by name and the content parts of media and source images.

    label_ids: the labels' token ids, where they are known and the server takes `logprob_token_ids` (vLLM).
    """
    parts: list[bytes] = []
    for part in template.parts(texts.get("prompt", ""), texts):
        if part == SOURCE:
            parts += source
        else:
            parts.append(media[part] if isinstance(part, int) else _text(part))
    head = b'{"model":' + _json(model) + b',"messages":[{"role":"user","content":['
    return head + b",".join(parts) + b"]" + _tail(template, label_ids)


@lru_cache(maxsize=32)
def _tail(template: Template, label_ids: tuple[int, ...] | None) -> bytes:
    """Everything after the user's content: prefill, sampling, logprobs."""
    fields: dict[str, Any] = {"max_tokens": template.max_tokens, "temperature": 0, "seed": 0}
    turn = b"}]"
    if template.prefill:
        turn = b"}," + _json({"role": "assistant", "content": template.prefill}) + b"]"
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if template.answer == "soft":
        fields |= {"logprobs": True, "top_logprobs": 20}
        if label_ids:
            fields["logprob_token_ids"] = list(label_ids)
    return turn + b"," + _json(fields)[1:]


@lru_cache(maxsize=32)
def _text(text: str) -> bytes:
    """A text as a content part; those of a group's pairs are the same. Lone surrogates, which no tokenizer takes,
    become U+FFFD."""
    valid = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _json({"type": "text", "text": valid})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class MediaIds:
    """Which media one server holds, so that a request names them instead of carrying them again.

    A server has a medium once it has read the request that carries it, long before it answers. So requests that show
    it go `grace_s` after that one, or after its answer if that is sooner, and are repeated with data if the server did
    not know it yet.
    """

    def __init__(self, mode: str) -> None:
        """`mode`: JudgeConfig.media_ids."""
        self.mode = mode
        self.grace_s = _GRACE_S
        self.known: OrderedDict[str, None] = OrderedDict()
        self.requests = self.misses = 0
        self._carried: dict[str, asyncio.Event] = {}

    def used(self, vllm: bool) -> bool:
        """Whether ids replace data: not at a server that loses media (several API processes behind one port)."""
        unreliable = self.misses >= _MIN_MISSES and self.misses > 0.2 * self.requests
        return self.mode == "on" or (self.mode == "auto" and vllm and not unreliable)

    def on_the_way(self, uuids: Collection[str]) -> list[asyncio.Event]:
        """For each of the media that another request is carrying just now: the event after which it may be named."""
        return [event for u in uuids if (event := self._carried.get(u)) and not event.is_set()]

    async def claim(self, uuids: Collection[str]) -> tuple[set[str], float]:
        """(which of the media this request must carry, seconds of grace that it gave the others); waits until those may
        be named. The request must follow at once, and then `settle`."""
        while events := self.on_the_way(uuids):
            for event in events:
                await event.wait()
        mine = {u for u in uuids if u not in self.known and u not in self._carried}
        grace_s = self.grace_s if any(u in self._carried for u in uuids) else 0.0
        for uuid in mine:
            self._carried[uuid] = asyncio.Event()
            asyncio.get_running_loop().call_later(self.grace_s, self._carried[uuid].set)
        return mine, grace_s

    def settle(self, mine: set[str], success: bool) -> None:
        """The request that carried `mine` has ended; those that wait for it go on."""
        for uuid in mine:
            if success:
                self.known[uuid] = None
                self.known.move_to_end(uuid)
            if event := self._carried.pop(uuid, None):
                event.set()
        while len(self.known) > _KNOWN_MEDIA:
            self.known.popitem(last=False)

    def count(self, missed: bool, grace_s: float) -> None:
        """Count a request that named media; a miss after too short a grace lengthens it and is no loss."""
        if missed and grace_s:
            self.grace_s = max(self.grace_s, 2 * grace_s)
        else:
            self.requests += 1
            self.misses += missed
