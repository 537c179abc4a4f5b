"""Prompts to pixels under one schedule; shared by training, evaluation and generation.

A batch has prompts whose texts have one length, and source images of one number. Invariant: a sample depends only on
(weights, prompt, source, seed, sample id).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import collate
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.rollout.sources import sources_of

Images = NDArray[np.uint8]
DECODED_PIXELS = 1024 * 1024
"""Most pixels per call of the VAE decoder, at least one image or clip: more take memory and no less time."""


def sample(prompt: Prompt, pixels: Images, sizes: SamplingConfig) -> Sample:
    """The `Sample` passed to rewards: pixels [(F,) H, W, 3], and the source images as the model saw them."""
    return Sample(prompt.text, Media(pixels), sources_of(prompt, sizes).media(), prompt.meta)


@torch.no_grad()
def render(
    adapter: Adapter,
    schedules: Schedules,
    embeddings: Embeddings,
    wanted: Sequence[tuple[Prompt, int]],
    sampling: SamplingConfig,
    world: World,
    spare: tuple[Prompt, int],
) -> Iterator[tuple[int, Images]]:
    """(position in `wanted`, pixels [(F,) H, W, 3]) of each (prompt, noise address), in batches, under the ODE rule.

    With `World.equal_forwards` all processes must call this together; those with fewer batches render `spare` as
    padding.
    """
    schedule = schedules.ode(sampling)
    seed = schedules.config.seed
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for k, condition in enumerate(embeddings(adapter, [prompt for prompt, _ in wanted], sampling)):
        alike.setdefault(condition.shapes(), []).append(k)
    each = sampling.batch_size
    batches = [ks[i : i + each] for ks in alike.values() for i in range(0, len(ks), each)]
    if world.equal_forwards:
        largest = int(world.gather(np.array([float(len(batches))])).max())
        batches += [[]] * (largest - len(batches))
    for chosen in batches:
        samples = [wanted[k] for k in chosen] or [spare]
        ids = torch.tensor([address for _, address in samples], dtype=torch.int64, device=world.device)
        condition = collate(embeddings(adapter, [prompt for prompt, _ in samples], sampling), world.device)
        latents, _ = rollout(adapter, schedule, condition, ids, sampling, seed=seed)
        if chosen:
            yield from zip(chosen, to_uint8(decode(adapter, latents, sampling, world)))


@torch.no_grad()
def decode(adapter: Adapter, latents: Tensor, sizes: SamplingConfig, world: World | None = None) -> Tensor:
    """Decode final latents [B, …] to images or clips, DECODED_PIXELS per VAE call; world: as for `render`."""
    frames = adapter.frames(sizes) or 1
    at_once = max(1, DECODED_PIXELS // (frames * sizes.height * sizes.width))

    def work(rows: Tensor) -> Tensor:
        return torch.cat([adapter.decode(part, sizes) for part in rows.split(at_once)])

    with adapter.on_device("vae"):
        return work(latents) if world is None else world.split_and_gather(latents, work)


def stills(pixels: Images, most: int = 4) -> Images:
    """An image unchanged; a clip [F, H, W, 3] as up to `most` frames side by side, [H, k · W, 3], for the report."""
    return np.concatenate([frame.pixels for frame in Media(pixels).frames(most)], axis=1)


def preview(pixels: Images, frames: int = 16, side: int = 256) -> Images:
    """An image unchanged; a clip [F, H, W, 3] reduced to `frames` evenly spaced frames of at most `side` pixels."""
    if pixels.ndim == 3:
        return pixels
    images = [frame.pil for frame in Media(pixels).frames(frames)]
    for image in images:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.stack([np.asarray(image) for image in images])


def to_uint8(media: Tensor) -> Images:
    """[B, 3, H, W] or [B, F, 3, H, W] in [0, 1] → uint8 [B, (F,) H, W, 3], rounded as in diffusers' image processor.

    A clip of one frame becomes an image.
    """
    media = media[:, 0] if media.dim() == 5 and media.shape[1] == 1 else media
    return (media.movedim(-3, -1) * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
