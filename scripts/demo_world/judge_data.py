"""Training data of the tiny judge: pairs of clean scenes, corrupted scenes and generator samples.

The scorer labels each pair: the image with more correct attributes (colour, shape, position) is
better, equal counts are a tie (target 0.5). Pools hold samples of the base model and of trained
LoRAs from the stock pipeline: `python -m scripts.demo_world.judge_data BASE OUT [--lora DIR]`.
Invariant: no test-split caption is ever used, and labels are computed before any augmentation.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor

from prefgrpo.tiny import scenes
from scripts.demo_world.base import sample
from scripts.demo_world.worlds import WORLDS

TRAINING_COMBOS = torch.tensor(scenes.SPLITS["train"] + scenes.SPLITS["dev"])  # [96, 3]


@dataclass(frozen=True)
class Pairs:
    """Two images for each requested combination, and what each shows (-1 = unreadable)."""

    first: Tensor  # [n, 3, 32, 32] in [0, 1]
    second: Tensor
    requested: Tensor  # long [n, 3]
    shows_first: Tensor  # long [n, 3]
    shows_second: Tensor

    @property
    def margin(self) -> Tensor:
        """Correct attributes of the first image minus those of the second: [n], 0 is a tie."""
        right = [(shown == self.requested).sum(1) for shown in (self.shows_first, self.shows_second)]
        return (right[0] - right[1]).float()

    def rows(self, index: Tensor | slice) -> "Pairs":
        """A subset of the pairs."""
        return Pairs(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def concatenate(parts: Sequence[Pairs]) -> Pairs:
    """Several sets of pairs, concatenated."""
    names = Pairs.__dataclass_fields__
    return Pairs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def subsample_ties(pairs: Pairs, share: float) -> Pairs:
    """Drop ties at random so that about `share` of them remain."""
    return pairs.rows((pairs.margin != 0) | (torch.rand(len(pairs.requested)) < share))


def jpeg(image: Tensor, quality: int = 95) -> Tensor:
    """One image [3, H, W] after JPEG compression with 4:2:0 chroma."""
    buffer = io.BytesIO()
    array = (image.permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(array).save(buffer, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1) / 255


def augment(images: Tensor, noise: float) -> Tensor:
    """Random degradations of images: blur, noise, resampling, JPEG."""
    n = len(images)
    choice = torch.rand(n, 1, 1, 1)
    blurred = F.avg_pool2d(F.pad(images, (1,) * 4, mode="replicate"), 3, 1)
    images = torch.where(choice < 0.15, blurred, images)
    resampled = F.interpolate(images, scale_factor=1.5, mode="bilinear", align_corners=False)
    resampled = F.interpolate(resampled, images.shape[2:], mode="area")
    images = torch.where((choice > 0.15) & (choice < 0.25), resampled, images)
    images = images + noise * torch.rand(n, 1, 1, 1) * torch.randn_like(images)
    images = images.clamp(0, 1)
    for i in (torch.rand(n) < 0.2).nonzero()[:, 0].tolist():
        images[i] = jpeg(images[i], int(torch.randint(85, 98, ())))
    return images


def augment_pairs(pairs: Pairs, noise: float) -> Pairs:
    """The pairs with both images augmented; the labels stay as they are."""
    return replace(pairs, first=augment(pairs.first, noise), second=augment(pairs.second, noise))


def corrupt(images: Tensor) -> Tensor:
    """Images that a poor generator might make: blends of two scenes, specks, heavy noise."""
    n = len(images)
    other = images[torch.randperm(n)]
    level = torch.rand(n, 1, 1, 1)
    kind = torch.randint(4, (n, 1, 1, 1))
    blend = images * level + other * (1 - level)
    brighter = torch.maximum(images, other * level)  # two shapes
    block = F.interpolate(torch.rand(n, 1, 8, 8), scale_factor=4) < 0.15 * level
    specks = torch.where(block, torch.rand(n, 3, 1, 1), images)
    noisy = images + 0.3 * level * torch.randn_like(images)
    stack = torch.stack([blend, brighter, specks, noisy])
    picked = stack.gather(0, kind[None].expand(1, *images.shape))[0]
    return picked.clamp(0, 1)


def scene_pairs(n: int, requested: Tensor, corrupted_share: float = 0.15) -> Pairs:
    """n pairs of fresh scenes sharing each requested attribute with probability 0.55."""
    combos = requested[torch.randint(len(requested), (n,))]
    sides: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        random = torch.stack([torch.randint(m, (n,)) for m in scenes.COUNTS], 1)
        shows = torch.where(torch.rand(n, 3) < 0.55, combos, random)
        images = scenes.render(shows)
        corrupted = torch.rand(n) < corrupted_share
        if corrupted.any():
            images[corrupted] = corrupt(images[corrupted])
            shows[corrupted] = scenes.read(images[corrupted])
        sides.append((images, shows))
    (first, shows_first), (second, shows_second) = sides
    return Pairs(first, second, combos, shows_first, shows_second)


@dataclass(frozen=True)
class Pool:
    """Generator samples, M per combination."""

    combos: Tensor  # long [C, 3]
    images: Tensor  # uint8 [C, M, 3, 32, 32]
    shows: Tensor  # long [C, M, 3]

    def pairs(self, n: int) -> Pairs:
        """n random pairs of different samples of one caption."""
        per = self.images.shape[1]
        row = torch.randint(len(self.combos), (n,))
        a = torch.randint(per, (n,))
        b = (a + torch.randint(1, per, (n,))) % per
        first, second = (self.images[row, k].float() / 255 for k in (a, b))
        return Pairs(first, second, self.combos[row], self.shows[row, a], self.shows[row, b])

    def save(self, path: Path) -> None:
        """Write the pool to one file."""
        torch.save({"combos": self.combos, "images": self.images, "shows": self.shows}, path)


def load_pools(paths: Sequence[Path]) -> Pool:
    """Join pools over the same combinations into one."""
    parts = [torch.load(path, weights_only=True) for path in paths]
    if any(not torch.equal(part["combos"], parts[0]["combos"]) for part in parts):
        raise ValueError(f"expected pools over the same combinations: {[str(p) for p in paths]}")
    images, shows = (torch.cat([part[key] for part in parts], 1) for key in ("images", "shows"))
    return Pool(parts[0]["combos"], images, shows)


@dataclass(frozen=True)
class PoolConfig:
    """Sample a generator to train the judge."""

    base: tyro.conf.Positional[Path]
    """FluxPipeline folder."""
    out: tyro.conf.Positional[Path]
    """File for the pool."""
    lora: Path | None = None
    """Adapter folder to load into the pipeline."""
    splits: tuple[str, ...] = ("train", "dev")
    """Splits whose captions are sampled; a judge that trains on the pool must not see 'test'."""
    per_caption: int = 10
    """Samples of each caption (there are 3 captions per combination)."""
    seed: int = 7
    """Seed of the latents."""


def make_pool(config: PoolConfig) -> Pool:
    """Sample every caption of the splits with the stock pipeline, and read what the images show."""
    pipe = FluxPipeline.from_pretrained(config.base.resolve())
    if config.lora is not None:
        pipe.load_lora_weights(config.lora.resolve())
    combos = [combo for split in config.splits for combo in scenes.SPLITS[split]]
    texts = [scenes.caption(c, t) for c in combos for t in range(len(scenes.TEMPLATES))]
    texts = [text for text in texts for _ in range(config.per_caption)]
    images = sample(pipe, WORLDS["scenes"], texts, config.seed)
    right = scenes.hits(images, texts).all(1).float().mean()
    print(f"pool: {len(images)} samples, all right {right:.3f}")
    images = (images * 255).round().byte()
    shape = (len(combos), -1)
    shows = scenes.read(images.float() / 255).view(*shape, 3)
    return Pool(torch.tensor(combos), images.view(*shape, 3, scenes.SIZE, scenes.SIZE), shows)


if __name__ == "__main__":
    config = tyro.cli(PoolConfig, description=__doc__)
    make_pool(config).save(config.out)
