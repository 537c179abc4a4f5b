"""Image encoders: images and texts as unit vectors, for models from several libraries.

    e = f(x) / |f(x)|   in float32        cosine of image and text = e_image · e_text

One loader per library: `OpenClip` for its own checkpoints, `Transformers` for CLIPModel folders. Invariant: a vector
does not depend on the rest of its batch; a text is encoded once as long as it is cached.
"""

from __future__ import annotations

import difflib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import RewardError
from prefgrpo.rewards.checkpoints import (
    check_shapes,
    device_of,
    dtype_of,
    folder_of,
    library,
    loading,
    shapes_of,
    source_of,
)

REMEMBERED = 4096
"""Number of texts whose vectors are cached."""
CHARACTERS = 4000
"""Cut-off for texts: far more than fits into 77 tokens, but bounded."""
Fit = Callable[[Tensor, int], Tensor]
"""[3, H, W] in [0, 1] and a side -> [3, side, side]."""
CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")


T = TypeVar("T")


def clean(text: str) -> str:
    """A text as passed to the tokenizer: its first CHARACTERS characters, without lone surrogates."""
    return text[:CHARACTERS].encode("utf-8", "replace").decode("utf-8")


class Encoder(ABC):
    """A loaded model."""

    scale: float
    """exp(logit_scale): the factor of the cosine in the model's own logits (`Transformers` only)."""
    width: int
    """D, the length of a vector (`Transformers` only)."""

    def __init__(self, device: str, dtype: str, batch_size: int) -> None:
        self.device, self.dtype, self.batch_size = device_of(device), dtype_of(dtype), batch_size
        self._texts: dict[str, Tensor] = {}

    @abstractmethod
    def _pixels(self, media: Media) -> Tensor:
        """[3, H, W], preprocessed and resized as the checkpoint specifies."""

    @abstractmethod
    def _encode_images(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, D]."""

    def _encode_texts(self, texts: list[str]) -> Tensor:
        """[B, D]."""
        raise TypeError(f"{type(self).__name__} has no text encoder")

    def _standard(self) -> tuple[int, Sequence[float], Sequence[float]]:
        """(side, mean, std) of the model's input pixels, for use with a `fit`."""
        raise TypeError(f"{type(self).__name__} resizes images itself")

    def _fitted(self, media: Media, fit: Fit) -> Tensor:
        side, mean, std = self._standard()
        pixels = torch.from_numpy(np.ascontiguousarray(media.pixels)).permute(2, 0, 1) / 255.0
        return (fit(pixels, side) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    def _vectors(self, items: Sequence[T], encode: Callable[[Sequence[T]], Tensor]) -> list[Tensor]:
        """The unit vector of each item, `batch_size` at a time."""
        starts = range(0, len(items), self.batch_size)
        return [v for k in starts for v in functional.normalize(encode(items[k : k + self.batch_size]).float()).cpu()]

    @torch.inference_mode()
    def images(self, media: Sequence[Media], fit: Fit | None = None) -> Tensor:
        """[len(media), D] unit vectors, float32 on the CPU; equal images are encoded once.

        fit: resizes the images instead of the checkpoint's preprocessing.
        """

        def encode(some: Sequence[Media]) -> Tensor:
            pixels = torch.stack([self._fitted(m, fit) if fit else self._pixels(m) for m in some])
            return self._encode_images(pixels.to(self.device, self.dtype))

        different = {m.digest: m for m in media}
        known = dict(zip(different, self._vectors([*different.values()], encode), strict=True))
        return torch.stack([known[m.digest] for m in media]) if media else torch.empty(0)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """[len(texts), D] unit vectors, float32 on the CPU; equal texts are encoded once."""
        known = self._texts
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, self._vectors(new, lambda some: self._encode_texts([*map(clean, some)])), strict=True))
        vectors = torch.stack([known[text] for text in texts]) if texts else torch.empty(0)
        for text in list(known)[:-REMEMBERED]:
            del known[text]
        return vectors


class OpenClip(Encoder):
    """A checkpoint of open_clip."""

    def __init__(
        self, model: str, architecture: str, otherwise: str, file: str, device: str, dtype: str, batch_size: int
    ) -> None:
        """`architecture` must match the config beside the weights, if any; `otherwise` is used if neither is given.
        `file`: name of the weights file in the folder or repository `model`; default: open_clip's standard names."""
        super().__init__(device, dtype, batch_size)
        self._library = library("open_clip", "'prefgrpo[rewards]'")
        weights = _weights(model, file)
        with loading(model), _mute_open_clip_warnings():
            name, preprocessing = self._architecture(weights, architecture, otherwise)
            self._model, _, self._preprocess = self._library.create_model_and_transforms(
                name, load_weights=False, pretrained_text=False, **preprocessing
            )
            check_shapes(self._model, shapes_of(weights), str(weights))
            self._library.load_checkpoint(self._model, str(weights))
            self._tokenize = self._library.get_tokenizer(name)
        self._model.eval().requires_grad_(False).to(self.device, self.dtype)

    def _architecture(self, weights: Path, asked: str, otherwise: str) -> tuple[str, dict[str, Any]]:
        """open_clip's name of the model, and its preprocessing unless a config beside the weights specifies it."""
        configs, known = self._library.get_model_config, self._library.list_models()
        if asked and asked not in known:
            near = ", ".join(difflib.get_close_matches(asked, known, n=5)) or "open_clip.list_models()"
            raise RewardError(f"open_clip has no architecture '{asked}'; see {near}")
        if (weights.parent / CONFIG).is_file():
            beside = f"local-dir:{weights.parent}"
            if asked and configs(beside) != configs(asked):
                raise RewardError(
                    f"{weights.parent / CONFIG} describes another model than '{asked}'; give only one of the two"
                )
            return beside, {}
        name = asked or otherwise
        return name, _published(name, bool(configs(name).get("quick_gelu")))

    def _pixels(self, media: Media) -> Tensor:
        return self._preprocess(media.pil)

    def _standard(self) -> tuple[int, Sequence[float], Sequence[float]]:
        config = self._model.visual.preprocess_cfg
        side = config["size"] if isinstance(config["size"], int) else config["size"][0]
        return side, config["mean"], config["std"]

    def _encode_images(self, pixels: Tensor) -> Tensor:
        return self._model.encode_image(pixels)

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return self._model.encode_text(self._tokenize(texts).to(self.device))


class Transformers(Encoder):
    """A CLIPModel folder of transformers."""

    def __init__(self, model: str, processor: str, device: str, dtype: str, batch_size: int) -> None:
        """`processor`: folder or hub id of the tokenizer and the image processor, by default the model's."""
        super().__init__(device, dtype, batch_size)
        T = library("transformers", "'prefgrpo[rewards]'")
        with loading(model):
            self._model, info = T.CLIPModel.from_pretrained(
                **source_of(model), dtype=self.dtype, output_loading_info=True
            )
            wrong = {k: sorted(map(str, info[k]))[:3] for k in ("missing_keys", "mismatched_keys") if info[k]}
            if wrong:
                raise RewardError(f"'{model}' is not the CLIP model that its config.json describes: {wrong}")
        with loading(processor := processor or model):
            self._tokenizer = T.AutoTokenizer.from_pretrained(**source_of(processor))
            # The published numbers used Pillow's resize; torchvision's, the default if installed, differs slightly.
            self._processor = T.AutoImageProcessor.from_pretrained(**source_of(processor), backend="pil")
        self._model.eval().requires_grad_(False).to(self.device)
        self.width = self._model.config.projection_dim
        self._length = self._model.config.text_config.max_position_embeddings
        self.scale = float(self._model.logit_scale.float().exp())

    def _pixels(self, media: Media) -> Tensor:
        return self._processor(media.pil, return_tensors="pt")["pixel_values"][0]

    def _standard(self) -> tuple[int, Sequence[float], Sequence[float]]:
        return self._processor.crop_size["height"], self._processor.image_mean, self._processor.image_std

    def _encode_images(self, pixels: Tensor) -> Tensor:
        return self._model.get_image_features(pixel_values=pixels).pooler_output

    def _encode_texts(self, texts: list[str]) -> Tensor:
        batch = self._tokenizer(
            texts, padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        )
        ids, mask = batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)
        return self._model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output


_open: WeakValueDictionary[tuple[Any, ...], Encoder] = WeakValueDictionary()


def get_encoder(kind: type[Encoder], *options: Any) -> Encoder:
    """kind(*options), or the open instance: rewards with the same model and options share it."""
    encoder = _open.get((kind, options))
    if encoder is None:
        encoder = _open[kind, options] = kind(*options)
    return encoder


@contextmanager
def _mute_open_clip_warnings() -> Iterator[None]:
    """Suppress open_clip's warnings on the root logger that weights are random; they are loaded afterwards."""
    root, nowhere = logging.getLogger(), logging.NullHandler()

    def not_from_open_clip(record: logging.LogRecord) -> bool:
        return "open_clip" not in record.pathname

    root.addHandler(nowhere)  # else its first message would install a handler for the whole process
    root.addFilter(not_from_open_clip)
    try:
        yield
    finally:
        root.removeFilter(not_from_open_clip)
        root.removeHandler(nowhere)


def _weights(model: str, file: str) -> Path:
    """Path of the weights, given a file, a folder or a hub repository."""
    if (path := Path(model).expanduser()).is_file():
        return path
    names = (file,) if file else WEIGHTS
    folder_of(model, ("*.json", "*.txt"))
    for name in names:  # in turn: a repository may hold the same weights in several formats
        if (found := folder_of(model, (name,)) / name).is_file():
            return found
    raise RewardError(f"'{model}' has none of {', '.join(names)}; download the weights, or give their file as model")


def _published(architecture: str, quick_gelu: bool) -> dict[str, Any]:
    """Preprocessing of the published weights of an architecture if there is only one set; else open_clip's default.

    Weights do not reveal the activation they were trained with, so an architecture whose only published weights use the
    other activation is rejected.
    """
    import open_clip as library

    tags = library.list_pretrained_tags_by_model(architecture)
    if len(tags) != 1:
        return {}
    config = library.get_pretrained_cfg(architecture, tags[0])
    if bool(config.get("quick_gelu")) != quick_gelu:
        raise RewardError(
            f"architecture '{architecture}' has another activation than its published weights ({tags[0]}); "
            f"expected '{architecture}-quickgelu'"
        )
    return {f"image_{key}": config[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in config}
