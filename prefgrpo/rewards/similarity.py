"""Similarity of images: `image_similarity` with the sources of an edit, `subfig_*` within a grid.

    image_similarity   mean_s cos(image, source_s)                 subfig_clipT      mean_i cos(cell_i, text_i)
    subfig_clipI       mean_{i≠j} cos(cell_i, cell_j)              subfig_dreamsim   the same under DreamSim

1 − DreamSim's distance is the cosine of its vectors. Cells and their texts come from the prompt (grid.py). Invariant: a
prompt that asks for no grid, or describes another number of cells than its grid has, gives a missing score.
Sources: Flow-GRPO (arXiv 2505.05470) for the first, PaCo-RL (arXiv 2512.04784) for the grids, DreamSim (2306.09344).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from prefgrpo.data.media import Media
from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import PointwiseReward, Sample, Score, unusable
from prefgrpo.rewards.clip import RESIZES, OpenClipReward, ResizeReward, mean_score
from prefgrpo.rewards.encoder import Encoder
from prefgrpo.rewards.grid import grid_of, split, sub_prompts


class PartsReward(PointwiseReward):
    """Scores the vectors of several images that belong to one sample."""

    encoder: Encoder
    resize = "processor"

    @abstractmethod
    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        """Images and texts to encode; ValueError says why the sample cannot be scored."""

    @abstractmethod
    def _value(self, images: Tensor, texts: Tensor) -> float:
        """The score of a sample from its unit vectors [n, D]."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample; images and texts that occur several times are encoded once."""
        parts: list[str | tuple[list[Media], list[str]]] = []
        for sample in samples:
            try:
                parts.append(self.refuse(sample) or self._parts(sample))
            except ValueError as error:
                parts.append(str(error))
        able = [p for p in parts if not isinstance(p, str)]
        media = {m.digest: m for images, _ in able for m in images}
        rows = dict(zip(media, self.encoder.images(list(media.values()), RESIZES[self.resize]), strict=True))
        words = list(dict.fromkeys(t for _, texts in able for t in texts))
        texts = dict(zip(words, self.encoder.texts(words), strict=True))

        def score(images: list[Media], words: list[str]) -> Score:
            own = torch.stack([texts[w] for w in words]) if words else torch.empty(0)
            return mean_score([self._value(torch.stack([rows[m.digest] for m in images]), own)])

        return [Score(None, p) if isinstance(p, str) else score(*p) for p in parts]


class ImageSimilarity(PartsReward, ResizeReward):
    """How much an edit resembles its source images."""

    needs_source = True

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return [sample.media, *sample.source], []

    def refuse(self, sample: Sample) -> str:
        """Also for a sample without sources, or with one that cannot be encoded."""
        own = super().refuse(sample) or ("" if sample.source else "the sample has no source image")
        return own or next((why for m in sample.source if (why := unusable(m, ("image",)))), "")

    def _value(self, images: Tensor, texts: Tensor) -> float:
        return float((images[1:] @ images[0]).mean())


class CellsReward(PartsReward):
    """How much the cells of a grid resemble each other."""

    probe: ClassVar[dict[str, Any]] = {"prompt": "a 1x2 grid. [LEFT]: a red square. [RIGHT]: a blue circle."}

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        grid = grid_of(sample.prompt, sample.meta)
        if grid is None:
            raise ValueError("the prompt asks for no grid such as '2x2'; give one as meta 'grid'")
        return split(sample.media, *grid), []

    def _value(self, images: Tensor, texts: Tensor) -> float:
        n = len(images)
        return float(((images @ images.T).sum() - (images * images).sum()) / (n * (n - 1)))


class SubfigClipI(CellsReward, OpenClipReward):
    """How much the cells of a grid resemble each other."""


class SubfigClipT(CellsReward, OpenClipReward):
    """How well each cell of a grid fits its own part of the prompt."""

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        cells, texts = super()._parts(sample)[0], sub_prompts(sample.prompt)[1]
        if len(texts) != len(cells):
            rows, cols = grid_of(sample.prompt, sample.meta) or (1, 1)
            raise ValueError(f"the prompt describes {len(texts)} cells (' [LEFT]: …') of a {rows}x{cols} grid")
        return cells, texts

    def _value(self, images: Tensor, texts: Tensor) -> float:
        return float((images * texts).sum(-1).mean())


@dataclass(kw_only=True, eq=False)
class SubfigDreamsim(CellsReward):
    """How much the cells of a grid resemble each other to DreamSim, trained on human judgements.

    model: folder of its weights, which the package downloads if they are not there. kind: ensemble (its two DINO files
    come with code from torch.hub), open_clip_vitb32, clip_vitb32, dino_vitb16. device: auto, cpu, cuda, cuda:1.
    batch_size: images at once.
    """

    model: str = "~/.cache/dreamsim"
    kind: str = "ensemble"
    device: str = "auto"
    batch_size: int = 32

    def __post_init__(self) -> None:
        self.encoder = encoder.shared(encoder.DreamSim, self.model, self.kind, self.device, self.batch_size)
