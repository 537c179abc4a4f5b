"""Qwen2-VL with a reward head: what `hpsv3` and `videoalign` share.

    score_k = head(h at the k-th reward token)        head = linear layers with ReLU between, in float32

The published models were trained with plain text positions 0, 1, 2, … (no 3-D positions for the vision tokens) and
right padding; both are kept. Invariant: every weight of the model comes from the given tensors, none is random.
"""

from __future__ import annotations

import ast
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score
from prefgrpo.rewards.checkpoints import device_of, dtype_of, library, loading
from prefgrpo.rewards.tensors import filled, standard

LONGEST = 20_000
"""Characters of a prompt: far more than the models were trained with, and never a megabyte."""
FACTOR = 28
"""Sides of what the model sees are multiples of patch size 14 × 2 merged patches."""


def fit(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in multiples of 28 with between `least` and `most` pixels, near the given aspect ratio."""
    high, wide = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        return math.floor(height / scale / FACTOR) * FACTOR, math.floor(width / scale / FACTOR) * FACTOR
    if high * wide < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / FACTOR) * FACTOR, math.ceil(width * scale / FACTOR) * FACTOR
    return high, wide


def patches(frames: Tensor, size: int = 14, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Pixel rows [t·h·w, 3·2·14·14] and grid (t, h, w) of frames [F, 3, H, W] with values 0 … 255.

    Frames go in twos; an image is its own second frame, and the last frame of an odd count is repeated.
    """
    pixels = standard(frames)
    if len(pixels) % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    t, h, w = len(pixels) // 2, pixels.shape[2] // size, pixels.shape[3] // size
    split = pixels.reshape(t, 2, 3, h // merge, merge, size, w // merge, merge, size)
    rows = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * 2 * size * size)
    return rows, torch.tensor([t, h, w])


def chat(vision: str, count: int, text: str) -> str:
    """One user turn in Qwen2-VL's chat format: `count` vision tokens (`vision`: image or video), then the text."""
    shown = f"<|vision_start|>{f'<|{vision}_pad|>' * count}<|vision_end|>"
    turns = ("system\nYou are a helpful assistant.<|im_end|>", f"user\n{shown}{text}<|im_end|>", "assistant\n")
    return "<|im_start|>" + "\n<|im_start|>".join(turns)


def constants(path: str | Path) -> dict[str, str]:
    """Texts assigned to names in a Python file, read without running it."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def checked(text: str, tokens: Sequence[str]) -> str:
    """A training text; RewardError if it lacks its marks."""
    marks = ["{text_prompt}", *tokens]
    if any(text.count(mark) != 1 for mark in marks):
        raise RewardError(f"the text that the model is asked with must hold {', '.join(marks)} once each, got {text!r}")
    return text


@dataclass(frozen=True)
class Turn:
    """One question to the model."""

    frames: Tensor
    """[F, 3, H, W], 0 … 255, H and W multiples of 28."""
    text: str
    """The user's text, with the reward tokens."""


class RewardModel:
    """A Qwen2-VL whose head reads the hidden states at its reward tokens."""

    def __init__(
        self, base: str, tensors: Mapping[str, Tensor], tokens: Sequence[str], vision: str, device: str, dtype: str
    ) -> None:
        """`base`: folder or hub id of the config and tokenizer; `tensors`: all weights, `rm_head.*` among them, with
        one embedding row per token of the tokenizer after `tokens` were added; `vision`: image or video."""
        transformers = library("transformers", "'prefgrpo[rewards]'")
        self.vision, self.tokens, self.device = vision, list(tokens), device_of(device)
        self.dtype = _precision(self.device) if dtype == "auto" else dtype_of(dtype)
        with loading(base):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="right")
            config = transformers.Qwen2VLConfig.from_pretrained(base)
        self.tokenizer.add_tokens(self.tokens, special_tokens=True)
        self.reserved = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        rows, needed = len(tensors["model.embed_tokens.weight"]), max(self.tokenizer.convert_tokens_to_ids(self.tokens))
        if needed >= rows:
            raise RewardError(f"the checkpoint knows {rows} tokens, expected more than {needed}: not made for {base}")
        config.text_config.vocab_size = rows
        body = {k: v for k, v in tensors.items() if not k.startswith(("rm_head.", "lm_head."))}
        self.model = filled(transformers.Qwen2VLModel, config, body, self.dtype).to(self.device)
        self.head = _head(tensors, self.device)

    def refuse(self, prompt: str) -> str:
        """Why a prompt cannot be put into the text; empty if it can. It must not hold the model's own tokens."""
        if len(prompt) > LONGEST:
            return f"the prompt has {len(prompt)} characters, expected at most {LONGEST}"
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            return "the prompt holds a lone surrogate, which is no text"
        held = next((token for token in self.reserved if token in prompt), None)
        return f"the prompt holds the model's own token {held}" if held else ""

    @torch.inference_mode()
    def __call__(self, turns: Sequence[Turn]) -> NDArray[np.float64]:
        """[B, reward tokens, head outputs] of B turns, in one batch."""
        seen = [patches(t.frames) for t in turns]
        texts = [chat(self.vision, len(rows) // 4, t.text) for (rows, _), t in zip(seen, turns, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True).to(self.device)
        ids = batch["input_ids"]
        pixels = torch.cat([rows for rows, _ in seen]).to(self.device, self.dtype)
        grid = torch.stack([g for _, g in seen]).to(self.device)
        shown = self.model.visual(pixels, grid_thw=grid).pooler_output
        embeds = self.model.get_input_embeddings()(ids)
        place = ids == self.tokenizer.convert_tokens_to_ids(f"<|{self.vision}_pad|>")
        embeds = embeds.masked_scatter(place[..., None], shown.to(embeds.dtype))
        hidden = self.model.language_model(inputs_embeds=embeds, attention_mask=batch["attention_mask"])[0]
        reward = torch.isin(ids, torch.tensor(self.tokenizer.convert_tokens_to_ids(self.tokens), device=self.device))
        asked = hidden[reward].view(len(turns), len(self.tokens), -1).float()
        for depth, (weight, bias) in enumerate(self.head):
            asked = functional.linear(asked.relu() if depth else asked, weight, bias)
        return asked.double().cpu().numpy()


class QwenReward(PointwiseReward):
    """A reward whose score is read from the rows that a RewardModel answers one question with."""

    model: RewardModel
    batch_size: int

    @abstractmethod
    def turn(self, sample: Sample) -> Turn:
        """The question about a sample."""

    @abstractmethod
    def scored(self, rows: NDArray[np.float64]) -> Score:
        """The score in the answer [reward tokens, head outputs]."""

    def refuse(self, sample: Sample) -> str:
        """Also for prompts that cannot be put into the text, and sides that the model was not made for."""
        return super().refuse(sample) or _too_long(sample.media.pixels) or self.model.refuse(sample.prompt)

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample."""
        return self.in_batches(
            samples, self.batch_size, lambda some: map(self.scored, self.model([self.turn(s) for s in some]))
        )


def _too_long(pixels: NDArray[np.uint8]) -> str:
    high, wide = pixels.shape[-3:-1]
    over = max(high, wide) > 200 * min(high, wide)
    return f"a picture of {wide}×{high} is too long; expected sides within 1:200" if over else ""


def _precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _head(tensors: Mapping[str, Tensor], device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of the head's linear layers in their order."""
    names = sorted(n for n in tensors if n.startswith("rm_head") and n.endswith("weight"))
    if not names:
        raise RewardError("expected a reward head (rm_head.*) in the checkpoint, found none")
    biases: list[Any] = [tensors.get(n.removesuffix("weight") + "bias") for n in names]
    return [
        (tensors[n].to(device, torch.float32), None if b is None else b.to(device, torch.float32))
        for n, b in zip(names, biases, strict=True)
    ]
