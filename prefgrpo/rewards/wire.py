"""A sample and its score between a run and `prefgrpo reward serve`: a multipart form, and one JSON object in return.

The form's field `sample` is {"reward", "prompt", "meta", "frames"}, and its files are the frames of the medium and then
of the source images, as lossless WebP (PNG if too large for WebP); `frames` has the number of frames of each of these,
0 for an image. Numbers are transferred exactly, and a missing value is null with its reason. Invariant: `read_sample`
returns exactly the pixels passed to `encode_frames`, or raises WireError, which names the field.
"""

from __future__ import annotations

import io
import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media, rgb
from prefgrpo.judge.body import png
from prefgrpo.rewards.base import Reward, Sample, Score

FORMATS = ("PNG", "WEBP", "JPEG")
"""Image formats that a server accepts."""
_WEBP_MOST = 16383
_BOUNDARY = secrets.token_hex(16).encode()
CONTENT_TYPE = f"multipart/form-data; boundary={_BOUNDARY.decode()}"


class WireError(ValueError):
    """An invalid request or reply; the message names the field."""


def encode_frames(media: Media) -> list[bytes]:
    """The files of an image, or of a clip's frames."""
    return [frame.webp if max(frame.pixels.shape) <= _WEBP_MOST else png(frame) for frame in media.frames()]


def request_body(name: str, sample: Sample, files: Sequence[Sequence[bytes]]) -> bytes:
    """Body of POST /score. files: the encoded frames of the medium and of each source image."""
    frames = [len(m.pixels) if m.clip else 0 for m in (sample.media, *sample.source)]
    fields = {"reward": name, "prompt": sample.prompt, "meta": sample.meta, "frames": frames}
    parts = [_part(b'name="sample"', json.dumps(fields, default=str).encode())]
    parts += [_part(b'name="frame"; filename="frame"', file) for one in files for file in one]
    return b"".join(parts) + b"--%s--\r\n" % _BOUNDARY


def _part(name: bytes, content: bytes) -> bytes:
    return b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (_BOUNDARY, name, content)


def read_sample(fields: str, files: Sequence[bytes], name: str, reward: type[Reward]) -> Sample:
    """Parse a form. Raises WireError for a sample that the reward cannot score."""
    row = _object(fields)
    prompt = row.get("prompt")
    meta = row.get("meta", {})
    counts = row.get("frames", [0] * len(files))
    if row.get("reward", name) != name:
        raise WireError(f"reward: this server scores '{name}', not {row['reward']!r}")
    if not isinstance(prompt, str) or not isinstance(meta, dict):
        raise WireError(f"sample: expected a text prompt and an object meta, got {_describe([prompt, meta])}")
    whole = isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)
    if not whole or not counts or sum(max(n, 1) for n in counts) != len(files):
        raise WireError(f"frames: expected the number of frames of each of {len(files)} files, got {_describe(counts)}")
    images = [_image(file, k) for k, file in enumerate(files)]
    media: list[Media] = []
    for count in counts:
        shown = [images.pop(0) for _ in range(max(count, 1))]
        if len({image.shape for image in shown}) > 1:
            raise WireError("frame: expected all frames of a clip to have one size")
        media.append(Media(np.stack(shown) if count else shown[0]))
    kind = "video" if media[0].clip else "image"
    if kind not in reward.takes:
        raise WireError(f"frames: this reward takes {' or '.join(reward.takes)}, got {kind}")
    if reward.needs_source and len(media) < 2:
        raise WireError("frames: this reward scores edits and needs the source image")
    if lacks := [key for key in reward.meta_keys if key not in meta]:
        raise WireError(f"meta: expected also {', '.join(lacks)}")
    return Sample(prompt, media[0], tuple(media[1:]), meta)


def _image(file: bytes, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        return np.array(rgb(Image.open(io.BytesIO(file), formats=FORMATS)))
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise WireError(f"frame {number}: expected a file that is {', '.join(FORMATS)}: {_describe(file)}") from error


def _object(raw: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {_describe(value)}")
    return value


def score_row(score: Score) -> dict[str, Any]:
    """A score as JSON: value, or null with the reason, and parts; non-finite values become null."""
    score = score.finite()
    row: dict[str, Any] = {"value": score.value} | ({"reason": score.reason} if score.value is None else {})
    if score.parts:
        row["parts"] = {k: float(v) if math.isfinite(v) else None for k, v in score.parts.items()}
    return row


def read_score(raw: bytes) -> Score:
    """Parse a reply; a non-finite value is missing. Raises WireError."""
    row = _object(raw)
    try:
        parts = {k: math.nan if v is None else float(v) for k, v in row.get("parts", {}).items()}
        score = Score(None if row["value"] is None else float(row["value"]), str(row.get("reason", "")), parts)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise WireError(f"expected a number or null and parts, got {_describe(row)}") from error
    return score.finite()


def _describe(value: Any) -> str:
    """A value for an error message: its type, and at most 60 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
