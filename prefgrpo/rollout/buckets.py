"""Sizes of images and clips from files: each group has the bucket whose aspect ratio is nearest to that of most of its
members (in a tie, to that of the first one, which is the chosen one).

Buckets have about as many pixels as rollout.height × rollout.width, and sides that the family takes; a batch has one.
Invariant: buckets and assignments depend only on the configuration, the model's sizes and the files' shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.pairs import PairGroup
from prefgrpo.data.stored import Shape
from prefgrpo.data.tables import DataError, refusal
from prefgrpo.models.base import Adapter
from prefgrpo.rollout.embeddings import Entry, entries_of
from prefgrpo.rollout.samples import Fitted, chosen_frames
from prefgrpo.rollout.source_images import sources_of

RATIOS = (9 / 16, 2 / 3, 3 / 4, 1.0, 4 / 3, 3 / 2, 16 / 9)
"""Width / height of the buckets besides the run's own, before sides are rounded."""
OFF = 0.1
"""How much a bucket's number of pixels may differ from the run's, as a share of it: coarse sides allow no more."""


def buckets(
    adapter: Adapter, sampling: SamplingConfig, fits: Callable[[SamplingConfig], bool] = lambda sizes: True
) -> list[SamplingConfig]:
    """The run's own size first, then those of RATIOS that the model takes and `fits` accepts."""
    area = sampling.height * sampling.width
    unit = adapter.unit
    found = [sampling]
    for ratio in RATIOS:
        height = max(1, round(math.sqrt(area / ratio) / unit)) * unit
        width = max(1, round(area / height / unit)) * unit
        sizes = replace(sampling, height=height, width=width)
        if abs(height * width / area - 1) <= OFF and sizes not in found and _takes(adapter, sizes) and fits(sizes):
            found.append(sizes)
    return found


def _takes(adapter: Adapter, sizes: SamplingConfig) -> bool:
    try:
        adapter.latent_shape(sizes)
    except ValueError:
        return False
    return True


def bucket_of(group: PairGroup, sizes: Sequence[SamplingConfig]) -> SamplingConfig:
    """The bucket of a group."""
    votes = Counter(_nearest(shape, sizes) for shape in group.shapes)
    return votes.most_common(1)[0][0]  # in a tie, the first member's


def _nearest(shape: Shape, sizes: Sequence[SamplingConfig]) -> SamplingConfig:
    wanted = _log_ratio(shape.height, shape.width)
    return min(sizes, key=lambda size: abs(_log_ratio(size.height, size.width) - wanted))


def _log_ratio(height: int, width: int) -> float:
    return math.log(width / height)


def check_samples(groups: Sequence[PairGroup], adapter: Adapter, sampling: SamplingConfig) -> None:
    """Raise DataError if the family cannot learn from files, or with every group that is not what it makes: images, or
    clips that are long enough."""
    if adapter.with_sound:
        raise DataError(f"data.pairs: {type(adapter).__name__} makes clips with sound, which pairs from files lack")
    frames = adapter.frames(sampling) or 1
    rate = adapter.frame_rate
    bad: dict[int, str] = {}
    for group in groups:
        for sample, shape in zip(group.samples, group.shapes, strict=True):
            if frames == 1 and (shape.frames or 1) > 1:
                bad[group.prompt.line] = f"{sample} is a clip of {shape.frames} frames, expected an image"
            elif frames > 1 and shape.frames is None:
                bad[group.prompt.line] = f"{sample} is an image, expected a clip of {frames} frames"
            elif frames > 1 and chosen_frames(shape, frames, rate) is None:
                needs = f"{frames} frames" + (f" at {rate:g} per second" if shape.rate and rate else "")
                has = f"{shape.frames}" + (f" at {shape.rate:g}" if shape.rate else "")
                bad[group.prompt.line] = f"{sample} is too short: expected {needs}, got {has}"
    if bad:
        raise DataError(refusal(groups[0].where.rpartition(", line ")[0], bad))


def fitted(group: PairGroup, adapter: Adapter, sizes: SamplingConfig) -> list[Entry]:
    """The entries of a group's members in its bucket, which `Embeddings.get` turns into latents."""
    frames = adapter.frames(sizes)
    rate = None if (frames or 1) == 1 else adapter.frame_rate
    return [Entry(None, sample=Fitted(one, sizes.height, sizes.width, frames, rate)) for one in group.samples]


def pair_entries(groups: Sequence[PairGroup], adapter: Adapter, sizes: Sequence[SamplingConfig]) -> list[Entry]:
    """Everything that training on groups encodes, without duplicates, in the groups' order; an
    `Adapter.outline` is enough as the adapter."""
    found: dict[Entry, None] = {}
    for group in groups:
        size = bucket_of(group, sizes)
        texts = entries_of(type(adapter), group.prompt, sources_of(group.prompt, size), size, adapter.guided(size))
        found |= dict.fromkeys(fitted(group, adapter, size))
        found |= {entry: None for entry in texts if entry is not None}
    return list(found)


def describe(groups: Sequence[PairGroup], sizes: Sequence[SamplingConfig]) -> list[str]:
    """Lines for the start of a run: groups per bucket, and how many samples are enlarged or lose much by the crop."""
    of_groups = [bucket_of(group, sizes) for group in groups]
    counts = Counter(of_groups)
    lines = ["height × width: " + ", ".join(f"{s.height} × {s.width}: {counts[s]} groups" for s in sizes if counts[s])]
    cropped: list[str] = []
    enlarged: list[str] = []
    for group, size in zip(groups, of_groups, strict=True):
        for height, width, *_ in group.shapes:
            kept = math.exp(-abs(_log_ratio(height, width) - _log_ratio(size.height, size.width)))
            cropped += [group.where] * (kept < 0.5)
            enlarged += [group.where] * (max(size.height / height, size.width / width) > 2)
    if cropped:
        lines.append(f"{len(cropped)} samples lose more than half of their pixels by the crop; first: {cropped[0]}")
    if enlarged:
        lines.append(f"{len(enlarged)} samples are enlarged more than twice; first: {enlarged[0]}")
    return lines
