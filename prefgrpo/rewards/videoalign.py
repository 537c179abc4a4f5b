"""`videoalign`: VideoReward's visual quality, motion quality and text alignment of a clip (Qwen2-VL-2B with LoRA).

    value = Σ over `dimensions` of (x − mean) / std        x: the head's output at <|VQ_reward|>, …

Frames come from memory, bicubic and rounded as the original reads them from a file; LoRA is merged at load.
Source: Liu et al., "Improving Video Generation with Human Feedback" (arXiv 2501.13918); format of KwaiVGI/VideoReward.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.checkpoints import folder_of, loading
from prefgrpo.rewards.qwen2vl import QwenReward, RewardModel, Turn, checked, constants, fit
from prefgrpo.rewards.tensors import merge_lora, read_tensors

PARTS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{part}_reward|>" for part in PARTS)
LEAST = 128 * 28 * 28
"""Frames below this many pixels are enlarged."""


class VideoAlign(QwenReward):
    """VideoReward's sum of its normalised scores, of all three or of some."""

    takes = ("video",)

    def __init__(
        self,
        model: str = "KwaiVGI/VideoReward",
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        template: str = "",
        dimensions: Sequence[str] = PARTS,
        video_fps: float = 16.0,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 1,
    ) -> None:
        """Load the model.

        model: folder or hub id with model_config.json and checkpoint-N (the highest N is used).
        base: folder or hub id of Qwen2-VL: config, tokenizer and, for a checkpoint of adapters only, weights.
        template: file with the training text, {text_prompt} and the three reward tokens in it, or VideoAlign's
        prompt_template.py; default: the one that scripts/setup_reward.sh put beside this Python.
        dimensions: list of those of VQ (visual quality), MQ (motion quality), TA (text alignment) that are summed.
        video_fps: frames per second of the clips, from which the checkpoint's own rate takes its frames.
        device: auto, cpu, cuda, cuda:1. dtype: auto is bfloat16 on a GPU, float32 else. batch_size: clips at once.
        """
        if not video_fps > 0:
            raise RewardError(f"videoalign: video_fps must be positive frames per second, got {video_fps}")
        chosen = [dimensions] if isinstance(dimensions, str) else list(dimensions)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(PARTS):
            raise RewardError(f"videoalign: dimensions must be a list of some of {list(PARTS)}, got {dimensions!r}")
        self.dimensions = chosen
        with loading(template or "the text of VideoAlign"):
            self.text = checked(training_text(template), TOKENS)
        self.video_fps, self.batch_size = video_fps, batch_size
        folder = folder_of(model, ["model_config.json", "checkpoint-*"])
        with loading(model):
            config = json.loads((folder / "model_config.json").read_text(encoding="utf-8"))
            if not config["model_config"]["use_special_tokens"]:
                raise RewardError(f"{model}: expected a VideoReward with reward tokens (use_special_tokens)")
            self.data, self.norms = config["data_config"], config.get("inference_config")
            tensors = load(folder, base, config["peft_lora_config"])
            self.model = RewardModel(base, tensors, TOKENS, "video", device, dtype)

    def refuse(self, sample: Sample) -> str:
        """Also for clips of one frame."""
        short = len(sample.media.pixels) < 2
        return super().refuse(sample) or ("videoalign scores clips of 2 frames or more, got 1" if short else "")

    def scored(self, rows: NDArray[np.float64]) -> Score:
        """The sum of the chosen dimensions; parts: all three, normalised."""
        raw = np.diagonal(rows) if rows.shape[1] == len(PARTS) else rows[:, 0]
        parts = normalised(raw.tolist(), self.norms)
        return Score(sum(parts[name] for name in self.dimensions), parts=parts)

    def turn(self, sample: Sample) -> Turn:
        """The frames that the model sees and the training text."""
        pixels = sample.media.pixels
        wanted, rate = self.data.get("num_frames"), self.data.get("fps")
        count = frame_count(len(pixels), self.video_fps, rate if wanted is None else None, wanted)
        chosen = torch.linspace(0, len(pixels) - 1, count).round().long().numpy()
        frames = torch.from_numpy(pixels[chosen]).permute(0, 3, 1, 2)
        return Turn(resized(frames, self.data["max_frame_pixels"]), self.text.replace("{text_prompt}", sample.prompt))


def frame_count(total: int, video_fps: float, fps: float | None, frames: float | None) -> int:
    """How many of `total` frames the model sees: `frames`, or `fps` a second, in twos; 4 … 768 where they exist."""
    if frames is not None:
        return min(round(frames / 2) * 2, total)
    most = min(768, total) // 2 * 2
    count = min(max(total / video_fps * (2.0 if fps is None else fps), 4), most)
    return min(round(count / 2) * 2, total)


def resized(frames: Tensor, most: int) -> Tensor:
    """Frames [F, 3, H, W] uint8 in multiples of 28, antialiased bicubic, rounded as uint8, as float32."""
    size = fit(frames.shape[2], frames.shape[3], LEAST, int(most))
    if tuple(frames.shape[2:]) == size:
        return frames.float()
    return functional.interpolate(frames.float(), size, mode="bicubic", antialias=True).clamp(0, 255).round()


def normalised(raw: Sequence[float], norms: dict[str, float] | None) -> dict[str, float]:
    """{part: (x − mean) / std} with the checkpoint's own figures; x itself if it has none."""
    named = dict(zip(PARTS, raw, strict=True))
    return named if norms is None else {k: (x - norms[f"{k}_mean"]) / norms[f"{k}_std"] for k, x in named.items()}


def load(folder: Path, base: str, lora: dict[str, Any]) -> dict[str, Tensor]:
    """Plain weights of the highest checkpoint: a full model.pth, or adapters and the rest over the base's weights."""
    steps = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if p.name.split("-")[1].isdigit()}
    if not steps:
        raise RewardError(f"{folder}: expected a folder checkpoint-N in it, found none")
    place = steps[max(steps)]
    if (place / "model.pth").is_file():
        tensors = read_tensors([place / "model.pth"])
    else:
        below = sorted(folder_of(base, ["*.safetensors", "*.json", "*.txt"]).glob("*.safetensors"))
        rest = read_tensors([place / "non_lora_state_dict.pth", place / "adapter_model.safetensors"])
        tensors = {f"base_model.model.{k}": v for k, v in read_tensors(below).items()} | rest
    rank = lora["lora_r"]
    return merge_lora(tensors, lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank))


def training_text(template: str) -> str:
    """The text that the model was trained with."""
    path = Path(template) if template else Path(sys.prefix) / "share" / "prefgrpo" / "videoalign_prompt_template.py"
    if not path.is_file():
        raise RewardError(
            f"videoalign needs the text it was trained with, expected at {path}: run `scripts/setup_reward.sh "
            "videoalign VENV`, `prefgrpo reward serve videoalign` there and give reward.options.videoalign.url; or "
            "give the file prompt_template.py of KwaiVGI/VideoAlign as reward.options.videoalign.template"
        )
    if path.suffix == ".py":
        return constants(path)["DETAILED_PROMPT_WITH_SPECIAL_TOKEN"]
    return path.read_text(encoding="utf-8")
