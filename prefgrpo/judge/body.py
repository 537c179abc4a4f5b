"""Request bytes of an OpenAI chat completion with images, joined from parts that are made once.

Each medium is encoded and base64-ed once and its id is the hash of the encoded bytes, so an id never names other
pixels. Invariant: joining the parts gives valid JSON for any prompt.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.judge.template import SOURCE, Template


def _png(media: Media) -> bytes:
    """PNG at the fastest level: the default level costs ten times a lossless WebP."""
    buffer = io.BytesIO()
    media.pil.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Media], bytes]] = {"jpeg": lambda m: m.jpeg, "webp": lambda m: m.webp, "png": _png}


@dataclass(frozen=True, eq=False)
class Encoded:
    """One medium, ready to be sent."""

    uuid: str
    """'sha256-…' of the encoded bytes."""
    with_data: bytes
    """Content part that carries data and id."""
    id_only: bytes
    """Content part for a server that knows the id."""
    plain: bytes
    """Content part without an id, for servers that have none."""


FRAMES = 8
"""Frames of a clip that a judge sees, evenly spread from the first to the last."""


def encode(media: Media, image_format: str, max_pixels: int = 0) -> Encoded:
    """Encode an image as one of FORMATS (all but jpeg are lossless), a clip as FRAMES images one after another.

    max_pixels: larger images are made smaller, 0: never. Raises ValueError for media without pixels or frames.
    """
    if 0 in media.pixels.shape:
        raise ValueError(f"it has no {'frames or ' if media.clip else ''}pixels: its shape is {media.pixels.shape}")
    if not media.clip:
        return _encode_image(_shrunk(media, max_pixels), image_format)
    parts = [_encode_image(_shrunk(frame, max_pixels), image_format) for frame in media.frames(FRAMES)]
    uuid = "sha256-" + hashlib.sha256(b"".join(part.uuid.encode() for part in parts)).hexdigest()
    joined = (b",".join(getattr(part, name) for part in parts) for name in ("with_data", "id_only", "plain"))
    return Encoded(uuid, *joined)


def _shrunk(media: Media, max_pixels: int) -> Media:
    """The image with at most `max_pixels` pixels and the same sides' ratio."""
    height, width = media.pixels.shape[:2]
    if not max_pixels or height * width <= max_pixels:
        return media
    scale = (max_pixels / (height * width)) ** 0.5
    size = max(int(width * scale), 1), max(int(height * scale), 1)
    small = Image.fromarray(media.pixels).resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    return Media(np.asarray(small))


def _encode_image(media: Media, image_format: str) -> Encoded:
    data = FORMATS[image_format](media)
    uuid = "sha256-" + hashlib.sha256(data).hexdigest()
    url = b'{"type":"image_url","image_url":{"url":"data:image/%s;base64,%s"}' % (
        image_format.encode(),
        base64.b64encode(data),
    )
    tag = b',"uuid":"%s"}' % uuid.encode()
    return Encoded(uuid, url + tag, b'{"type":"image_url","image_url":null' + tag, url + b"}")


@dataclass(frozen=True)
class RequestKind:
    """What all requests of a judge have in common."""

    model: str
    template: Template
    seed: int
    label_ids: tuple[int, ...] | None
    """Token ids of the labels, where the judge's tokenizer is known."""
    vllm: bool
    """The server is vLLM: it takes `logprob_token_ids`."""

    @cached_property
    def tail(self) -> bytes:
        """Everything after the user's content: prefill, sampling, logprobs."""
        t = self.template
        fields: dict[str, Any] = {"max_tokens": t.max_tokens, "temperature": 0, "seed": self.seed}
        turn = b"}]"
        if t.prefill:
            turn = b"}," + _json({"role": "assistant", "content": t.prefill}) + b"]"
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if t.answer == "soft":
            fields |= {"logprobs": True, "top_logprobs": 20}
            if self.label_ids and self.vllm:
                fields["logprob_token_ids"] = list(self.label_ids)
        return turn + b"," + _json(fields)[1:]

    def body(
        self,
        prompt: str,
        media: Sequence[bytes],
        source: Sequence[bytes] = (),
        values: Mapping[str, str] | None = None,
    ) -> bytes:
        """The request for a prompt, other texts by name, and the content parts of media and source images."""
        head = b'{"model":' + _json(self.model) + b',"messages":[{"role":"user","content":['
        parts: list[bytes] = []
        for part in self.template.parts(prompt, values):
            if part == SOURCE:
                parts += source
            else:
                parts.append(media[part] if isinstance(part, int) else _text(part))
        return head + b",".join(parts) + b"]" + self.tail


request_kind = lru_cache(maxsize=32)(RequestKind)
"""A RequestKind, made once."""


@lru_cache(maxsize=32)
def _text(text: str) -> bytes:
    """A text as a content part; those of a group's pairs are the same."""
    return _json({"type": "text", "text": _whole(text)})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def _whole(text: str) -> str:
    """The text with surrogate pairs as one character, and halves of pairs, which no tokenizer takes, as U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
