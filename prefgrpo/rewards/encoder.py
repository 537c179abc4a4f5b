"""CLIP models of two libraries: images and texts as unit vectors.

    e = f(x) / |f(x)|   in float32        cosine of image and text = e_image · e_text

Invariant: a vector does not depend on the rest of its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import INSTALL, RewardError, library
from prefgrpo.rewards.weights import device_of, folder_of, frozen, loading, pretrained

CHARACTERS = 4000
"""Cut-off for texts: far more than fits into 77 tokens, but bounded."""
CHECKPOINT = "checkpoint"
Resize = Callable[[Tensor, int], Tensor]
"""[3, H, W] in [0, 1] and a side -> [3, side, side]."""
T = TypeVar("T")


def clean(text: str) -> str:
    """A text as passed to the tokenizer: its first CHARACTERS characters, without lone surrogates."""
    return text[:CHARACTERS].encode("utf-8", "replace").decode("utf-8")


class Encoder:
    """A loaded model; `OpenClip` and `Transformers` set the attributes."""

    model: Any
    preprocess: Callable[[Image.Image], Tensor]
    """An image as the checkpoint's input [3, side, side]."""
    encode_images: Callable[[Tensor], Tensor]
    """[B, 3, side, side] -> [B, D]."""
    encode_texts: Callable[[list[str]], Tensor]
    """B texts -> [B, D]."""
    side: int
    mean: Sequence[float]
    std: Sequence[float]
    """Size and normalisation of the input, for images resized in another way."""

    def __init__(self, device: str, dtype: str, batch_size: int) -> None:
        self.device = device_of(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.batch_size = batch_size

    def images(self, media: Sequence[Media], resize: Resize | None = None) -> Tensor:
        """[len(media), D] unit vectors, float32 on the CPU; `resize` replaces the checkpoint's preprocessing."""

        def encode(some: Sequence[Media]) -> Tensor:
            pixels = [self._resized(m, resize) if resize else self.preprocess(m.pil) for m in some]
            return self.encode_images(torch.stack(pixels).to(self.device, self.dtype))

        return self._vectors(media, [m.digest for m in media], encode)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[len(texts), D] unit vectors, float32 on the CPU."""
        return self._vectors(texts, texts, lambda some: self.encode_texts([clean(text) for text in some]))

    def _resized(self, media: Media, resize: Resize) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(media.pixels)).permute(2, 0, 1) / 255.0
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (resize(pixels, self.side) - mean[:, None, None]) / std[:, None, None]

    @torch.inference_mode()
    def _vectors(self, items: Sequence[T], keys: Sequence[str], encode: Callable[[Sequence[T]], Tensor]) -> Tensor:
        """The unit vector of each item, `batch_size` at a time; items with equal keys are encoded once."""
        different = dict(zip(keys, items, strict=True))
        some = list(different.values())
        encoded = [encode(some[k : k + self.batch_size]) for k in range(0, len(some), self.batch_size)]
        if not encoded:
            return torch.empty(0)
        vectors = functional.normalize(torch.cat(encoded).float()).cpu()
        row = {key: k for k, key in enumerate(different)}
        return vectors[[row[key] for key in keys]]


class OpenClip(Encoder):
    """A checkpoint of open_clip."""

    def __init__(
        self, model: str, device: str, dtype: str, batch_size: int, file: str = "", architecture: str = CHECKPOINT
    ) -> None:
        """model: folder or hub id. file: name of the weights file; empty: open_clip's own names. architecture: a name
        of open_clip's, into which the weights are put with its preprocessing; checkpoint: open_clip_config.json's."""
        super().__init__(device, dtype, batch_size)
        open_clip = library("open_clip", INSTALL)
        folder, weights = _weights(model, [file] if file else ["open_clip*.safetensors", "open_clip*.bin"])
        if architecture == CHECKPOINT and not (folder / "open_clip_config.json").is_file():
            raise RewardError(
                f"'{model}' has no open_clip_config.json, which describes its architecture: download it, or name an "
                "architecture of open_clip in the option `architecture`"
            )
        name = f"local-dir:{folder}" if architecture == CHECKPOINT else architecture
        logging.disable(logging.WARNING)  # it warns of random weights, which are loaded afterwards
        try:
            with loading(f"{model} as {architecture}"):
                self.model, _, self.preprocess = open_clip.create_model_and_transforms(
                    name, load_weights=False, pretrained_text=False
                )
                open_clip.load_checkpoint(self.model, str(weights))
                tokenize = open_clip.get_tokenizer(name)
        finally:
            logging.disable(logging.NOTSET)
        self.model.eval().requires_grad_(False).to(self.device, self.dtype)
        self.encode_images = self.model.encode_image
        self.encode_texts = lambda texts: self.model.encode_text(tokenize(texts).to(self.device))
        config = self.model.visual.preprocess_cfg
        self.side = config["size"] if isinstance(config["size"], int) else config["size"][0]
        self.mean = config["mean"]
        self.std = config["std"]


def _weights(model: str, patterns: Sequence[str]) -> tuple[Path, Path]:
    """(folder, weights file) of a folder or hub repository, which may hold the same weights in several formats."""
    for pattern in patterns:
        folder = folder_of(model, ["*.json", "*.txt", pattern])
        if files := sorted(folder.glob(pattern)):
            return folder, files[0]
    raise RewardError(f"'{model}' has none of {', '.join(patterns)}; download the weights")


class Transformers(Encoder):
    """A CLIPModel folder of transformers."""

    def __init__(self, model: str, device: str, dtype: str, batch_size: int, processor: str = "") -> None:
        """processor: folder or hub id of the tokenizer and the image processor, by default the model's."""
        super().__init__(device, dtype, batch_size)
        loaded = pretrained("CLIPModel", model, dtype=self.dtype, output_loading_info=True)
        self.model = frozen(*loaded, "missing_keys", "mismatched_keys").to(self.device)
        self._tokenizer = pretrained("AutoTokenizer", processor or model)
        # The published numbers used Pillow's resize; torchvision's, the default if installed, differs slightly.
        images = pretrained("AutoImageProcessor", processor or model, backend="pil")
        self.preprocess = lambda image: images(image, return_tensors="pt")["pixel_values"][0]
        self.encode_images = lambda pixels: self.model.get_image_features(pixel_values=pixels).pooler_output
        self.encode_texts = self._encode_texts
        self.side = images.crop_size["height"]
        self.mean = images.image_mean
        self.std = images.image_std
        self.scale = float(self.model.logit_scale.float().exp())
        """exp(logit_scale): the factor of the cosine in the model's own logits."""

    def _encode_texts(self, texts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        batch = self._tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return self.model.get_text_features(**batch.to(self.device)).pooler_output


_open: WeakValueDictionary[tuple[Any, ...], Encoder] = WeakValueDictionary()


def get_encoder(kind: type[Encoder], **options: Any) -> Encoder:
    """kind(**options), or the open instance: rewards with the same model and options share it."""
    key = (kind, *options.items())
    encoder = _open.get(key)
    if encoder is None:
        encoder = _open[key] = kind(**options)
    return encoder
