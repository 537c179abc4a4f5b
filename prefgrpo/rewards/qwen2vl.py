"""Qwen2-VL with a reward head: `hpsv3` and `videoalign`.

    score_k = head(h at the k-th reward token)        head = linear layers with ReLU in between, in float32
    hpsv3        value = μ, the first output at <|Reward|>; part sigma: the second
    videoalign   value = Σ over `dimensions` of (x − mean) / std, x: the output at <|VQ_reward|>, …

As in training, text positions are 0, 1, 2, … (no 3-D positions for the vision tokens) and padding is on the right.
Plain transformers loads them, because their packages need version 4.45.2; these are read for the training prompt only.
Sources: Ma et al., "HPSv3" (arXiv 2508.03789); Liu et al., "Improving Video Generation with Human Feedback"
(arXiv 2501.13918), in the format of KwaiVGI/VideoReward.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from prefgrpo.data.answer import Answer
from prefgrpo.judge.published import published_texts
from prefgrpo.rewards.base import INSTALL, Question, Reward, RewardError, Sample, check_aspect_ratio, library
from prefgrpo.rewards.weights import (
    AutoDtype,
    build_model,
    device_of,
    dtype_of,
    folder_of,
    linear_head,
    loading,
    merge_lora,
    pretrained,
    read_tensors,
)

LONGEST = 20_000
"""Maximum characters of a prompt: far more than in training, but bounded."""
FACTOR = 28
"""Image sides are resized to multiples of this: patch size 14 × 2 merged patches."""
PIXELS = 256 * 28 * 28
"""hpsv3 resizes every image to about this many pixels."""
LEAST = 128 * 28 * 28
"""videoalign enlarges frames with fewer pixels."""
PARTS: tuple[Literal["VQ", "MQ", "TA"], ...] = ("VQ", "MQ", "TA")


def fit(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) as multiples of 28, with `least` to `most` pixels in all, close to the given aspect ratio."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize(height, width, FACTOR, least, most)


def chat(vision: str, count: int, text: str) -> str:
    """One user turn in Qwen2-VL's chat format: `count` vision tokens (`vision`: image or video), then the text."""
    shown = f"<|vision_start|>{f'<|{vision}_pad|>' * count}<|vision_end|>"
    turns = ("system\nYou are a helpful assistant.<|im_end|>", f"user\n{shown}{text}<|im_end|>", "assistant\n")
    return "<|im_start|>" + "\n<|im_start|>".join(turns)


@dataclass(kw_only=True, eq=False)
class QwenReward(Reward):
    """device: auto, cpu, cuda, cuda:1. dtype: auto is bfloat16 on GPUs, else float32. batch_size: samples per call."""

    model: str
    base: str
    template: str = ""
    device: str = "auto"
    dtype: AutoDtype = "auto"
    batch_size: PositiveInt = 1
    tokens: ClassVar[tuple[str, ...]]
    """Reward tokens in the training prompt."""
    variables: ClassVar[tuple[str, ...]]
    """Variables in the publisher's file whose values make up the training prompt."""
    vision: ClassVar[str]
    """Kind of its vision tokens, image or video."""

    def __post_init__(self) -> None:
        with loading(f"the text of {type(self).__name__}"):
            self.text = self._training_text()
        marks = ["{text_prompt}", *self.tokens]
        if any(self.text.count(mark) != 1 for mark in marks):
            raise RewardError(f"the prompt template must contain {', '.join(marks)} once each, got {self.text!r}")
        transformers = library("transformers", INSTALL)
        self.place = device_of(self.device)
        self.precision = dtype_of(self.dtype, self.place)
        self.processor = transformers.Qwen2VLVideoProcessor(do_resize=False, do_sample_frames=False)
        self.tokenizer = pretrained("AutoTokenizer", self.base, padding_side="right")
        config = pretrained("Qwen2VLConfig", self.base)
        self.tokenizer.add_tokens(list(self.tokens), special_tokens=True)
        self.reward_ids = self.tokenizer.convert_tokens_to_ids(list(self.tokens))
        with loading(self.model):
            tensors = self._tensors()
            rows = len(tensors["model.embed_tokens.weight"])
            if max(self.reward_ids) >= rows:
                needed = f"expected more than {max(self.reward_ids)}: it does not match {self.base}"
                raise RewardError(f"the checkpoint has {rows} tokens, {needed}")
            config.text_config.vocab_size = rows
            body = {k: v for k, v in tensors.items() if not k.startswith(("rm_head.", "lm_head."))}
            self.network = build_model(transformers.Qwen2VLModel, config, body, self.precision).to(self.place)
            self.head = linear_head(tensors, "rm_head.", nn.ReLU).to(self.place)

    @abstractmethod
    def _published_file(self) -> Path | None:
        """The publisher's Python file with the training prompt, if it is installed."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All weights including `rm_head.*`, with one embedding row per token after adding the reward tokens."""

    @abstractmethod
    def _frames(self, sample: Sample) -> Tensor:
        """The model's input for a sample: uint8 [F, 3, H, W], H and W multiples of 28."""

    @abstractmethod
    def _scored(self, rows: NDArray[np.float64]) -> Answer:
        """The score from outputs [reward tokens, head outputs]."""

    def _training_text(self) -> str:
        """The prompt that the model was trained with: `template`, a text or a Python file, or the publisher's file."""
        path = Path(self.template) if self.template else self._published_file()
        if path is None or not path.is_file():
            name = type(self).__name__.lower()
            raise RewardError(
                f"{name} needs the text it was trained with{f', expected at {path}' if path else ''}: run "
                f"`scripts/setup_reward.sh {name} VENV`, `prefgrpo reward serve {name}` there and give the option url; "
                "or give a file with it as the option template"
            )
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            return text
        values = published_texts(text)
        return "".join(values[variable][0] for variable in self.variables)

    def check(self, sample: Sample) -> None:
        """Also rejects prompts that cannot be inserted into the text, and extreme aspect ratios."""
        super().check(sample)
        check_aspect_ratio(sample.media, 200)
        if len(sample.prompt) > LONGEST:
            raise ValueError(f"the prompt has {len(sample.prompt)} characters, expected at most {LONGEST}")
        sample.prompt.encode()  # UnicodeEncodeError, a ValueError, for lone surrogates
        if held := [token for token in self.tokenizer.get_added_vocab() if token in sample.prompt]:
            raise ValueError(f"the prompt contains the model's special token {max(held, key=len)}")

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample."""
        samples = [sample for (sample,) in asked]
        turns = [(self._frames(s), self.text.replace("{text_prompt}", s.prompt)) for s in samples]
        return [self._scored(rows) for rows in self.outputs(turns)]

    @torch.inference_mode()
    def outputs(self, turns: Sequence[tuple[Tensor, str]]) -> NDArray[np.float64]:
        """[B, reward tokens, head outputs] for one batch of B pairs of frames [F, 3, H, W] and text."""
        seen = self.processor([frames for frames, _ in turns], return_tensors="pt").to(self.place)
        grid = seen["video_grid_thw"]  # an image is a clip of one frame; the last of an odd number is repeated
        counts = (grid.prod(1) // 4).tolist()
        texts = [chat(self.vision, count, text) for count, (_, text) in zip(counts, turns, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True).to(self.place)
        ids = batch["input_ids"]
        shown = self.network.visual(seen["pixel_values_videos"].to(self.precision), grid_thw=grid).pooler_output
        embeds = self.network.get_input_embeddings()(ids)
        place = ids == self.tokenizer.convert_tokens_to_ids(f"<|{self.vision}_pad|>")
        embeds = embeds.masked_scatter(place[..., None], shown.to(embeds.dtype))
        hidden = self.network.language_model(inputs_embeds=embeds, attention_mask=batch["attention_mask"])[0]
        reward = torch.isin(ids, torch.tensor(self.reward_ids, device=self.place))
        asked = hidden[reward].view(len(turns), len(self.tokens), -1).float()
        return self.head(asked).double().cpu().numpy()


@dataclass(kw_only=True, eq=False)
class HPSv3(QwenReward):
    """HPSv3's mean score μ; part `sigma`: the head's second output.

    Qwen2-VL-7B with a head on one reward token. Source: arXiv 2508.03789.

    model: folder or hub id with HPSv3.safetensors. base: folder or hub id of its config and tokenizer. template: file
    with the training prompt, containing {text_prompt} and <|Reward|>; default: from the hpsv3 package.
    """

    model: str = "MizzenAI/HPSv3"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    batch_size: PositiveInt = 8
    tokens = ("<|Reward|>",)
    variables = ("INSTRUCTION", "prompt_with_special_token")
    vision = "image"

    def _published_file(self) -> Path | None:
        spec = importlib.util.find_spec("hpsv3")
        return Path(spec.origin).parent / "dataset" / "data_collator_qwen.py" if spec and spec.origin else None

    def _tensors(self) -> dict[str, Tensor]:
        return read_tensors(sorted(folder_of(self.model, ["*.safetensors"]).glob("*.safetensors")))

    def _frames(self, sample: Sample) -> Tensor:
        image = sample.media.pil
        high, wide = fit(image.height, image.width, PIXELS, PIXELS)
        return torch.from_numpy(np.array(image.resize((wide, high)))).permute(2, 0, 1)[None]

    def _scored(self, rows: NDArray[np.float64]) -> Answer:
        mu, sigma = rows[0].tolist()
        return Answer(mu, parts={"sigma": sigma})


@dataclass(kw_only=True, eq=False)
class VideoAlign(QwenReward):
    """VideoReward's sum of normalised scores, over all three dimensions or some; parts: all three.

    Qwen2-VL-2B with a LoRA and a head on three reward tokens; each score is (x − mean) / std. Source: arXiv 2501.13918.

    model: folder or hub id with model_config.json and checkpoint-N/model.pth (the highest N is used). base: folder or
    hub id of Qwen2-VL's config and tokenizer. template: file with the training prompt, containing {text_prompt} and the
    three reward tokens, or VideoAlign's prompt_template.py; default: the one that scripts/setup_reward.sh put beside
    this Python. dimensions: which of VQ (visual quality), MQ (motion quality) and TA (text alignment) to sum.
    video_fps: frame rate of the clips, used to sample frames at the checkpoint's own rate; none: the clips' own.
    """

    takes = ("video",)
    model: str = "KwaiVGI/VideoReward"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    dimensions: Annotated[Sequence[Literal["VQ", "MQ", "TA"]], Field(min_length=1)] = PARTS
    video_fps: PositiveFloat | None = None
    tokens = tuple(f"<|{part}_reward|>" for part in PARTS)
    variables = ("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",)
    vision = "video"

    def _published_file(self) -> Path:
        return Path(sys.prefix) / "share" / "prefgrpo" / "videoalign_prompt_template.py"

    def _tensors(self) -> dict[str, Tensor]:
        """The weights of the latest checkpoint, with its LoRA merged."""
        folder = folder_of(self.model, ["model_config.json", "checkpoint-*"])
        config = json.loads((folder / "model_config.json").read_text(encoding="utf-8"))
        self.data = config["data_config"]
        self.norms = config["inference_config"]
        lora = config["peft_lora_config"]
        rank = lora["lora_r"]
        files = sorted(folder.glob("checkpoint-*/model.pth"), key=lambda file: int(file.parent.name.split("-")[1]))
        return merge_lora(
            read_tensors(files[-1:]), lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank)
        )

    def check(self, sample: Sample) -> None:
        """Also rejects clips of one frame, and those without a frame rate unless `video_fps` is given."""
        super().check(sample)
        if self.video_fps is None and sample.media.frame_rate is None:
            raise ValueError("the clip has no frame rate: give videoalign the option video_fps")
        if len(sample.media.pixels) < 2:
            raise ValueError("videoalign scores clips of 2 frames or more, got 1")

    def _scored(self, rows: NDArray[np.float64]) -> Answer:
        raw = np.diagonal(rows) if rows.shape[1] == len(PARTS) else rows[:, 0]
        parts: dict[str, float] = {
            part: (x - self.norms[f"{part}_mean"]) / self.norms[f"{part}_std"]
            for part, x in zip(PARTS, raw.tolist(), strict=True)
        }
        return Answer(sum(parts[name] for name in self.dimensions), parts=parts)

    def _frames(self, sample: Sample) -> Tensor:
        pixels = sample.media.pixels
        rate = self.video_fps or sample.media.frame_rate
        assert rate is not None  # see `check`
        count = frame_count(len(pixels), rate, self.data["fps"])
        chosen = torch.linspace(0, len(pixels) - 1, count).round().long().numpy()
        frames = torch.from_numpy(pixels[chosen]).permute(0, 3, 1, 2)
        size = fit(frames.shape[2], frames.shape[3], LEAST, int(self.data["max_frame_pixels"]))
        vision = library("torchvision.transforms.functional", INSTALL)
        return vision.resize(frames, list(size), vision.InterpolationMode.BICUBIC, antialias=True)


def frame_count(total: int, video_fps: float, fps: float) -> int:
    """Number of frames to sample out of `total`: `fps` per second; even, and 4 … 768 if available."""
    count = min(max(total / video_fps * fps, 4), min(768, total) // 2 * 2)
    return min(round(count / 2) * 2, total)
