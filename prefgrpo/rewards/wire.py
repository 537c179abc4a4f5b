"""Samples and scores as JSON, between a run and `prefgrpo reward serve`.

An image is the base64 of a lossless WebP (a PNG where it is too large for one), a clip is the list of its frames. A
number survives as it is, and what is missing is null with its reason. Invariant: `read_request` gives back the very
pixels that `sample_json` took, or raises WireError, which names the field.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Reward, Sample, Score

FORMATS = ("PNG", "WEBP", "JPEG")
"""Encodings that a server reads."""
_WEBP_MOST = 16383


class WireError(ValueError):
    """A request or an answer that cannot be read; the message names the field."""


def media_json(media: Media) -> bytes:
    """An image as a JSON string, a clip as a list of strings."""
    frames = [base64.b64encode(_lossless(frame)) for frame in media.frames()]
    return b'["' + b'","'.join(frames) + b'"]' if media.clip else b'"' + frames[0] + b'"'


def _lossless(image: Media) -> bytes:
    if max(image.pixels.shape) <= _WEBP_MOST:
        return image.webp
    buffer = io.BytesIO()
    image.pil.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def request_json(name: str, sample: Sample, media: bytes, source: list[bytes]) -> bytes:
    """Body of POST /score for one sample whose media are encoded."""
    told = (json.dumps(part, default=str).encode() for part in (name, sample.prompt, sample.meta))
    rest = (media, b",".join(source))
    return b'{"reward":%s,"samples":[{"prompt":%s,"meta":%s,"media":%s,"source":[%s]}]}' % (*told, *rest)


def read_request(raw: bytes, name: str, reward: type[Reward]) -> list[Sample]:
    """Samples of a POST /score. Raises WireError for what the reward cannot score."""
    value = _object(raw)
    if value.get("reward") not in (None, name):
        raise WireError(f"reward: this server scores '{name}', not {value['reward']!r}")
    rows = value.get("samples")
    if not isinstance(rows, list) or not rows:
        raise WireError('samples: expected a list of {"prompt": …, "media": …}, got ' + _shown(rows))
    return [_sample(row, f"samples[{k}]", reward) for k, row in enumerate(rows)]


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {_shown(value)}")
    return value


def _sample(row: Any, place: str, reward: type[Reward]) -> Sample:
    if not isinstance(row, dict):
        raise WireError(f"{place}: expected an object, got {_shown(row)}")
    if unknown := sorted(set(row) - {"prompt", "media", "source", "meta"}):
        raise WireError(f"{place}: unknown field(s) {', '.join(unknown)}; expected prompt, media, source, meta")
    prompt: Any
    prompt, source, meta = row.get("prompt"), row.get("source", []), row.get("meta", {})
    for key, found, kind in (("prompt", prompt, str), ("source", source, list), ("meta", meta, dict)):
        if not isinstance(found, kind):
            raise WireError(f"{place}.{key}: expected a {kind.__name__}, got {_shown(found)}")
    media = _media(row.get("media"), f"{place}.media")
    told = "video" if media.clip else "image"
    if told not in reward.takes:
        raise WireError(f"{place}.media: this reward takes {' or '.join(reward.takes)}, got {told}")
    if reward.needs_source and not source:
        raise WireError(f"{place}.source: this reward scores edits and needs the source image")
    if lacks := [key for key in reward.meta_keys if key not in meta]:
        raise WireError(f"{place}.meta: lacks {', '.join(lacks)}")
    return Sample(prompt, media, tuple(_media(s, f"{place}.source[{k}]") for k, s in enumerate(source)), meta)


def _media(value: Any, place: str) -> Media:
    if isinstance(value, str):
        return Media(_pixels(value, place))
    if not isinstance(value, list) or not value:
        raise WireError(f"{place}: expected base64 of an image, or a list of them for a clip, got {_shown(value)}")
    frames = [_pixels(frame, f"{place}[{k}]") for k, frame in enumerate(value)]
    if len({frame.shape for frame in frames}) > 1:
        raise WireError(f"{place}: the frames of a clip must have one size")
    return Media(np.stack(frames))


def _pixels(value: Any, place: str) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] of base64."""
    if not isinstance(value, str):
        raise WireError(f"{place}: expected base64 of an image, got {_shown(value)}")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{place}: not base64 ({error})") from error
    if not data:
        raise WireError(f"{place}: the image is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise WireError(f"{place}: {len(data)} bytes that cannot be read as {', '.join(FORMATS)}{why}") from error


def score_row(score: Score) -> dict[str, Any]:
    """A score as JSON: its value, or null and the reason, and its parts; what is not finite is null."""
    value, reason = _finite(score)
    row: dict[str, Any] = {"value": value}
    if value is None:
        row["reason"] = reason
    if score.parts:
        row["parts"] = {k: float(v) if math.isfinite(v) else None for k, v in score.parts.items()}
    return row


def scores_json(scores: list[Score]) -> bytes:
    """Body of the answer."""
    return json.dumps({"scores": [score_row(s) for s in scores]}, allow_nan=False).encode()


def read_scores(raw: bytes, count: int) -> list[Score]:
    """`count` scores of an answer; a value that is not finite is missing. Raises WireError."""
    rows = _object(raw).get("scores")
    if not isinstance(rows, list) or len(rows) != count:
        raise WireError(f"scores: expected a list of {count}, got {_shown(rows)}")
    return [_score(row, f"scores[{k}]") for k, row in enumerate(rows)]


def _score(row: Any, place: str) -> Score:
    if not isinstance(row, dict):
        raise WireError(f"{place}: expected an object, got {_shown(row)}")
    value, reason, parts = row.get("value"), row.get("reason", ""), row.get("parts", {})
    if isinstance(value, bool) or not isinstance(value, float | int | None) or not isinstance(parts, dict):
        raise WireError(f"{place}: expected a number or null and parts, got {_shown(row)}")
    if not all(isinstance(v, float | int | None) for v in parts.values()):
        raise WireError(f"{place}.parts: expected numbers, got {_shown(parts)}")
    found = {str(k): math.nan if v is None else _float(v) for k, v in parts.items()}
    number, why = _finite(Score(None if value is None else _float(value), str(reason), found))
    return Score(number, why, found)


def _float(value: float) -> float:
    """A number of a JSON text; an integer beyond the largest float is infinite, as 1e999 is."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(score: Score) -> tuple[float | None, str]:
    """(value, reason); a value that is not finite is missing."""
    if score.value is None:
        return None, score.reason or "the reward gave no reason"
    value = float(score.value)
    return (value, score.reason) if math.isfinite(value) else (None, f"the reward returned {value}")


def _shown(value: Any) -> str:
    """A value in at most 60 characters, with its type."""
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
