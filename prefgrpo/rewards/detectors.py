"""Object detectors for `geneval`: a Mask2Former of transformers, or MMDetection 3, with which GenEval was published.

Mask2Former's score for a query q and class c, whose box is the bounds of q's mask:

    p(c | q) · mean of σ(mask logits) over positive logits

Your own detector is any class with `names` and `__call__` (see Detector), given as `pkg.mod:Class`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import RewardError, library
from prefgrpo.rewards.weights import device_of, frozen, loading, pretrained

RENAMED = {
    "mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "motorbike": "motorcycle",
    "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant", "diningtable": "dining table",
    "tvmonitor": "tv", "hair dryer": "hair drier",
}  # fmt: skip
"""Detectors' class names → names in GenEval's prompts."""
QUERIES = 100
"""Maximum objects per image; those with the highest scores are kept."""


@dataclass(frozen=True, eq=False)
class Detection:
    """One detected object: class, score 0 … 1, box x1, y1, x2, y2 in pixels (x2 and y2 exclusive), and mask [H, W], or
    None if the detector has no masks."""

    name: str
    score: float
    box: NDArray[np.float64]
    mask: NDArray[np.bool_] | None = None


class Detector(Protocol):
    """Interface of the detectors for `geneval`."""

    names: frozenset[str]
    """All classes that it can detect."""

    def __call__(self, images: Sequence[Media]) -> list[list[Detection]]:
        """Objects of each image, of any score."""
        ...


class Transformers:
    """A Mask2Former (instances) in transformers' format."""

    def __init__(self, model: str = "facebook/mask2former-swin-small-coco-instance", device: str = "auto") -> None:
        """model: folder or hub id."""
        self._device = device_of(device)
        config = pretrained("AutoConfig", model)
        if config.model_type not in ("mask2former", "maskformer"):
            raise RewardError(f"geneval: expected a Mask2Former, got a {config.model_type} in '{model}'")
        library("scipy", "scipy")  # required by transformers' classes for these models
        loaded = pretrained("AutoModelForUniversalSegmentation", model, output_loading_info=True)
        self._model = frozen(*loaded, "missing_keys").to(self._device)
        self._processor = pretrained("AutoImageProcessor", model, backend="pil")
        self._labels = {int(k): RENAMED.get(v, v) for k, v in config.id2label.items()}
        self.names = frozenset(self._labels.values())

    @torch.inference_mode()
    def __call__(self, images: Sequence[Media]) -> list[list[Detection]]:
        """Objects of each image, of any score."""
        batch = self._processor(images=[m.pil for m in images], return_tensors="pt")
        pixels = batch["pixel_values"].to(self._device)
        masks = {k: v.to(self._device) for k, v in batch.items() if k == "pixel_mask"}
        outputs = self._model(pixel_values=pixels, **masks)
        sizes = [m.pixels.shape[:2] for m in images]
        seen = functional.interpolate(
            outputs.masks_queries_logits.float(), pixels.shape[2:], mode="bilinear", align_corners=False
        )
        valid = masks.get("pixel_mask", torch.ones(len(images), *pixels.shape[2:]))
        ends = [(int(v.any(1).sum()), int(v.any(0).sum())) for v in valid]  # the rest is padding
        shown = [(seen[k, :, :high, :wide], sizes[k]) for k, (high, wide) in enumerate(ends)]
        classes = outputs.class_queries_logits.float().softmax(-1)[..., :-1]
        return [self._instances(p, m, size) for p, (m, size) in zip(classes, shown, strict=True)]

    def _instances(self, chances: Tensor, logits: Tensor, size: tuple[int, int]) -> list[Detection]:
        """Objects from class probabilities [Q, C] and mask logits [Q, h, w]."""
        best = chances.flatten().topk(min(QUERIES, chances.numel()))
        logits = functional.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
        detections = []
        for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            query, label = divmod(place, chances.shape[1])
            mask = logits[query] > 0
            if mask.any():
                score *= float(logits[query][mask].sigmoid().mean())
                outline = mask.cpu().numpy()
                detections.append(Detection(self._labels[label], score, bounds(outline), outline))
        return detections


def bounds(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """x1, y1, x2, y2 around a mask's true pixels."""
    ys, xs = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1], dtype=np.float64)


class MMDet:
    """A detector of MMDetection 3."""

    def __init__(self, config: str, checkpoint: str, device: str = "auto") -> None:
        """config: the .py file. checkpoint: the .pth file, as mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.pth."""
        self._apis = library("mmdet.apis", "mmdet, in an environment of its own")
        with loading(checkpoint):
            self._model = self._apis.init_detector(config, checkpoint, device=str(device_of(device)))
        self._names = [RENAMED.get(n, n) for n in self._model.dataset_meta["classes"]]
        self.names = frozenset(self._names)

    def __call__(self, images: Sequence[Media]) -> list[list[Detection]]:
        """Objects of each image, of any score. Pixels are passed as BGR, which MMDetection expects for arrays."""
        shown = [np.ascontiguousarray(m.pixels[..., ::-1]) for m in images]
        return [self._found(result) for result in self._apis.inference_detector(self._model, shown)]

    def _found(self, result: Any) -> list[Detection]:
        kept = result.pred_instances
        masks = kept.masks.cpu().numpy().astype(bool) if "masks" in kept else [None] * len(kept.labels)
        rows = zip(kept.labels.tolist(), kept.scores.tolist(), kept.bboxes.cpu().numpy(), masks, strict=True)
        return [Detection(self._names[k], score, box.astype(np.float64), mask) for k, score, box, mask in rows]
