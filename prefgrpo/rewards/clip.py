"""Rewards from image embeddings: image and prompt, edit and source images, or the cells of a grid.

    clip, hpsv2        cos(image, prompt)               pickscore         cos, or exp(logit_scale)·cos/26
    clipscore          exp(logit_scale)·cos/30          aesthetic         head(e_image), 768-1024-128-64-16-1, linear
    image_similarity   mean_s cos(image, source_s)      subfig_clipT      mean_i cos(cell_i, text_i)

The weights differ: DFN5B (Fang et al. 2309.17425), HPS 2.1 (Wu et al. 2306.09341), PickScore (Kirstain et al.
2305.01569), OpenAI's CLIP L/14 (Radford et al. 2103.00020), LAION's aesthetic predictor (Schuhmann); the
divisors 26 and 30 are Flow-GRPO's, the grids PaCo-RL's (2512.04784; grid.py). A clip's value is the
mean over `frames` frames. Pref-GRPO and DanceGRPO score only the first frame (`frames: 1`), which rewards a good start.
Invariant: a non-finite value is missing, as is the score of a sample whose prompt does not ask for a grid or does not
describe its cells; other samples are not affected.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from prefgrpo.data.media import Media
from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score, unusable
from prefgrpo.rewards.checkpoints import check_shapes, folder_of, library, loading
from prefgrpo.rewards.encoder import Encoder, Fit
from prefgrpo.rewards.grid import require_grid, split, sub_prompts

PICKSCORE, VIT_H = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HEAD_FILE, HEAD_WIDTH = "aesthetic-model.pth", 768


def bilinear(image: Tensor, side: int) -> Tensor:
    """[3, H, W] -> [3, side, side]: bilinear resize in float and centre crop, as in Flow-GRPO and PaCo-RL."""
    vision = library("torchvision.transforms.functional", "'prefgrpo[rewards]'")
    return vision.center_crop(vision.resize(image, [side]), [side, side])


def padded(image: Tensor, side: int) -> Tensor:
    """[3, H, W] -> [3, side, side]: resize the longer side in float and pad with black, as hpsv2 does."""
    vision = library("torchvision.transforms.functional", "'prefgrpo[rewards]'")
    scale = side / max(image.shape[1:])
    high, wide = (max(1, round(n * scale)) for n in image.shape[1:])
    left, top = (side - wide) // 2, (side - high) // 2
    resized = vision.resize(image, [high, wide], vision.InterpolationMode.BICUBIC)
    return vision.pad(resized, [left, top, side - wide - left, side - high - top])


RESIZES: dict[str, Fit | None] = {"processor": None, "bilinear": bilinear, "padded": padded}
"""How images are resized for the model; None: by the checkpoint's image processor."""


class VectorReward(PointwiseReward):
    """Scores a sample from the embeddings of its images and texts."""

    encoder: Encoder
    resize = "processor"

    @abstractmethod
    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        """Images and texts to encode; ValueError with the reason if the sample cannot be scored."""

    @abstractmethod
    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        """Values from a sample's unit vectors [n, D] and [m, D]; the score is their mean."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample; repeated images and texts are encoded once."""
        parts: list[str | tuple[list[Media], list[str]]] = []
        for sample in samples:
            try:
                parts.append(self.refuse(sample) or self._parts(sample))
            except ValueError as error:
                parts.append(str(error))
        able = [p for p in parts if not isinstance(p, str)]
        images = self.encoder.images([m for own, _ in able for m in own], RESIZES[self.resize])
        texts = self.encoder.texts([t for _, own in able for t in own])
        each = zip(images.split([len(m) for m, _ in able]), texts.split([len(t) for _, t in able]), strict=True)
        scores = iter([self._mean(*vectors) for vectors in each] if able else [])
        return [Score(None, p) if isinstance(p, str) else next(scores) for p in parts]

    @torch.inference_mode()
    def _mean(self, images: Tensor, texts: Tensor) -> Score:
        values = self._values(images, texts).reshape(-1).tolist()
        mean = math.fsum(values) / len(values)
        return Score(mean) if math.isfinite(mean) else Score(None, f"the model's score is {mean}")


@dataclass(kw_only=True, eq=False)
class EncoderReward(VectorReward):
    """model: folder or hub id of a transformers CLIPModel. device: auto, cpu, cuda, cuda:1. dtype: the model's dtype.
    batch_size: images per forward."""

    model: str = "openai/clip-vit-large-patch14"
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise RewardError(f"resize must be one of {', '.join(RESIZES)}, got '{self.resize}'")
        kind, *names = self._loader()
        self.encoder = encoder.get_encoder(kind, *names, self.device, self.dtype, self.batch_size)

    def _loader(self) -> tuple[Any, ...]:
        """Class of the encoder and its constructor arguments."""
        return encoder.Transformers, self.model, ""


@dataclass(kw_only=True, eq=False)
class OpenClipReward(EncoderReward):
    """model: folder or hub id with open_clip_config.json and weights, or a weights file. architecture: its open_clip
    name; default: from the config beside the weights, else that of the published model."""

    model: str = VIT_H
    architecture: str = ""
    otherwise = "ViT-H-14"
    file = ""

    def _loader(self) -> tuple[Any, ...]:
        return encoder.OpenClip, self.model, self.architecture, self.otherwise, self.file


@dataclass(kw_only=True, eq=False)
class ResizeReward(EncoderReward):
    """resize: processor (that of the checkpoint; bicubic, 8-bit), bilinear (in float, as in Flow-GRPO and
    PaCo-RL) or padded (as in hpsv2)."""

    resize: str = "processor"


@dataclass(kw_only=True, eq=False)
class FrameReward(EncoderReward):
    """frames: number of evenly spaced frames of a clip to score; 1: only the first."""

    takes = ("image", "video")
    frames: int = 8

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise RewardError(f"frames must be at least 1, got {self.frames}")
        super().__post_init__()

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return sample.media.frames(self.frames), []


class TextImage(FrameReward):
    """factor · cosine similarity of image and prompt."""

    factor = 1.0

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return super()._parts(sample)[0], [sample.prompt]

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.factor * (images * texts).sum(-1)


@dataclass(kw_only=True, eq=False)
class Clip(TextImage, OpenClipReward):
    """Cosine similarity under DFN5B's ViT-H/14 at 378 pixels, or any other open_clip model."""

    model: str = "apple/DFN5B-CLIP-ViT-H-14-378"
    otherwise = "ViT-H-14-378-quickgelu"


@dataclass(kw_only=True, eq=False)
class Hpsv2(TextImage, OpenClipReward):
    """Human Preference Score 2.1: cosine under a ViT-H/14 trained on human choices; images are padded, not cropped.

    file: weights file, {"state_dict": …}; HPS_v2_compressed.pt is version 2.0.
    """

    model: str = "xswu/HPSv2"
    file: str = "HPS_v2.1_compressed.pt"
    resize = "padded"


@dataclass(kw_only=True, eq=False)
class Pickscore(TextImage):
    """PickScore 1: cosine under a CLIP-H trained on human choices, or Flow-GRPO's logit/26.

    processor: folder or hub id of the tokenizer and image processor; default: the model's own, or for the published
    model laion/CLIP-ViT-H-14-laion2B-s32B-b79K. scale: cosine, or logit for exp(logit_scale)·cos/26.
    """

    model: str = PICKSCORE
    processor: str = ""
    scale: str = "cosine"

    def __post_init__(self) -> None:
        if self.scale not in ("cosine", "logit"):
            raise RewardError(f"pickscore's scale must be cosine or logit, got '{self.scale}'")
        super().__post_init__()
        self.factor = self.encoder.scale / 26 if self.scale == "logit" else 1.0

    def _loader(self) -> tuple[Any, ...]:
        return encoder.Transformers, self.model, self.processor or (VIT_H if self.model == PICKSCORE else "")


@dataclass(kw_only=True, eq=False)
class Clipscore(TextImage, ResizeReward):
    """OpenAI CLIP L/14's logit/30."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.factor = self.encoder.scale / 30


@dataclass(kw_only=True, eq=False)
class Aesthetic(FrameReward):
    """Aesthetic rating of an image, about 1 to 10; the prompt is ignored.

    model: a CLIPModel with embeddings of size 768. head: file with the head's weights
    (sac+logos+ava1-l14-linearMSE.pth), or a folder or hub id with aesthetic-model.pth.
    """

    head: str = "trl-lib/ddpo-aesthetic-predictor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (width := self.encoder.width) != HEAD_WIDTH:
            message = (
                f"aesthetic's head takes embeddings of width {HEAD_WIDTH}, but those of '{self.model}' have {width}"
            )
            raise RewardError(f"{message}; use CLIP L/14")
        self.layers = _head(self.head)

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.layers(images)[:, 0]


def _head(head: str) -> nn.Sequential:
    """The published head; its dropout layers are inactive, but kept so that weight names match."""
    layers = nn.Sequential(
        nn.Linear(HEAD_WIDTH, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64),
        nn.Identity(), nn.Linear(64, 16), nn.Linear(16, 1),
    )  # fmt: skip
    with loading(head):
        file = path if (path := Path(head).expanduser()).is_file() else folder_of(head, [HEAD_FILE]) / HEAD_FILE
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("layers."): tensor.float() for name, tensor in tensors.items()}
        check_shapes(layers, {name: tuple(tensor.shape) for name, tensor in weights.items()}, head)
        layers.load_state_dict(weights)
    return layers.eval().requires_grad_(False)


class ImageSimilarity(ResizeReward):
    """Similarity of an edit to its source images."""

    needs_source = True

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return [sample.media, *sample.source], []

    def refuse(self, sample: Sample) -> str:
        """Also rejects samples without source images, or with one that cannot be encoded."""
        own = super().refuse(sample) or ("" if sample.source else "the sample has no source image")
        return own or next((why for m in sample.source if (why := unusable(m, ("image",)))), "")

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images[1:] @ images[0]).mean()


class SubfigClipT(OpenClipReward):
    """Mean CLIP similarity between each cell of a grid and its part of the prompt."""

    probe: ClassVar[dict[str, Any]] = {"prompt": "a 1x2 grid. [LEFT]: a red square. [RIGHT]: a blue circle."}

    def _parts(self, sample: Sample) -> tuple[list[Media], list[str]]:
        rows, cols = require_grid(sample.prompt, sample.meta)
        cells = split(sample.media, rows, cols)
        texts = sub_prompts(sample.prompt)[1]
        if len(texts) != len(cells):
            raise ValueError(f"the prompt describes {len(texts)} cells (' [LEFT]: …') of a {rows}x{cols} grid")
        return cells, texts

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images * texts).sum(-1).mean()
