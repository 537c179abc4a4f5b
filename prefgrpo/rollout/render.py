"""Prompts to pixels under one schedule; shared by training, evaluation and generation.

Source images are resized and centre-cropped to the output size, so that any of them can share a batch. Invariant: a
sample depends only on (weights, prompt, source, seed, sample id).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.embeddings import Embeddings, conditions, sources_of
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import Schedule

Images = NDArray[np.uint8]
DECODED_PIXELS = 1024 * 1024
"""Most pixels per call of the VAE decoder, at least one image or clip: more take memory and no less time."""


def sample(prompt: Prompt, pixels: Images, sizes: SamplingConfig) -> Sample:
    """The `Sample` passed to rewards: pixels [(F,) H, W, 3], and the source images as the model saw them."""
    return Sample(prompt.text, Media(pixels), sources_of(prompt, sizes).media(), prompt.meta)


@torch.no_grad()
def render(
    adapter: Adapter,
    schedule: Schedule,
    embeddings: Embeddings,
    prompts: Sequence[Prompt],
    ids: Tensor,
    sizes: SamplingConfig,
    seed: int,
    world: World | None = None,
) -> Tensor:
    """Images [B, 3, H, W] or clips [B, F, 3, H, W], fp32 in [0, 1], of B prompts; ids: int64 [B] noise addresses.

    world: if given, its context-parallel processes each decode a part.
    """
    condition = conditions(embeddings, prompts, sizes, ids.device)
    done = rollout(adapter, schedule, condition, ids, sizes, seed=seed)
    return decode(adapter, done.latents, sizes, world)


@torch.no_grad()
def decode(adapter: Adapter, latents: Tensor, sizes: SamplingConfig, world: World | None = None) -> Tensor:
    """Decode final latents [B, …] to images or clips, DECODED_PIXELS per VAE call; world: as for `render`."""
    frames = adapter.frames(sizes) or 1
    at_once = max(1, DECODED_PIXELS // (frames * sizes.height * sizes.width))

    def work(rows: Tensor) -> Tensor:
        return torch.cat([adapter.decode(part, sizes) for part in rows.split(at_once)])

    with adapter.offload.on_device("vae"):
        return work(latents) if world is None else world.split_and_gather(latents, work)


def stills(media: Images, most: int = 4) -> Images:
    """Images unchanged; clips [n, F, H, W, 3] as up to `most` frames side by side, [n, H, k · W, 3], for the report."""
    if media.ndim == 4:
        return media
    chosen = np.linspace(0, media.shape[1] - 1, min(most, media.shape[1]), dtype=int)
    return np.concatenate([media[:, k] for k in chosen], axis=2)


def preview(media: Images, frames: int = 16, side: int = 256) -> Images:
    """Images unchanged; clips [n, F, H, W, 3] reduced to `frames` evenly spaced frames of at most `side` pixels."""
    if media.ndim == 4:
        return media
    n, count, height, width, _ = media.shape
    chosen = media[:, np.linspace(0, count - 1, min(frames, count)).round().astype(int)]
    if (longest := max(height, width)) <= side:
        return chosen
    size = (max(width * side // longest, 1), max(height * side // longest, 1))
    flat = chosen.reshape(-1, height, width, 3)
    small = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in flat]
    return np.stack(small).reshape(n, -1, size[1], size[0], 3) if small else np.zeros((0, 1, *size[::-1], 3), np.uint8)


def to_uint8(media: Tensor) -> Images:
    """[B, 3, H, W] or [B, F, 3, H, W] in [0, 1] → uint8 [B, (F,) H, W, 3], rounded as in diffusers' image processor.

    A clip of one frame becomes an image.
    """
    media = media[:, 0] if media.dim() == 5 and media.shape[1] == 1 else media
    return (media.movedim(-3, -1) * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
