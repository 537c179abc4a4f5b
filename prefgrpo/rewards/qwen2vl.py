"""Qwen2-VL with a reward head: `hpsv3` and `videoalign`.

    score_k = head(h at the k-th reward token)        head = linear layers with ReLU in between, in float32
    hpsv3        value = μ, the first output at <|Reward|>; part sigma: the second
    videoalign   value = Σ over `dimensions` of (x − mean) / std, x: the output at <|VQ_reward|>, …

The published models were trained with plain text positions 0, 1, 2, … (no 3-D positions for the vision tokens) and
right padding; both are kept. They are loaded with plain transformers, because their packages need transformers 4.45.2;
only the training prompt is read from those packages. Invariant: every weight comes from the given tensors.
Sources: Ma et al., "HPSv3" (arXiv 2508.03789); Liu et al., "Improving Video Generation with Human Feedback"
(arXiv 2501.13918), in the format of KwaiVGI/VideoReward.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score, too_long
from prefgrpo.rewards.checkpoints import (
    build_model,
    device_of,
    dtype_of,
    folder_of,
    library,
    linear_head,
    loading,
    merge_lora,
    parse_assignments,
    read_tensors,
    source_of,
    standard,
)

LONGEST = 20_000
"""Most characters of a prompt: far more than in training, but bounded."""
FACTOR = 28
"""Image sides are resized to multiples of this: patch size 14 × 2 merged patches."""
PIXELS = 256 * 28 * 28
"""hpsv3 resizes every image to about this many pixels."""
LEAST = 128 * 28 * 28
"""videoalign enlarges frames with fewer pixels."""
PARTS = ("VQ", "MQ", "TA")


def fit(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) as multiples of 28, with `least` to `most` pixels in all, close to the given aspect ratio."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize(height, width, FACTOR, least, most)


def patches(frames: Tensor, size: int = 14, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Pixel rows [t·h·w, 3·2·14·14] and grid (t, h, w) of frames [F, 3, H, W] with values 0 … 255.

    Frames are grouped in pairs; a single image, or the last frame of an odd number, is repeated.
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


class RewardModel:
    """A Qwen2-VL with a reward head on the hidden states at its reward tokens."""

    def __init__(
        self, base: str, tensors: Mapping[str, Tensor], tokens: Sequence[str], vision: str, device: str, dtype: str
    ) -> None:
        """`base`: folder or hub id of the config and tokenizer; `tensors`: all weights including `rm_head.*`, with one
        embedding row per token of the tokenizer after adding `tokens`; `vision`: image or video."""
        transformers = library("transformers", "'prefgrpo[rewards]'")
        self.vision, self.tokens, self.device = vision, list(tokens), device_of(device)
        self.dtype = dtype_of(dtype, self.device)
        with loading(base):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source_of(base), padding_side="right")
            config = transformers.Qwen2VLConfig.from_pretrained(**source_of(base))
        self.tokenizer.add_tokens(self.tokens, special_tokens=True)
        self.reserved = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        rows, needed = len(tensors["model.embed_tokens.weight"]), max(self.tokenizer.convert_tokens_to_ids(self.tokens))
        if needed >= rows:
            raise RewardError(
                f"the checkpoint has {rows} tokens, expected more than {needed}: it does not match {base}"
            )
        config.text_config.vocab_size = rows
        body = {k: v for k, v in tensors.items() if not k.startswith(("rm_head.", "lm_head."))}
        self.model = build_model(transformers.Qwen2VLModel, config, body, self.dtype).to(self.device)
        self.head = linear_head(tensors, "rm_head.", nn.ReLU).to(self.device)

    def refuse(self, prompt: str) -> str:
        """Why a prompt cannot be inserted into the text, e.g. because it has the model's special tokens; else ''."""
        if len(prompt) > LONGEST:
            return f"the prompt has {len(prompt)} characters, expected at most {LONGEST}"
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            return "the prompt contains a lone surrogate, which is not valid text"
        held = next((token for token in self.reserved if token in prompt), None)
        return f"the prompt contains the model's special token {held}" if held else ""

    @torch.inference_mode()
    def __call__(self, turns: Sequence[tuple[Tensor, str]]) -> NDArray[np.float64]:
        """[B, reward tokens, head outputs] for one batch of B pairs of frames [F, 3, H, W] and text."""
        seen = [patches(frames) for frames, _ in turns]
        texts = [chat(self.vision, len(rows) // 4, text) for (rows, _), (_, text) in zip(seen, turns, strict=True)]
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
        return self.head(asked).double().cpu().numpy()


@dataclass(kw_only=True, eq=False)
class QwenReward(PointwiseReward):
    """device: auto, cpu, cuda, cuda:1. dtype: auto is bfloat16 on GPUs, else float32. batch_size: samples per call."""

    device: str = "auto"
    dtype: str = "auto"
    batch_size: int = 1
    tokens: ClassVar[tuple[str, ...]]
    """Reward tokens in the training prompt."""

    def __post_init__(self) -> None:
        with loading(f"the text of {type(self).__name__}"):
            self.text = self._training_text()
        marks = ["{text_prompt}", *self.tokens]
        if any(self.text.count(mark) != 1 for mark in marks):
            message = f"the prompt template must contain {', '.join(marks)} once each"
            raise RewardError(f"{message}, got {self.text!r}")
        self.network = self._load()

    @abstractmethod
    def _training_text(self) -> str:
        """The prompt that the model was trained with."""

    @abstractmethod
    def _load(self) -> RewardModel:
        """The model."""

    @abstractmethod
    def _frames(self, sample: Sample) -> Tensor:
        """The model's input for a sample: [F, 3, H, W], 0 … 255, H and W multiples of 28."""

    @abstractmethod
    def _scored(self, rows: NDArray[np.float64]) -> Score:
        """The score from outputs [reward tokens, head outputs]."""

    def refuse(self, sample: Sample) -> str:
        """Also rejects prompts that cannot be inserted into the text, and extreme aspect ratios."""
        return super().refuse(sample) or too_long(sample.media, 200) or self.network.refuse(sample.prompt)

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample."""

        def scores(batch: list[Sample]) -> list[Score]:
            turns = [(self._frames(s), self.text.replace("{text_prompt}", s.prompt)) for s in batch]
            return [self._scored(rows) for rows in self.network(turns)]

        return self.in_batches(samples, self.batch_size, scores)


@dataclass(kw_only=True, eq=False)
class HPSv3(QwenReward):
    """HPSv3's mean score μ; part `sigma`: the head's second output.

    model: folder or hub id with HPSv3.safetensors. base: folder or hub id of its config and tokenizer. template: file
    with the training prompt, containing {text_prompt} and <|Reward|>; default: from the hpsv3 package.
    """

    model: str = "MizzenAI/HPSv3"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    template: str = ""
    batch_size: int = 8
    tokens = ("<|Reward|>",)

    def _training_text(self) -> str:
        if self.template:
            return Path(self.template).read_text(encoding="utf-8")
        spec = importlib.util.find_spec("hpsv3")
        if spec is None or spec.origin is None:
            raise RewardError(
                "hpsv3 needs the text it was trained with: `pip install --no-deps hpsv3==1.0.0`, or give a file as "
                "the option template; or run `scripts/setup_reward.sh hpsv3 VENV`, `prefgrpo reward serve "
                "hpsv3` there and give the option url"
            )
        texts = parse_assignments(Path(spec.origin).parent / "dataset" / "data_collator_qwen.py")
        return ast.literal_eval(texts["INSTRUCTION"]) + ast.literal_eval(texts["prompt_with_special_token"])

    def _load(self) -> RewardModel:
        files = sorted(folder_of(self.model, ["*.safetensors"]).glob("*.safetensors"))
        with loading(self.model):
            return RewardModel(self.base, read_tensors(files), self.tokens, "image", self.device, self.dtype)

    def _frames(self, sample: Sample) -> Tensor:
        return frame(sample.media.pil, PIXELS)

    def _scored(self, rows: NDArray[np.float64]) -> Score:
        mu, sigma = rows[0].tolist()
        return Score(mu, parts={"sigma": sigma})


def frame(image: Image.Image, pixels: int) -> Tensor:
    """An image as [1, 3, H, W], resized to about `pixels` pixels (bicubic)."""
    high, wide = fit(image.height, image.width, pixels, pixels)
    return torch.from_numpy(np.array(image.resize((wide, high)))).permute(2, 0, 1)[None]


@dataclass(kw_only=True, eq=False)
class VideoAlign(QwenReward):
    """VideoReward's sum of normalised scores, over all three dimensions or some; parts: all three.

    model: folder or hub id with model_config.json and checkpoint-N (the highest N is used). base: folder or hub id of
    Qwen2-VL: config, tokenizer and, if the checkpoint has only adapters, weights. template: file with the training
    prompt, containing {text_prompt} and the three reward tokens, or VideoAlign's prompt_template.py; default: the one
    that scripts/setup_reward.sh put beside this Python. dimensions: which of VQ (visual quality), MQ (motion quality)
    and TA (text alignment) to sum, as a list. video_fps: frame rate of the clips, used to sample frames at the
    checkpoint's own rate.
    """

    takes = ("video",)
    model: str = "KwaiVGI/VideoReward"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    template: str = ""
    dimensions: Sequence[str] = PARTS
    video_fps: float = 16.0
    tokens = tuple(f"<|{part}_reward|>" for part in PARTS)

    def __post_init__(self) -> None:
        if not self.video_fps > 0:
            raise RewardError(f"videoalign: video_fps must be positive frames per second, got {self.video_fps}")
        chosen = [self.dimensions] if isinstance(self.dimensions, str) else list(self.dimensions)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(PARTS):
            raise RewardError(
                f"videoalign: dimensions must be a list of some of {list(PARTS)}, got {self.dimensions!r}"
            )
        self.dimensions = chosen
        super().__post_init__()

    def _training_text(self) -> str:
        shared = Path(sys.prefix) / "share" / "prefgrpo" / "videoalign_prompt_template.py"
        path = Path(self.template) if self.template else shared
        if not path.is_file():
            raise RewardError(
                f"videoalign needs the text it was trained with, expected at {path}: run `scripts/setup_reward.sh "
                "videoalign VENV`, `prefgrpo reward serve videoalign` there and give the option url; or "
                "give the file prompt_template.py of KwaiVGI/VideoAlign as the option template"
            )
        if path.suffix == ".py":
            return ast.literal_eval(parse_assignments(path)["DETAILED_PROMPT_WITH_SPECIAL_TOKEN"])
        return path.read_text(encoding="utf-8")

    def _load(self) -> RewardModel:
        folder = folder_of(self.model, ["model_config.json", "checkpoint-*"])
        with loading(self.model):
            config = json.loads((folder / "model_config.json").read_text(encoding="utf-8"))
            if not config["model_config"]["use_special_tokens"]:
                raise RewardError(f"{self.model}: expected a VideoReward with reward tokens (use_special_tokens)")
            self.data, self.norms = config["data_config"], config.get("inference_config")
            tensors = video_tensors(folder, self.base, config["peft_lora_config"])
            return RewardModel(self.base, tensors, self.tokens, "video", self.device, self.dtype)

    def refuse(self, sample: Sample) -> str:
        """Also rejects clips of one frame."""
        short = len(sample.media.pixels) < 2
        return super().refuse(sample) or ("videoalign scores clips of 2 frames or more, got 1" if short else "")

    def _scored(self, rows: NDArray[np.float64]) -> Score:
        raw = np.diagonal(rows) if rows.shape[1] == len(PARTS) else rows[:, 0]
        parts = normalised(raw.tolist(), self.norms)
        return Score(sum(parts[name] for name in self.dimensions), parts=parts)

    def _frames(self, sample: Sample) -> Tensor:
        pixels = sample.media.pixels
        wanted, rate = self.data.get("num_frames"), self.data.get("fps")
        count = frame_count(len(pixels), self.video_fps, rate if wanted is None else None, wanted)
        chosen = torch.linspace(0, len(pixels) - 1, count).round().long().numpy()
        return resized(torch.from_numpy(pixels[chosen]).permute(0, 3, 1, 2), self.data["max_frame_pixels"])


def frame_count(total: int, video_fps: float, fps: float | None, frames: float | None) -> int:
    """Number of frames to sample out of `total`: `frames`, or `fps` per second; even, and 4 … 768 if available."""
    if frames is not None:
        return min(round(frames / 2) * 2, total)
    most = min(768, total) // 2 * 2
    count = min(max(total / video_fps * (2.0 if fps is None else fps), 4), most)
    return min(round(count / 2) * 2, total)


def resized(frames: Tensor, most: int) -> Tensor:
    """Resize uint8 frames [F, 3, H, W] to multiples of 28 (antialiased bicubic, rounded like uint8), as float32."""
    size = fit(frames.shape[2], frames.shape[3], LEAST, int(most))
    if tuple(frames.shape[2:]) == size:
        return frames.float()
    return functional.interpolate(frames.float(), size, mode="bicubic", antialias=True).clamp(0, 255).round()


def normalised(raw: Sequence[float], norms: dict[str, float] | None) -> dict[str, float]:
    """{part: (x − mean) / std} with the checkpoint's statistics; x itself if it has none."""
    named = dict(zip(PARTS, raw, strict=True))
    return named if norms is None else {k: (x - norms[f"{k}_mean"]) / norms[f"{k}_std"] for k, x in named.items()}


def video_tensors(folder: Path, base: str, lora: dict[str, Any]) -> dict[str, Tensor]:
    """Merged weights of the latest checkpoint: a full model.pth, or adapters and other tensors on top of the base."""
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
