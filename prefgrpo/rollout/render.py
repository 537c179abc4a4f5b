"""Prompts to pixels under one schedule; shared by training, evaluation and generation.

A batch has prompts whose texts have one length, and source images of one number. Invariant: a sample depends only on
(weights, prompt, source, seed, sample id).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, repeat
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.models.condition import Condition, collate
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.rollout.source_images import sources_of

Images = NDArray[np.uint8]
Key = TypeVar("Key")
Pixels = Callable[[], Images]
"""Waits for a sample's pixels."""
DECODED_PIXELS = 1024 * 1024
"""Maximum pixels per call of the VAE decoder, at least one image or clip: more need memory and save no time."""
ENCODED = 64
"""Prompts that are encoded at a time: with offload, their encoders go to the device once for all of them."""


def sample(prompt: Prompt, media: Media, sizes: SamplingConfig) -> Sample:
    """The `Sample` passed to rewards: what was generated, and the source images as the model saw them."""
    return Sample(prompt.text, media, sources_of(prompt, sizes).media(), prompt.meta)


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
    """(position in `wanted`, pixels [(F,) H, W, 3]) of each (prompt, noise address), under the ODE rule, sampled as
    published, on the leader of a share; the others yield nothing.

    With `World.equal_forwards` all processes must call this together; those with fewer batches render `spare` as
    padding.
    """
    schedule = schedules.ode(sampling)
    seed = schedules.config.seed

    def conditions() -> Iterator[Condition]:
        for first in range(0, len(wanted), ENCODED):
            yield from embeddings(adapter, [prompt for prompt, _ in wanted[first : first + ENCODED]], sampling)

    lacking = 0
    if world.equal_forwards:  # how many batches there are depends on the lengths of the texts
        mine = sum(1 for _ in batches_of(conditions(), sampling.batch_size))
        lacking = int(world.gather(np.array([float(mine)])).max()) - mine
    decoder = Decoder[int](adapter, sampling, world)
    padding: list[tuple[int, Condition]] = []
    for batch in chain(batches_of(conditions(), sampling.batch_size), repeat(padding, lacking)):
        chosen = [k for k, _ in batch]
        addresses = [wanted[k][1] for k in chosen] or [spare[1]]
        ids = torch.tensor(addresses, dtype=torch.int64, device=world.device)
        each = [condition for _, condition in batch] or embeddings(adapter, [spare[0]], sampling)
        condition = collate(each, world.device)
        latents, _ = rollout(adapter, schedule, condition, ids, sampling, seed=seed, published=True)
        for k, pixels in decoder.add(chosen, latents) if chosen else ():
            yield k, pixels()
    for k, pixels in decoder.rest():
        yield k, pixels()


def batches_of(conditions: Iterable[Condition], size: int) -> Iterator[list[tuple[int, Condition]]]:
    """(position, condition) in batches of equal shapes, each as soon as it is full, and the rest at the end."""
    waiting: dict[tuple[tuple[int, ...], ...], list[tuple[int, Condition]]] = {}
    for k, condition in enumerate(conditions):
        shapes = condition.shapes()
        waiting.setdefault(shapes, []).append((k, condition))
        if len(waiting[shapes]) == size:
            yield waiting.pop(shapes)
    yield from waiting.values()


class Decoder(Generic[Key]):
    """Decodes the samples of a share, each on one of its context-parallel processes and all these at the same time: it
    waits until there is a sample for each. Only the leader gets pixels; all of them call it alike.

    It never waits for the device: pixels are functions that wait, and can be called in another thread.
    """

    def __init__(self, adapter: Adapter, sizes: SamplingConfig, world: World) -> None:
        self._adapter = adapter
        self._sizes = sizes
        self._world = world
        self._keys: list[Key] = []
        self._latents: list[Tensor] = []

    def add(self, keys: Sequence[Key], latents: Tensor) -> list[tuple[Key, Pixels]]:
        """Hand over final latents [B, …]; the samples that are decoded now: (key, pixels [(F,) H, W, 3])."""
        self._keys += keys
        self._latents.append(latents)
        return self.rest() if len(self._keys) >= self._world.layout.context else []

    def rest(self) -> list[tuple[Key, Pixels]]:
        """The samples that still wait."""
        if not self._keys:
            return []
        keys = self._keys
        rows = torch.cat(self._latents)
        self._keys = []
        self._latents = []
        count = self._world.layout.context
        each = -(-len(rows) // count)
        padded = torch.cat([rows, rows[:1].expand(each * count - len(rows), *rows.shape[1:])])
        index = self._world.rank % count
        mine = decode(self._adapter, padded[index * each : (index + 1) * each], self._sizes)
        parts = self._world.gather_to_leader(mine)
        if not parts:
            return []
        arrays = to_host(torch.cat(parts)[: len(keys)])
        return [(key, partial(_row, arrays, row)) for row, key in enumerate(keys)]


def to_host(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Starts to copy a tensor to the host; the function, which any thread may call, waits for the copy."""
    host = tensor.to("cpu", non_blocking=True)
    if tensor.device.type != "cuda":
        return host.numpy
    copied = torch.cuda.Event(blocking=True)  # sleeps; otherwise a CPU core would spin
    copied.record()

    @cache
    def wait() -> NDArray[Any]:
        copied.synchronize()
        return host.numpy().copy()  # pinned memory is scarce

    return wait


def _row(arrays: Callable[[], NDArray[Any]], row: int) -> Images:
    return arrays()[row]


@torch.no_grad()
def decode(adapter: Adapter, latents: Tensor, sizes: SamplingConfig) -> Tensor:
    """Decode final latents [B, …] to images or clips, uint8 [B, (F,) H, W, 3], DECODED_PIXELS per VAE call."""
    frames = adapter.frames(sizes) or 1
    at_once = max(1, DECODED_PIXELS // (frames * sizes.height * sizes.width))
    with adapter.on_device("vae"):
        return torch.cat([to_uint8(adapter.decode(part, sizes)) for part in latents.split(at_once)])


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


def to_uint8(media: Tensor) -> Tensor:
    """[B, 3, H, W] or [B, F, 3, H, W] in [0, 1] → uint8 [B, (F,) H, W, 3], rounded as in diffusers' image processor.

    A clip of one frame becomes an image.
    """
    media = media[:, 0] if media.dim() == 5 and media.shape[1] == 1 else media
    return (media.movedim(-3, -1) * 255).round().clamp(0, 255).to(torch.uint8)
