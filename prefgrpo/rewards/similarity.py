"""Similarity of images: `image_similarity` with the sources of an edit, `subfig_*` within a grid.

    image_similarity   mean_s cos(image, source_s)                 subfig_clipT      mean_i cos(cell_i, text_i)
    subfig_clipI       mean_{i≠j} cos(cell_i, cell_j)              subfig_dreamsim   the same under DreamSim

1 − DreamSim's distance is the cosine of its vectors. Cells and their texts come from the prompt (grid.py). Invariant: a
prompt that asks for no grid, or describes another number of cells than its grid has, gives a missing score.
Sources: Flow-GRPO (arXiv 2505.05470) for the first, PaCo-RL (arXiv 2512.04784) for the grids, DreamSim (2306.09344).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from prefgrpo.data.media import Media
from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import Sample, unusable
from prefgrpo.rewards.clip import OpenClipReward, ResizeReward, VectorReward
from prefgrpo.rewards.grid import asked_grid, split, sub_prompts


class ImageSimilarity(ResizeReward):
    """How much an edit resembles its source images."""

    needs_source = True

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return [sample.media, *sample.source], []

    def refuse(self, sample: Sample) -> str:
        """Also for a sample without sources, or with one that cannot be encoded."""
        own = super().refuse(sample) or ("" if sample.source else "the sample has no source image")
        return own or next((why for m in sample.source if (why := unusable(m, ("image",)))), "")

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images[1:] @ images[0]).mean()


class CellsReward(VectorReward):
    """How much the cells of a grid resemble each other."""

    probe: ClassVar[dict[str, Any]] = {"prompt": "a 1x2 grid. [LEFT]: a red square. [RIGHT]: a blue circle."}

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return split(sample.media, *asked_grid(sample.prompt, sample.meta)), []

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        n = len(images)
        return ((images @ images.T).sum() - (images * images).sum()) / (n * (n - 1))


class SubfigClipI(CellsReward, OpenClipReward):
    """How much the cells of a grid resemble each other."""


class SubfigClipT(CellsReward, OpenClipReward):
    """How well each cell of a grid fits its own part of the prompt."""

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        cells, texts = super()._parts(sample)[0], sub_prompts(sample.prompt)[1]
        if len(texts) != len(cells):
            rows, cols = asked_grid(sample.prompt, sample.meta)
            raise ValueError(f"the prompt describes {len(texts)} cells (' [LEFT]: …') of a {rows}x{cols} grid")
        return cells, texts

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images * texts).sum(-1).mean()


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
