"""`imagereward`: ImageReward-v1.0, a BLIP (ViT-L and a text encoder that attends to the image) with a linear head.

    value = (mlp(h at [CLS]) − 0.16717362830052426) / 1.0333394966054072

The published ImageReward.pt (Xu et al., arXiv 2304.05977) is loaded into transformers' BLIP, because the package of the
same name needs timm 0.6.13, fairscale and transformers < 5.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import INSTALL, Question, Reward, library
from prefgrpo.rewards.encoder import clean
from prefgrpo.rewards.weights import (
    build_model,
    device_of,
    folder_of,
    linear_head,
    loading,
    pretrained,
    read_tensors,
)

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
CENTRE, SCALE = 0.16717362830052426, 1.0333394966054072
LENGTH = 35
"""Maximum tokens of a prompt, including [CLS] and [SEP]; longer prompts are truncated."""
NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"), (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj", "embeddings.patch_embedding"), (r"^blocks", "encoder.layers"), (r"^norm", "post_layernorm"),
    (r"\.norm(\d)", r".layer_norm\1"), (r"\.attn\.proj", ".self_attn.projection"), (r"\.attn\.", ".self_attn."),
)  # fmt: skip
"""Weight names of BLIP's vision tower: regex for the file's name, name in transformers."""


@dataclass(kw_only=True, eq=False)
class ImageReward(Reward):
    """ImageReward's score, about −2 … 2, in float32.

    BLIP with a linear head. Source: arXiv 2304.05977.

    model: folder or hub id with ImageReward.pt and med_config.json. tokenizer: folder or hub id of BERT's tokenizer.
    device: auto, cpu, cuda, cuda:1. batch_size: images per forward.
    """

    model: str = "THUDM/ImageReward"
    tokenizer: str = "google-bert/bert-base-uncased"
    device: str = "auto"
    batch_size: PositiveInt = 32

    def __post_init__(self) -> None:
        transformers = library("transformers", INSTALL)
        self.place = device_of(self.device)
        folder = folder_of(self.model, ["ImageReward.pt", "med_config.json"])
        self.tokenize = pretrained("AutoTokenizer", self.tokenizer)
        with loading(self.model):
            tensors = read_tensors([folder / "ImageReward.pt"])
            settings = json.loads((folder / "med_config.json").read_text(encoding="utf-8"))
            self.vision = _vision(transformers, _with_prefix(tensors, "blip.visual_encoder.")).to(self.place)
            self.text = _text(transformers, _with_prefix(tensors, "blip.text_encoder."), settings).to(self.place)
            # the published head has dropout, which is inactive, and no activations
            self.mlp = linear_head(tensors, "mlp.layers.", nn.Identity).to(self.place)
        vision = library("torchvision.transforms", INSTALL)
        side = self.vision.config.image_size
        resize = vision.Resize(side, vision.InterpolationMode.BICUBIC)
        self.preprocess = vision.Compose([
            resize, vision.CenterCrop(side), vision.ToTensor(), vision.Normalize(MEAN, STD)
        ])  # fmt: skip

    @torch.inference_mode()
    def ask(self, asked: list[Question]) -> list[Answer]:
        """The score of each image for its prompt."""
        samples = [sample for (sample,) in asked]
        fixed = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        words = self.tokenize([clean(s.prompt) for s in samples], **fixed).to(self.place)
        pixels = torch.stack([self.preprocess(s.media.pil) for s in samples]).to(self.place)
        seen = self.vision(pixels).last_hidden_state
        hidden = self.text(
            input_ids=words["input_ids"], attention_mask=words["attention_mask"], encoder_hidden_states=seen
        ).last_hidden_state
        return [Answer(v) for v in ((self.mlp(hidden[:, 0].float()) - CENTRE) / SCALE)[:, 0].tolist()]


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _vision(transformers: Any, tensors: dict[str, Tensor]) -> Any:
    """BLIP's vision tower; its size is inferred from the tensors (head dimension 64)."""
    width = tensors["patch_embed.proj.weight"].shape[0]
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    config = transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=1 + max(int(k.split(".")[1]) for k in tensors if k.startswith("blocks.")),
        num_attention_heads=width // 64,
        image_size=patch * round((tensors["pos_embed"].shape[1] - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    for pattern, new in NAMES:
        tensors = {re.sub(pattern, new, name): tensor for name, tensor in tensors.items()}
    return build_model(transformers.BlipVisionModel, config, tensors, torch.float32)


def _text(transformers: Any, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Any:
    """BLIP's text encoder with cross-attention, as med_config.json describes it."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings", "hidden_act", "layer_norm_eps")  # fmt: skip
    width = tensors["encoder.layer.0.crossattention.self.key.weight"].shape[1]
    config = transformers.BlipTextConfig(encoder_hidden_size=width, **{k: settings[k] for k in keys})
    kept = {k: v for k, v in tensors.items() if not k.endswith("position_ids")}
    return build_model(transformers.BlipTextModel, config, kept, torch.float32, add_pooling_layer=False)
