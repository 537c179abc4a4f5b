"""Rewards of one image vector: `clip`, `hpsv2`, `pickscore`, `clipscore`, `aesthetic`.

    clip, hpsv2      cos(image, prompt)                 pickscore     cos, or exp(logit_scale)·cos/26
    clipscore        exp(logit_scale)·cos/30            aesthetic     head(e_image), 768-1024-128-64-16-1, linear

The weights differ: DFN5B (Fang et al. 2309.17425), HPS 2.1 (Wu et al. 2306.09341), PickScore (Kirstain et al.
2305.01569), OpenAI's CLIP L/14 (Radford et al. 2103.00020), LAION's aesthetic predictor (Schuhmann); the divisors 26
and 30 are Flow-GRPO's. Of a clip: the mean over `frames` frames. Pref-GRPO and DanceGRPO score the first alone
(`frames: 1`), which rewards a good start. Invariant: a value that is not finite is missing; the others are scored.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.checkpoints import check_shapes, folder_of, loading
from prefgrpo.rewards.encoder import Encoder, Fit

PICKSCORE, VIT_H = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HEAD_FILE, HEAD_WIDTH = "aesthetic-model.pth", 768


def bilinear(image: Tensor, side: int) -> Tensor:
    """[3, side, side] of [3, H, W]: antialiased bilinear in float until the shorter side fits, then the middle of it.

    torchvision's Resize(side) and CenterCrop(side), with which Flow-GRPO and PaCo-RL feed CLIP.
    """
    _, high, wide = image.shape
    size = (side, side * wide // high) if high < wide else (side * high // wide, side)
    resized = functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    top, left = (round((n - side) / 2) for n in size)
    return resized[:, top : top + side, left : left + side]


def padded(image: Tensor, side: int) -> Tensor:
    """[3, side, side] of [3, H, W]: the longer side fills it, black bars the rest; resized in float, as hpsv2 does."""
    _, high, wide = image.shape
    scale = side / max(high, wide)
    high, wide = (max(1, round(n * scale)) for n in (high, wide))
    resized = functional.interpolate(image[None], (high, wide), mode="bicubic", antialias=True)[0]
    left, top = (side - wide) // 2, (side - high) // 2
    return functional.pad(resized, (left, side - wide - left, top, side - high - top))


RESIZES: dict[str, Fit | None] = {"processor": None, "bilinear": bilinear, "padded": padded}
"""How images get the model's size; None: as the checkpoint's own image processor does."""


@dataclass(kw_only=True, eq=False)
class EncoderReward(PointwiseReward):
    """model: folder or hub id of a CLIPModel of transformers. device: auto, cpu, cuda, cuda:1. dtype: of the model.
    batch_size: images at once."""

    model: str = "openai/clip-vit-large-patch14"
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 32
    resize = "processor"

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise RewardError(f"resize must be one of {', '.join(RESIZES)}, got '{self.resize}'")
        self.encoder = self._load()

    def _load(self) -> Encoder:
        return encoder.shared(encoder.Transformers, self.model, "", self.device, self.dtype, self.batch_size)


@dataclass(kw_only=True, eq=False)
class OpenClipReward(EncoderReward):
    """model: folder or hub id with open_clip_config.json and weights, or a weights file. architecture: open_clip's name
    of it; by default what the config beside the weights says, else that of the published model."""

    model: str = VIT_H
    architecture: str = ""
    otherwise = "ViT-H-14"
    file = ""

    def _load(self) -> Encoder:
        names = (self.model, self.architecture, self.otherwise, self.file)
        return encoder.shared(encoder.OpenClip, *names, self.device, self.dtype, self.batch_size)


@dataclass(kw_only=True, eq=False)
class ResizeReward(EncoderReward):
    """resize: processor, as the checkpoint's image processor does (bicubic on 8 bits), bilinear, in float, as Flow-GRPO
    and PaCo-RL do, or padded, as hpsv2 does."""

    resize: str = "processor"


@dataclass(kw_only=True, eq=False)
class FrameReward(EncoderReward):
    """frames: how many frames of a clip are scored, evenly spread; 1 is the first alone."""

    takes = ("image", "video")
    frames: int = 8

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise RewardError(f"frames must be at least 1, got {self.frames}")
        super().__post_init__()

    @abstractmethod
    def _values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        """[n] values of n images: their vectors [n, D] and their prompts."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample, the mean over its frames."""
        return self.in_batches(samples, max(1, len(samples)), self._scores)

    def _scores(self, samples: list[Sample]) -> list[Score]:
        frames = [s.media.frames(self.frames) for s in samples]
        vectors = self.encoder.images([frame for own in frames for frame in own], RESIZES[self.resize])
        values = self._values(vectors, [s.prompt for s, own in zip(samples, frames, strict=True) for _ in own])
        return [mean_score(own.tolist()) for own in values.split([len(own) for own in frames])]


def mean_score(values: list[float]) -> Score:
    """Mean of the values; missing if it is not finite."""
    mean = math.fsum(values) / len(values)
    return Score(mean) if math.isfinite(mean) else Score(None, f"the model's score is {mean}")


class TextImage(FrameReward):
    """factor · cosine of image and prompt."""

    factor = 1.0

    def _values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        return self.factor * (vectors * self.encoder.texts(prompts)).sum(-1)


@dataclass(kw_only=True, eq=False)
class Clip(TextImage, OpenClipReward):
    """Cosine under DFN5B's ViT-H/14 at 378 pixels, or any other open_clip model."""

    model: str = "apple/DFN5B-CLIP-ViT-H-14-378"
    otherwise = "ViT-H-14-378-quickgelu"


@dataclass(kw_only=True, eq=False)
class Hpsv2(TextImage, OpenClipReward):
    """Human preference score 2.1: the cosine under a ViT-H/14 trained on choices; images are padded, not cropped.

    file: its weights, {"state_dict": …}; HPS_v2_compressed.pt is version 2.0.
    """

    model: str = "xswu/HPSv2"
    file: str = "HPS_v2.1_compressed.pt"
    resize = "padded"


@dataclass(kw_only=True, eq=False)
class Pickscore(TextImage):
    """PickScore 1: the cosine under a CLIP-H trained on choices, or Flow-GRPO's logit/26.

    processor: folder or hub id of the tokenizer and image processor; by default the model's, for the published model
    laion/CLIP-ViT-H-14-laion2B-s32B-b79K. scale: cosine, or logit for exp(logit_scale)·cos/26.
    """

    model: str = PICKSCORE
    processor: str = ""
    scale: str = "cosine"

    def __post_init__(self) -> None:
        if self.scale not in ("cosine", "logit"):
            raise RewardError(f"pickscore's scale must be cosine or logit, got '{self.scale}'")
        super().__post_init__()
        self.factor = self.encoder.scale / 26 if self.scale == "logit" else 1.0

    def _load(self) -> Encoder:
        processor = self.processor or (VIT_H if self.model == PICKSCORE else "")
        return encoder.shared(encoder.Transformers, self.model, processor, self.device, self.dtype, self.batch_size)


@dataclass(kw_only=True, eq=False)
class Clipscore(TextImage, ResizeReward):
    """OpenAI CLIP L/14's logit/30."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.factor = self.encoder.scale / 30


@dataclass(kw_only=True, eq=False)
class Aesthetic(FrameReward):
    """How much people like the look of an image, about 1 to 10; the prompt is not looked at.

    model: a CLIPModel with vectors of 768. head: file of the head's weights (sac+logos+ava1-l14-linearMSE.pth), or
    folder or hub id that has them as aesthetic-model.pth.
    """

    head: str = "trl-lib/ddpo-aesthetic-predictor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (width := self.encoder.width) != HEAD_WIDTH:
            message = f"aesthetic's head takes vectors of {HEAD_WIDTH}, '{self.model}' gives {width}"
            raise RewardError(f"{message}; use CLIP L/14")
        self.layers = _head(self.head)

    @torch.inference_mode()
    def _values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        return self.layers(vectors)[:, 0]


def _head(head: str) -> nn.Sequential:
    """The published head; its dropouts, which do nothing here, keep their places in the names."""
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
