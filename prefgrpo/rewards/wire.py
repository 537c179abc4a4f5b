"""Samples and scores as JSON, between a run and `prefgrpo reward serve`.

An image is a base64 lossless WebP (a PNG if it is too large for WebP), a clip is the list of its frames. Numbers are
transferred exactly, and a missing value is null with its reason. Invariant: `read_request` returns exactly the pixels
passed to `media_json`, or raises WireError, which names the field.
"""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import numpy as np
from PIL import Image

from prefgrpo.data.media import Media, rgb
from prefgrpo.judge.body import png
from prefgrpo.rewards.base import Reward, Sample, Score

FORMATS = ("PNG", "WEBP", "JPEG")
"""Image formats that a server accepts."""
_WEBP_MOST = 16383


class WireError(ValueError):
    """An invalid request or reply; the message names the field."""


def media_json(media: Media) -> bytes:
    """An image as a JSON string, a clip as a list of strings."""
    files = [frame.webp if max(frame.pixels.shape) <= _WEBP_MOST else png(frame) for frame in media.frames()]
    frames = [b'"%s"' % base64.b64encode(file) for file in files]
    return b"[%s]" % b",".join(frames) if media.clip else frames[0]


def request_json(name: str, sample: Sample, media: bytes, source: list[bytes]) -> bytes:
    """Body of POST /score for one sample with encoded media."""
    texts = (json.dumps(part, default=str).encode() for part in (name, sample.prompt, sample.meta))
    form = b'{"reward":%s,"samples":[{"prompt":%s,"meta":%s,"media":%s,"source":[%s]}]}'
    return form % (*texts, media, b",".join(source))


def read_request(raw: bytes, name: str, reward: type[Reward]) -> list[Sample]:
    """Parse the samples of a POST /score. Raises WireError for samples that the reward cannot score."""
    body = _object(raw)
    if body.get("reward") not in (None, name):
        raise WireError(f"reward: this server scores '{name}', not {body['reward']!r}")
    rows = body.get("samples")
    if not isinstance(rows, list) or not rows:
        raise WireError('samples: expected a list of {"prompt": …, "media": …}, got ' + _describe(rows))
    return [_sample(row, f"samples[{k}]", reward) for k, row in enumerate(rows)]


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    found: dict[str, Any] = _expect(dict, value, "the body")
    return found


def _expect(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, kind):
        raise WireError(f"{place}: expected a {kind.__name__}, got {_describe(value)}")
    return value


def _sample(row: Any, place: str, reward: type[Reward]) -> Sample:
    if unknown := sorted(set(_expect(dict, row, place)) - {"prompt", "media", "source", "meta"}):
        raise WireError(f"{place}: unknown field(s) {', '.join(unknown)}; expected prompt, media, source, meta")
    prompt = _expect(str, row.get("prompt"), f"{place}.prompt")
    source = _expect(list, row.get("source", []), f"{place}.source")
    meta = _expect(dict, row.get("meta", {}), f"{place}.meta")
    media = _media(row.get("media"), f"{place}.media")
    kind = "video" if media.clip else "image"
    if kind not in reward.takes:
        raise WireError(f"{place}.media: this reward takes {' or '.join(reward.takes)}, got {kind}")
    if reward.needs_source and not source:
        raise WireError(f"{place}.source: this reward scores edits and needs the source image")
    if lacks := [key for key in reward.meta_keys if key not in meta]:
        raise WireError(f"{place}.meta: expected also {', '.join(lacks)}")
    return Sample(prompt, media, tuple(_media(s, f"{place}.source[{k}]") for k, s in enumerate(source)), meta)


def _media(value: Any, place: str) -> Media:
    frames = value if isinstance(value, list) else [value]
    try:
        images = [Image.open(io.BytesIO(base64.b64decode(f, validate=True)), formats=FORMATS) for f in frames]
        pixels = np.stack([np.array(rgb(image)) for image in images])
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        expected = f"base64 of a file that is {', '.join(FORMATS)}, or a list of such frames of one size"
        raise WireError(f"{place}: expected {expected}, got {_describe(value)}") from error
    return Media(pixels if isinstance(value, list) else pixels[0])


def score_row(score: Score) -> dict[str, Any]:
    """A score as JSON: value, or null with the reason, and parts; non-finite values become null."""
    score = score.finite()
    row: dict[str, Any] = {"value": score.value} | ({"reason": score.reason} if score.value is None else {})
    if score.parts:
        row["parts"] = {k: float(v) if math.isfinite(v) else None for k, v in score.parts.items()}
    return row


def scores_json(scores: list[Score]) -> bytes:
    """Body of the reply."""
    return json.dumps({"scores": [score_row(s) for s in scores]}, allow_nan=False).encode()


def read_scores(raw: bytes, count: int) -> list[Score]:
    """Parse the `count` scores of a reply; non-finite values are missing. Raises WireError."""
    rows = _object(raw).get("scores")
    if not isinstance(rows, list) or len(rows) != count:
        raise WireError(f"scores: expected a list of {count}, got {_describe(rows)}")
    return [_score(row, f"scores[{k}]") for k, row in enumerate(rows)]


def _score(row: Any, place: str) -> Score:
    try:
        parts = {k: math.nan if v is None else float(v) for k, v in row.get("parts", {}).items()}
        score = Score(None if row["value"] is None else float(row["value"]), str(row.get("reason", "")), parts)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise WireError(f"{place}: expected a number or null and parts, got {_describe(row)}") from error
    return score.finite()


def _describe(value: Any) -> str:
    """A value for an error message: its type, and at most 60 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
