"""`subfig_dreamsim`: how much the cells of a grid resemble each other to DreamSim, trained on human judgements.

    value = 1 − mean_{i≠j} distance(cell_i, cell_j) = mean_{i≠j} cos(e_i, e_j)

The dreamsim package has the model; its weights are in its own folder format (base ViTs and a LoRA adapter each).
Source: Fu et al., "DreamSim" (arXiv 2306.09344); used on grids by PaCo-RL (arXiv 2512.04784).
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from torch import Tensor

from prefgrpo.data.media import Media
from prefgrpo.rewards.checkpoints import library, loading
from prefgrpo.rewards.encoder import Encoder, shared
from prefgrpo.rewards.similarity import PartsReward, SubfigClipI


class SubfigDreamsim(SubfigClipI):
    """Mean DreamSim similarity of two different cells."""

    def __init__(
        self,
        model: str = "~/.cache/dreamsim",
        kind: str = "ensemble",
        device: str = "auto",
        batch_size: int = 32,
    ) -> None:
        """Load the model.

        model: folder of its weights, which the package downloads if they are not there. kind: ensemble (its two
        DINO files come with code from torch.hub), open_clip_vitb32, clip_vitb32, dino_vitb16. device: auto, cpu,
        cuda, cuda:1. batch_size: images at once.
        """
        PartsReward.__init__(self, shared(DreamSim, model, kind, device, batch_size))


class DreamSim(Encoder):
    """DreamSim's image vectors."""

    def __init__(self, model: str, kind: str, device: str, batch_size: int) -> None:
        super().__init__(device, "float32", batch_size)
        package = library("dreamsim", "'prefgrpo[rewards]'")
        with loading(model):
            folder = Path(model).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            with redirect_stdout(sys.stderr):  # it prints what it does
                self._model, self._preprocess = package.dreamsim(
                    pretrained=True, device=str(self.device), cache_dir=str(folder), dreamsim_type=kind
                )

    def _pixels(self, media: Media) -> Tensor:
        return self._preprocess(media.pil)[0]

    def _encode_images(self, pixels: Tensor) -> Tensor:
        return self._model.embed(pixels)

    def _encode_texts(self, texts: list[str]) -> Tensor:
        raise TypeError("DreamSim has no text encoder")
