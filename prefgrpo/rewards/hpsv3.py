"""`hpsv3`: human preference score 3, a Qwen2-VL-7B with a head that gives a mean and an uncertainty.

    value = μ, the first output of the head at the token <|Reward|>

The published checkpoint (HPSv3.safetensors, all weights and the head) is loaded with plain transformers: the package
of the same name needs transformers 4.45.2. Of the package only the text that the model was trained with is read.
Source: Ma et al., "HPSv3: Towards Wide-Spectrum Human Preference Score" (arXiv 2508.03789).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.checkpoints import folder_of, loading
from prefgrpo.rewards.qwen2vl import QwenReward, RewardModel, Turn, checked, constants, fit
from prefgrpo.rewards.tensors import read_tensors

TOKENS = ("<|Reward|>",)
PIXELS = 256 * 28 * 28
"""What the model sees of an image: this many pixels, whatever its size."""


class HPSv3(QwenReward):
    """HPSv3's mean score μ."""

    def __init__(
        self,
        model: str = "MizzenAI/HPSv3",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        template: str = "",
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 8,
    ) -> None:
        """Load the model.

        model: folder or hub id with HPSv3.safetensors. base: folder or hub id of its config and tokenizer.
        template: file with the training text, {text_prompt} and <|Reward|> in it; default: the hpsv3 package's.
        device: auto, cpu, cuda, cuda:1. dtype: auto is bfloat16 on a GPU, float32 else. batch_size: images at once.
        """
        self.batch_size = batch_size
        with loading(template or "the text of the package hpsv3"):
            self.text = checked(Path(template).read_text(encoding="utf-8") if template else _packaged(), TOKENS)
        files = sorted(folder_of(model, ["*.safetensors"]).glob("*.safetensors"))
        with loading(model):
            self.model = RewardModel(base, read_tensors(files), TOKENS, "image", device, dtype)

    def turn(self, sample: Sample) -> Turn:
        """The image and the training text."""
        return Turn(frame(sample.media.pil, PIXELS), self.text.replace("{text_prompt}", sample.prompt))

    def scored(self, rows: NDArray[np.float64]) -> Score:
        """μ; part `sigma`: the head's second output."""
        mu, sigma = rows[0].tolist()
        return Score(mu, parts={"sigma": sigma})


def frame(image: Image.Image, pixels: int) -> torch.Tensor:
    """An image as [1, 3, H, W] in about `pixels` pixels (bicubic)."""
    high, wide = fit(image.height, image.width, pixels, pixels)
    return torch.from_numpy(np.array(image.resize((wide, high)))).permute(2, 0, 1)[None]


def _packaged() -> str:
    """The text that the hpsv3 package asks with, read from its source without importing it."""
    spec = importlib.util.find_spec("hpsv3")
    if spec is None or spec.origin is None:
        raise RewardError(
            "hpsv3 needs the text it was trained with: `pip install --no-deps hpsv3==1.0.0`, or give a file as "
            "reward.options.hpsv3.template; or run `scripts/setup_reward.sh hpsv3 VENV`, `prefgrpo reward serve hpsv3` "
            "there and give reward.options.hpsv3.url"
        )
    texts = constants(Path(spec.origin).parent / "dataset" / "data_collator_qwen.py")
    return texts["INSTRUCTION"] + texts["prompt_with_special_token"]
