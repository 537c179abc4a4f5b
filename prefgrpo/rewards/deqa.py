"""`deqa`: DeQA-Score, an mPLUG-Owl2 that rates image quality by the probabilities of its next word.

    p = softmax(logits of the five level words)        value = (5·p_excellent + 4·p_good + … + 1·p_bad) / 5

The model's code is part of its checkpoint (trust_remote_code) and needs transformers 4.36, so a separate environment.
Source: You et al., "Teaching Large Language Models to Regress Accurate Image Quality Scores" (arXiv 2501.11561).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import PositiveInt
from torch import Tensor

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Question, Reward, RewardError, library
from prefgrpo.rewards.weights import AutoDtype, device_of, dtype_of, loading, source_of

PUBLISHED = "zhiyuanyou/DeQA-Score-Mix3"
LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
IMAGE = "<|image|>"
QUESTION = f"USER: How would you rate the quality of this image?\n{IMAGE}\nASSISTANT: The quality of the image is"
"""The text that the model was trained to complete."""
PLACE = -200
"""Placeholder for the image in the token ids."""


@dataclass(kw_only=True, eq=False)
class DeQA(Reward):
    """DeQA-Score's expected quality level / 5, from 0.2 to 1; the prompt is ignored.

    An mPLUG-Owl2 whose code is part of its checkpoint (transformers 4.36.1). Source: arXiv 2501.11561.

    model: folder, or hub id with a commit (zhiyuanyou/DeQA-Score-Mix3@COMMIT), because code from it is executed.
    device: auto, cpu, cuda, cuda:1. dtype: auto is float16 on a GPU, else float32. batch_size: images per forward.
    """

    model: str = PUBLISHED
    device: str = "auto"
    dtype: AutoDtype = "auto"
    batch_size: PositiveInt = 16

    def __post_init__(self) -> None:
        transformers = library("transformers", "transformers==4.36.1, in an environment of its own")
        source = source_of(self.model)
        commit = re.fullmatch(r"[0-9a-f]{40}", source.get("revision", ""))
        if not commit and not Path(source["pretrained_model_name_or_path"]).is_dir():
            raise RewardError(
                f"deqa executes code from the repository of its model: expected a folder, or a hub id with the commit "
                f"that you have read, such as {PUBLISHED}@ and 40 hexadecimal digits (the repository's page lists its "
                f"commits); got '{self.model}'"
            )
        self.place = device_of(self.device)
        self.precision = dtype_of(self.dtype, self.place, torch.float16)
        try:
            with loading(self.model):
                self.processor = transformers.CLIPImageProcessor.from_pretrained(**source)
                where: dict[str, Any] = source | {"trust_remote_code": True}
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(**where, use_fast=False)
                self.network = transformers.AutoModelForCausalLM.from_pretrained(
                    **where, torch_dtype=self.precision, attn_implementation="eager"
                )
        except ImportError as error:
            raise RewardError(
                f"the code of '{self.model}' does not run with transformers {transformers.__version__} ({error}): run "
                "`scripts/setup_reward.sh deqa VENV`, then `prefgrpo reward serve deqa` there, and give "
                "the option url"
            ) from error
        self.network.eval().requires_grad_(False).to(self.place)
        self.question = question_ids(self.tokenizer)
        self.levels = [self.tokenizer(word)["input_ids"][1] for word in LEVELS]
        self.ground = tuple(int(255 * x) for x in self.processor.image_mean)

    @torch.inference_mode()
    def ask(self, asked: list[Question]) -> list[Answer]:
        """Expected level / 5 of each image; parts: the expected level, 1 … 5, and the probability of each word."""
        samples = [sample for (sample,) in asked]
        squares = [square(s.media.pil, self.ground) for s in samples]
        pixels = self.processor(squares, return_tensors="pt")["pixel_values"]
        ids = torch.tensor([self.question] * len(samples), device=self.place)
        logits = self.network(input_ids=ids, images=pixels.to(self.place, self.precision))["logits"]
        return [score_from_logits(words) for words in logits[:, -1, self.levels].float().cpu()]


def question_ids(tokenizer: Any) -> list[int]:
    """Token ids of the question, with PLACE where the image goes; one beginning-of-sequence token, at the start."""
    before, after = (tokenizer(part)["input_ids"] for part in QUESTION.split(IMAGE))
    return [*before, PLACE, *after[1:]]


def score_from_logits(logits: Tensor) -> Answer:
    """The score from five logits, ordered from excellent to bad."""
    chances = dict(zip(LEVELS, torch.softmax(logits.double(), -1).tolist(), strict=True))
    level = sum(LEVELS[word] * chance for word, chance in chances.items())
    return Answer(level / 5, parts={"level": level, **chances})


def square(image: Image.Image, ground: tuple[int, ...]) -> Image.Image:
    """Pad the image to a square, centred, with colour `ground`."""
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), ground)
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas
