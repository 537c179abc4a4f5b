"""Rewards from image embeddings: image and prompt, edit and source images, or the cells of a grid.

    clip, hpsv2        cos(image, prompt)               pickscore         cos, or exp(logit_scale)·cos/26
    clipscore          exp(logit_scale)·cos/30          aesthetic         head(e_image), 768-1024-128-64-16-1, linear
    image_similarity   mean_s cos(image, source_s)      subfig_clipT      mean_i cos(cell_i, text_i)

The weights differ: DFN5B (Fang et al. 2309.17425), HPS 2.1 (Wu et al. 2306.09341), PickScore (Kirstain et al.
2305.01569), OpenAI's CLIP L/14 (Radford et al. 2103.00020), LAION's aesthetic predictor (Schuhmann); the
divisors 26 and 30 are Flow-GRPO's, the grids PaCo-RL's (2512.04784; grid.py). A clip's value is the mean over frames.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards.base import INSTALL, Question, Reward, RewardError, Sample, check_media, library
from prefgrpo.rewards.encoder import Encoder, OpenClip, Resize, Transformers, get_encoder
from prefgrpo.rewards.simple import grid_of, split, sub_prompts
from prefgrpo.rewards.weights import Dtype, folder_of, linear_head, loading, read_tensors

PICKSCORE = "yuvalkirstain/PickScore_v1"
VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HEAD_FILE = "aesthetic-model.pth"


def bilinear(image: Tensor, side: int) -> Tensor:
    """[3, H, W] -> [3, side, side]: bilinear resize in float and centre crop, as in Flow-GRPO and PaCo-RL."""
    vision = library("torchvision.transforms.functional", INSTALL)
    return vision.center_crop(vision.resize(image, [side]), [side, side])


def padded(image: Tensor, side: int) -> Tensor:
    """[3, H, W] -> [3, side, side]: resize the longer side in float and pad with black, as hpsv2 does."""
    vision = library("torchvision.transforms.functional", INSTALL)
    scale = side / max(image.shape[1:])
    high, wide = (max(1, round(n * scale)) for n in image.shape[1:])
    left, top = (side - wide) // 2, (side - high) // 2
    resized = vision.resize(image, [high, wide], vision.InterpolationMode.BICUBIC)
    return vision.pad(resized, [left, top, side - wide - left, side - high - top])


RESIZES: dict[str, Resize | None] = {"processor": None, "bilinear": bilinear, "padded": padded}
"""How images are resized for the model; None: by the checkpoint's image processor."""


@dataclass(kw_only=True, eq=False)
class EncoderReward(Reward):
    """Scores a sample from the embeddings of its images and texts.

    model: folder or hub id of a CLIPModel, or of an open_clip checkpoint. device: auto, cpu, cuda, cuda:1. dtype: the
    model's dtype. batch_size: samples per call, and images per forward. The encoder gets the options that it knows.
    """

    model: str = "openai/clip-vit-large-patch14"
    device: str = "auto"
    dtype: Dtype = "float32"
    batch_size: PositiveInt = 32
    loader: ClassVar[type[Encoder]] = Transformers
    resize = "processor"

    def __post_init__(self) -> None:
        takes = inspect.signature(self.loader).parameters
        self.encoder: Any = get_encoder(
            self.loader, **{name: getattr(self, name) for name in takes if hasattr(self, name)}
        )

    @abstractmethod
    def _inputs(self, sample: Sample) -> tuple[list[Media], list[str]]:
        """Images and texts to encode; ValueError with the reason if the sample cannot be scored."""

    @abstractmethod
    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        """Values from a sample's unit vectors [n, D] and [m, D]; the score is their mean."""

    def check(self, sample: Sample) -> None:
        """Also rejects samples without the images or texts that are compared."""
        super().check(sample)
        self._inputs(sample)

    @torch.inference_mode()
    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample; repeated images and texts are encoded once."""
        samples = [sample for (sample,) in asked]
        inputs = [self._inputs(s) for s in samples]
        images = self.encoder.images([m for media, _ in inputs for m in media], RESIZES[self.resize])
        texts = self.encoder.texts([text for _, texts in inputs for text in texts])
        each = zip(images.split([len(m) for m, _ in inputs]), texts.split([len(t) for _, t in inputs]), strict=True)
        return [Answer(self._values(i, t).double().mean().item()).finite() for i, t in each]


@dataclass(kw_only=True, eq=False)
class TextImage(EncoderReward):
    """Cosine similarity of image and prompt. frames: evenly spaced frames of a clip to score; 1: only the first."""

    takes = ("image", "video")
    frames: PositiveInt = 8

    def _inputs(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return sample.media.frames(self.frames), [sample.prompt]

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images * texts).sum(-1)


@dataclass(kw_only=True, eq=False)
class Clip(TextImage):
    """Cosine similarity of image and prompt by Pref-GRPO's model: DFN5B's weights in open_clip's ViT-H-14.

    Source of the weights: Data Filtering Networks (arXiv 2309.17425), ViT-H/14-378.

    architecture: that of open_clip into which the weights are put (ViT-H-14: 224 pixels, GELU, centre crop);
    checkpoint: the checkpoint's own (DFN5B: 378 pixels, QuickGELU, squashed), needed for other models.
    """

    model: str = "apple/DFN5B-CLIP-ViT-H-14-378"
    architecture: str = "ViT-H-14"
    loader = OpenClip


@dataclass(kw_only=True, eq=False)
class Hpsv2(TextImage):
    """Human Preference Score 2.1: cosine under a ViT-H/14 trained on human choices; images are padded, not cropped.

    Computed in float32. Source: arXiv 2306.09341.

    file: weights file, {"state_dict": …}; HPS_v2_compressed.pt is version 2.0. architecture: as for clip.
    """

    model: str = "xswu/HPSv2"
    file: str = "HPS_v2.1_compressed.pt"
    architecture: str = "ViT-H-14"
    loader = OpenClip
    resize = "padded"


@dataclass(kw_only=True, eq=False)
class Pickscore(TextImage):
    """PickScore 1: cosine under a CLIP-H trained on human choices, or Flow-GRPO's logit/26.

    Source: Pick-a-Pic (arXiv 2305.01569).

    processor: folder or hub id of the tokenizer and image processor; default: the model's own, or for the published
    model laion/CLIP-ViT-H-14-laion2B-s32B-b79K. scale: cosine, or logit for exp(logit_scale)·cos/26.
    """

    model: str = PICKSCORE
    processor: str = ""
    scale: Literal["cosine", "logit"] = "cosine"

    def __post_init__(self) -> None:
        self.processor = self.processor or (VIT_H if self.model == PICKSCORE else "")
        super().__post_init__()

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return super()._values(images, texts) * (self.encoder.scale / 26 if self.scale == "logit" else 1.0)


@dataclass(kw_only=True, eq=False)
class Clipscore(TextImage):
    """OpenAI CLIP L/14's logit/30, scaled as in Flow-GRPO (CLIP: arXiv 2103.00020).

    resize: processor (that of the checkpoint) or bilinear (Flow-GRPO's, PaCo-RL's).
    """

    resize: Literal["processor", "bilinear"] = "processor"

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return super()._values(images, texts) * self.encoder.scale / 30


@dataclass(kw_only=True, eq=False)
class Aesthetic(TextImage):
    """Aesthetic rating of an image, about 1 to 10; the prompt is ignored.

    LAION's aesthetic predictor: a linear head on the normalised image embedding of CLIP L/14.

    model: a CLIPModel with embeddings of size 768. head: file with the head's weights
    (sac+logos+ava1-l14-linearMSE.pth), or a folder or hub id with aesthetic-model.pth.
    """

    head: str = "trl-lib/ddpo-aesthetic-predictor"

    def __post_init__(self) -> None:
        super().__post_init__()
        with loading(self.head):
            path = Path(self.head).expanduser()
            file = path if path.is_file() else folder_of(self.head, [HEAD_FILE]) / HEAD_FILE
            # the published head has dropout, which is inactive, and no activations
            self.layers = linear_head(read_tensors([file]), "layers.", nn.Identity)
        takes, width = self.layers[0].in_features, self.encoder.model.config.projection_dim
        if takes != width:
            raise RewardError(
                f"the head '{self.head}' takes embeddings of width {takes}, but those of '{self.model}' have {width}; "
                "use CLIP L/14 with aesthetic's head"
            )

    def _inputs(self, sample: Sample) -> tuple[list[Media], list[str]]:
        return sample.media.frames(self.frames), []

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.layers(images)


@dataclass(kw_only=True, eq=False)
class ImageSimilarity(EncoderReward):
    """Cosine similarity of an edit to its source images under CLIP L/14, averaged over the sources.

    resize: as for clipscore.
    """

    needs_source = True
    resize: Literal["processor", "bilinear"] = "processor"

    def _inputs(self, sample: Sample) -> tuple[list[Media], list[str]]:
        if not sample.source:
            raise ValueError("the sample has no source image")
        for source in sample.source:
            check_media(source, ("image",))
        return [sample.media, *sample.source], []

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return images[1:] @ images[0]


@dataclass(kw_only=True, eq=False)
class SubfigClipT(EncoderReward):
    """Mean CLIP similarity between each cell of a grid and its part of the prompt.

    The model is laion2B's ViT-H/14. Source: PaCo-RL (arXiv 2512.04784).
    """

    model: str = VIT_H
    loader = OpenClip
    reads = ("grid",)
    probe: ClassVar[dict[str, Any]] = {"prompt": "a 1x2 grid. [LEFT]: a red square. [RIGHT]: a blue circle."}

    def _inputs(self, sample: Sample) -> tuple[list[Media], list[str]]:
        rows, cols = grid_of(sample.prompt, sample.meta)
        cells = split(sample.media, rows, cols)
        texts = sub_prompts(sample.prompt)[1]
        if len(texts) != len(cells):
            raise ValueError(f"the prompt describes {len(texts)} cells (' [LEFT]: …') of a {rows}x{cols} grid")
        return cells, texts

    def _values(self, images: Tensor, texts: Tensor) -> Tensor:
        return (images * texts).sum(-1)
