"""How well an image fits its prompt, by the cosine of two CLIP vectors: `clip`, `hpsv2`, `pickscore`, `clipscore`.

    clip, hpsv2      cos(image, prompt)                 pickscore     cos, or exp(logit_scale)·cos/26
    clipscore        exp(logit_scale)·cos/30

The weights differ: DFN5B (Fang et al. 2309.17425), HPS 2.1 (Wu et al. 2306.09341), PickScore (Kirstain et al.
2305.01569), OpenAI's CLIP L/14 (Radford et al. 2103.00020); the divisors 26 and 30 are Flow-GRPO's. Of a clip: the
mean over `frames` frames. Pref-GRPO and DanceGRPO score the first alone (`frames: 1`), which rewards a good start.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from prefgrpo.rewards import encoder
from prefgrpo.rewards.base import RewardError
from prefgrpo.rewards.frames import FrameReward

PICKSCORE = "yuvalkirstain/PickScore_v1"


class TextImage(FrameReward):
    """factor · cosine of image and prompt."""

    factor = 1.0

    def values(self, vectors: Tensor, prompts: list[str]) -> Tensor:
        """[n] of image vectors [n, D] and their prompts."""
        return self.factor * (vectors * self.encoder.texts(prompts)).sum(-1)


class Clip(TextImage):
    """Cosine under DFN5B's ViT-H/14 at 378 pixels, or any other open_clip model."""

    def __init__(
        self,
        model: str = "apple/DFN5B-CLIP-ViT-H-14-378",
        architecture: str = "",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id with open_clip_config.json and weights, or a weights file. architecture: open_clip's
        name of it, by default what the config beside the weights says, else ViT-H-14-378-quickgelu. device: auto, cpu,
        cuda, cuda:1. dtype: of the model. batch_size: images at once. frames: of a clip, evenly spread.
        """
        loaded = encoder.shared(
            encoder.OpenClip, model, architecture, "ViT-H-14-378-quickgelu", device, dtype, batch_size
        )
        super().__init__(loaded, frames)


class Hpsv2(TextImage):
    """Human preference score 2.1: the cosine under a ViT-H/14 trained on choices; images are padded, not cropped."""

    def __init__(
        self,
        model: str = "xswu/HPSv2",
        file: str = "HPS_v2.1_compressed.pt",
        architecture: str = "",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id, or the weights file. file: its weights, {"state_dict": …}; HPS_v2_compressed.pt is
        version 2.0. architecture: open_clip's name of it, by default what an open_clip_config.json beside the
        weights says, else ViT-H-14. device: auto, cpu, cuda, cuda:1. dtype: of the model. batch_size: images at
        once. frames: of a clip, evenly spread.
        """
        loaded = encoder.shared(encoder.OpenClip, model, architecture, "ViT-H-14", device, dtype, batch_size, file)
        super().__init__(loaded, frames, padded)


def padded(image: Tensor, side: int) -> Tensor:
    """[3, side, side] of [3, H, W]: the longer side fills it, black bars the rest; resized in float, as hpsv2 does."""
    _, high, wide = image.shape
    scale = side / max(high, wide)
    high, wide = (max(1, round(n * scale)) for n in (high, wide))
    resized = functional.interpolate(image[None], (high, wide), mode="bicubic", antialias=True)[0]
    left, top = (side - wide) // 2, (side - high) // 2
    return functional.pad(resized, (left, side - wide - left, top, side - high - top))


class Pickscore(TextImage):
    """PickScore 1: the cosine under a CLIP-H trained on choices, or Flow-GRPO's logit/26."""

    def __init__(
        self,
        model: str = PICKSCORE,
        processor: str = "",
        scale: str = "cosine",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id of a CLIPModel. processor: folder or hub id of its tokenizer and image processor; by
        default the model's, for the published model laion/CLIP-ViT-H-14-laion2B-s32B-b79K. scale: cosine, or logit
        for exp(logit_scale)·cos/26. device: auto, cpu, cuda, cuda:1. dtype: of the model. batch_size: images at
        once. frames: of a clip, evenly spread.
        """
        if scale not in ("cosine", "logit"):
            raise RewardError(f"pickscore's scale must be cosine or logit, got '{scale}'")
        if model == PICKSCORE:
            processor = processor or "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
        super().__init__(encoder.shared(encoder.Transformers, model, processor, device, dtype, batch_size), frames)
        self.factor = self.encoder.scale / 26 if scale == "logit" else 1.0


class Clipscore(TextImage):
    """OpenAI CLIP L/14's logit/30."""

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        resize: str = "processor",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id of a CLIPModel. resize: processor, as the checkpoint's image processor does (bicubic on
        8 bits), or bilinear, in float, as Flow-GRPO and PaCo-RL do. device: auto, cpu, cuda, cuda:1. dtype: of the
        model. batch_size: images at once. frames: of a clip, evenly spread.
        """
        fit = encoder.resizing(resize)
        super().__init__(encoder.shared(encoder.Transformers, model, "", device, dtype, batch_size), frames, fit)
        self.factor = self.encoder.scale / 30
