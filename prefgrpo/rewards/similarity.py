"""Cosines of images: `image_similarity` with the sources of an edit, `subfig_clipI` and `subfig_clipT` within a grid.

    image_similarity   mean_s cos(image, source_s)                 subfig_clipT   mean_i cos(cell_i, text_i)
    subfig_clipI       mean_{i≠j} cos(cell_i, cell_j)

Cells and their texts come from the prompt (grid.py). Invariant: a prompt that asks for no grid, or describes another
number of cells than its grid has, gives a missing score.
Sources: Flow-GRPO (arXiv 2505.05470) for the first, PaCo-RL (arXiv 2512.04784) for the grids.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from prefgrpo.data.media import Media
from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import PointwiseReward, Sample, Score, unusable
from prefgrpo.rewards.frames import score_of
from prefgrpo.rewards.grid import grid_of, split, sub_prompts

VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PartsReward(PointwiseReward):
    """Scores the vectors of several images that belong to one sample."""

    def __init__(self, model: encoder.Encoder, fit: encoder.Fit | None = None) -> None:
        """fit: as Encoder.images."""
        self.encoder, self.fit = model, fit

    @abstractmethod
    def images(self, sample: Sample) -> list[Media]:
        """The images to encode; ValueError says why the sample cannot be scored."""

    def texts(self, sample: Sample) -> list[str]:
        """The texts to encode, one per image, if any; ValueError as above."""
        return []

    @abstractmethod
    def value(self, images: Tensor, texts: Tensor) -> float:
        """The score of a sample from its unit vectors [n, D]."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample; images and texts that occur several times are encoded once."""
        asked = [self.refuse(sample) or self._asked(sample) for sample in samples]
        able = [a for a in asked if not isinstance(a, str)]
        distinct = {m.digest: m for images, _ in able for m in images}
        rows = dict(zip(distinct, self.encoder.images(list(distinct.values()), self.fit), strict=True))
        words = list(dict.fromkeys(t for _, texts in able for t in texts))
        vectors = dict(zip(words, self.encoder.texts(words), strict=True))
        return [Score(None, a) if isinstance(a, str) else self._one(a, rows, vectors) for a in asked]

    def _asked(self, sample: Sample) -> tuple[list[Media], list[str]] | str:
        """What to encode of a sample, or why it cannot be scored."""
        try:
            return self.images(sample), self.texts(sample)
        except ValueError as error:
            return str(error)

    def _one(self, asked: tuple[list[Media], list[str]], rows: dict[str, Tensor], words: dict[str, Tensor]) -> Score:
        images = torch.stack([rows[m.digest] for m in asked[0]])
        texts = torch.stack([words[t] for t in asked[1]]) if asked[1] else torch.empty(0)
        return score_of([self.value(images, texts)])


class ImageSimilarity(PartsReward):
    """How much an edit resembles its source images."""

    needs_source = True

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        resize: str = "processor",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Load the model.

        model: folder or hub id of a CLIPModel. resize: processor or bilinear, as for clipscore. device: auto, cpu,
        cuda, cuda:1. dtype: of the model. batch_size: images at once.
        """
        fit = encoder.resizing(resize)
        super().__init__(encoder.shared(encoder.Transformers, model, "", device, dtype, batch_size), fit)

    def images(self, sample: Sample) -> list[Media]:
        """The edit, then its sources."""
        return [sample.media, *sample.source]

    def refuse(self, sample: Sample) -> str:
        """Also for a sample without sources, or with one that cannot be encoded."""
        own = super().refuse(sample) or ("" if sample.source else "the sample has no source image")
        return own or next((why for m in sample.source if (why := unusable(m, ("image",)))), "")

    def value(self, images: Tensor, texts: Tensor) -> float:
        """Mean cosine of the first image with the others."""
        return float((images[1:] @ images[0]).mean())


class GridReward(PartsReward):
    """Scores the cells of an image grid."""

    probe: ClassVar[dict[str, Any]] = {"prompt": "a 1x2 grid. [LEFT]: a red square. [RIGHT]: a blue circle."}

    def __init__(
        self,
        model: str = VIT_H,
        architecture: str = "",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Load the model.

        model: folder or hub id with open_clip_config.json and weights, or a weights file. architecture: open_clip's
        name of it, by default what the config beside the weights says, else ViT-H-14. device: auto, cpu, cuda,
        cuda:1. dtype: of the model. batch_size: images at once.
        """
        super().__init__(encoder.shared(encoder.OpenClip, model, architecture, "ViT-H-14", device, dtype, batch_size))

    def images(self, sample: Sample) -> list[Media]:
        """The cells, row by row."""
        return split(sample.media, *_grid(sample))


class SubfigClipI(GridReward):
    """How much the cells of a grid resemble each other."""

    def value(self, images: Tensor, texts: Tensor) -> float:
        """Mean cosine of two different cells."""
        n = len(images)
        return float(((images @ images.T).sum() - (images * images).sum()) / (n * (n - 1)))


class SubfigClipT(GridReward):
    """How well each cell of a grid fits its own part of the prompt."""

    def texts(self, sample: Sample) -> list[str]:
        """What the prompt says of each cell."""
        (rows, cols), texts = _grid(sample), sub_prompts(sample.prompt)[1]
        if len(texts) != rows * cols:
            raise ValueError(f"the prompt describes {len(texts)} cells (' [LEFT]: …') of a {rows}x{cols} grid")
        return texts

    def value(self, images: Tensor, texts: Tensor) -> float:
        """Mean cosine of a cell and its text."""
        return float((images * texts).sum(-1).mean())


def _grid(sample: Sample) -> tuple[int, int]:
    """(rows, cols); ValueError if the sample has no grid."""
    grid = grid_of(sample.prompt, sample.meta)
    if grid is None:
        raise ValueError("the prompt asks for no grid such as '2x2'; give one as meta 'grid'")
    return grid
