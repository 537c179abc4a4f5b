"""`aesthetic`: LAION's aesthetic predictor, a linear head on CLIP L/14's image vector, about 1 to 10.

    value = head(e_image)        head = 768-1024-128-64-16-1, linear layers without activations between them

Of a clip: the mean over `frames` frames. The prompt is not looked at.
Source: Schuhmann, improved-aesthetic-predictor (sac+logos+ava1-l14-linearMSE.pth).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import RewardError
from prefgrpo.rewards.checkpoints import check_shapes, folder_of, loading
from prefgrpo.rewards.frames import FrameReward

FILE = "aesthetic-model.pth"
WIDTH = 768


class Aesthetic(FrameReward):
    """How much people like the look of an image."""

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id of a CLIPModel with vectors of 768. head: file of the head's weights
        (sac+logos+ava1-l14-linearMSE.pth), or folder or hub id that has them as aesthetic-model.pth. device: auto,
        cpu, cuda, cuda:1. dtype: of the CLIP model. batch_size: images at once. frames: of a clip, evenly spread.
        """
        clip = encoder.shared(encoder.Transformers, model, "", device, dtype, batch_size)
        if clip.width != WIDTH:
            raise RewardError(f"aesthetic's head takes vectors of {WIDTH}, '{model}' gives {clip.width}; use CLIP L/14")
        super().__init__(clip, frames)
        self.head = _load(head)

    @torch.inference_mode()
    def values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        """[n] of image vectors [n, 768]."""
        return self.head(vectors)[:, 0]


def _load(head: str) -> nn.Sequential:
    """The published head; its dropouts, which do nothing here, keep their places in the names."""
    layers = nn.Sequential(
        nn.Linear(WIDTH, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64), nn.Identity(),
        nn.Linear(64, 16), nn.Linear(16, 1),
    )  # fmt: skip
    with loading(head):
        file = path if (path := Path(head).expanduser()).is_file() else folder_of(head, [FILE]) / FILE
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("layers."): tensor.float() for name, tensor in tensors.items()}
        check_shapes(layers, {name: tuple(tensor.shape) for name, tensor in weights.items()}, head)
        layers.load_state_dict(weights)
    return layers.eval().requires_grad_(False)
