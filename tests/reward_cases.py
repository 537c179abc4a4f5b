"""Samples for rewards, and tiny random checkpoints in the published file formats; equal seeds, equal weights.

Qwen2-VL has its flat config.json and key names of 2024 (`visual.…`, `model.layers.…`), VideoReward peft's key names.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import prefgrpo
from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.deqa import IMAGE, QUESTION
from prefgrpo.rewards.weights import library
from prefgrpo.tiny import scenes
from prefgrpo.tiny.pipelines import clip_tokenizer

# ---- samples ---------------------------------------------------------------------------------------------------------

GRID = 'Two cats, a 1x2 grid. Warm light. [LEFT]: a cat that says "hi." [RIGHT]: another cat sleeps.'


def drawn() -> list[Sample]:
    """One image with the right caption, one with a wrong caption."""
    combos = [scenes.COMBOS[0], scenes.COMBOS[-1]]
    images = scenes.render([combos[0], combos[0]], torch.Generator().manual_seed(0))
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Sample(scenes.caption(c), Media(p)) for c, p in zip(combos, pixels, strict=True)]


def picture(seed: int, high: int = 40, wide: int = 56) -> Media:
    """A smooth image, which stays distinguishable from others after resizing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (high // 8, wide // 8, 3), np.uint8)
    return Media(coarse.repeat(8, 0).repeat(8, 1))


def pictures() -> list[Sample]:
    """Two images of one prompt, one of another."""
    return [Sample(p, picture(k)) for k, p in enumerate(["a red cat", "a red cat", "two dogs on a hill"])]


def edits() -> list[Sample]:
    """Two edits of the same source image, and one edit of two source images."""
    source = (picture(8),)
    more = Sample("add both", picture(2), (picture(8), picture(9)))
    return [Sample("add a hat", picture(0), source), Sample("add a hat", picture(1), source), more]


def grids() -> list[Sample]:
    """Two samples whose prompt asks for a grid, and one whose prompt does not."""
    return [Sample(GRID, picture(k)) for k in range(2)] + [Sample("a 1920x1080 photo", picture(2))]


def clip(level: float, frames: int = 33) -> Media:
    """A clip that gets slightly brighter with each frame."""
    return Media(np.stack([np.full((32, 32, 3), level + k, np.uint8) for k in range(frames)]))


def grid(*levels: float, cols: int = 2, size: int = 16) -> Media:
    """An image of uniformly grey cells, row by row, without gaps."""
    cells = np.repeat(np.array(levels, np.uint8)[:, None, None, None], size, 1).repeat(size, 2).repeat(3, 3)
    rows = [np.concatenate(list(cells[k : k + cols]), 1) for k in range(0, len(levels), cols)]
    return Media(np.ascontiguousarray(np.concatenate(rows)))


# ---- checkpoints of the CLIP family ----------------------------------------------------------------------------------

SIZE = 28
"""Side in pixels of the images given to the encoders."""


def spread(model: nn.Module, seed: int) -> None:
    """Scales the weights so that every part of the model affects the score."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.1)
        if "norm" in name.lower() and name.endswith("weight"):
            weight.data += 1


def architecture(quick_gelu: bool = True, size: int = SIZE) -> dict[str, Any]:
    """open_clip's description of a ViT of two layers, with open_clip's own tokenizer."""
    vision = {"image_size": size, "layers": 2, "width": 32, "head_width": 16, "patch_size": 14}
    text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    return {"embed_dim": 24, "quick_gelu": quick_gelu, "vision_cfg": vision, "text_cfg": text}


def open_clip_folder(folder: Path, quick_gelu: bool = True, size: int = SIZE, seed: int = 0) -> Path:
    """open_clip_config.json and open_clip_pytorch_model.bin as open_clip publishes them, preprocessing of DFN5B."""
    open_clip = library("open_clip", "'prefgrpo[rewards]'")
    folder.mkdir(parents=True, exist_ok=True)
    preprocess: dict[str, Any] = {
        "mean": list(open_clip.OPENAI_DATASET_MEAN),
        "std": list(open_clip.OPENAI_DATASET_STD),
    }
    preprocess |= {"interpolation": "bicubic", "resize_mode": "squash"}
    config = {"model_cfg": architecture(quick_gelu, size), "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    spread(model, seed)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def hps_folder(folder: Path) -> Path:
    """HPS_v2.1_compressed.pt, {"state_dict": …}; the config beside it stands in for the name ViT-H-14."""
    open_clip_folder(folder, quick_gelu=False)
    weights = torch.load(folder / "open_clip_pytorch_model.bin", weights_only=True)
    (folder / "open_clip_pytorch_model.bin").unlink()
    torch.save({"epoch": 1, "state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    return folder


def clip_folder(folder: Path, width: int = 24, seed: int = 0) -> Path:
    """A CLIPModel as transformers saves it: config, safetensors, tokenizer, image processor."""
    tokenizer = clip_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = small | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 77}
    vision = small | {"image_size": SIZE, "patch_size": 14}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=width))
    spread(model, seed)
    model.logit_scale.data = torch.tensor(4.6052)
    model.save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


def aesthetic_head(file: Path, seed: int = 0) -> Path:
    """The aesthetic head's .pth, with the published names and shapes: layers.0, 2, 4, 6, 7."""
    layers = [nn.Linear(768, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64)]
    head = nn.ModuleDict({"layers": nn.Sequential(*layers, nn.Identity(), nn.Linear(64, 16), nn.Linear(16, 1))})
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    torch.save(head.state_dict(), file)
    return file


def _aesthetic(folder: Path) -> dict[str, Any]:
    model = clip_folder(folder, width=768)
    return {"model": str(model), "head": str(aesthetic_head(folder / "sac+logos+ava1-l14-linearMSE.pth"))}


def _clip(folder: Path) -> dict[str, Any]:
    return {"model": str(clip_folder(folder))}


def _laion(folder: Path) -> dict[str, Any]:
    return {"model": str(open_clip_folder(folder, quick_gelu=False))}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "aesthetic": _aesthetic,
    "clip": lambda folder: {"model": str(open_clip_folder(folder)), "architecture": "checkpoint"},
    "clipscore": _clip,
    "hpsv2": lambda folder: {"model": str(hps_folder(folder)), "architecture": "checkpoint"},
    "image_similarity": _clip,
    "pickscore": _clip,
    "subfig_clipT": _laion,
}
"""Reward -> function that fills a folder and returns the options that refer to its files."""


def make_checkpoints(names: str, folder: Path) -> Path:
    """Write checkpoints of rewards, e.g. "clip,aesthetic", into `folder`, each in its own; returns their recipe."""
    logging.disable(logging.WARNING)  # open_clip warns that the weights are random
    try:
        entries = [{"name": name, "options": MAKERS[name]((folder / name).resolve())} for name in names.split(",")]
    finally:
        logging.disable(logging.NOTSET)
    file = folder / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": entries}, sort_keys=False), encoding="utf-8")
    return file


# ---- checkpoints of rewards with an environment of their own ---------------------------------------------------------

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
        "<|image_pad|>", "<|video_pad|>")  # fmt: skip
WIDTH = 32
HEADS = 4
ROWS = 288
HPS_TEXT = "Rate it.\n{text_prompt}\nMark: <|Reward|>\nEND\n"
OWN_PROMPTS = ("a red cat", 'two dogs, or {x} "quoted" ünd 猫', "")
VIDEO_TEXT = "Rate it.\nSight: <|VQ_reward|>\nMotion: <|MQ_reward|>\n{text_prompt}\nFit: <|TA_reward|>\nEND\n"


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def qwen2vl(folder: Path, seed: int = 0) -> Path:
    """A Qwen2-VL in its published format, with a byte-level tokenizer."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    letters = {t: k for k, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids = {t: len(letters) + k for k, t in enumerate(QWEN)}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_act": "silu",
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        **{f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in ("vision_start", "vision_end")},
        **{f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("vision", "image", "video")},
        "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_sliding_window": False, "vocab_size": ROWS,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": {
            "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3, "hidden_size": WIDTH,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    }  # fmt: skip
    write(folder / "config.json", config)
    write(folder / "vocab.json", letters)
    write(folder / "merges.txt", "#version: 0.2\n")
    added = {str(k): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True} for t, k in ids.items()}  # fmt: skip
    tokens = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>",
              "additional_special_tokens": list(QWEN[1:]), "pad_token": "<|endoftext|>", "unk_token": None,
              "bos_token": None, "add_prefix_space": False, "model_max_length": 32768, "errors": "replace"}  # fmt: skip
    write(folder / "tokenizer_config.json", tokens)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(folder))
    spread(model, seed)
    save_file(published(model), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights of a Qwen2-VL under the key names of the published files."""
    names = {k: k.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
             for k in model.state_dict()}  # fmt: skip
    return {names[k]: v.clone().contiguous() for k, v in model.state_dict().items()}


def with_tokens(base: Path, count: int, seed: int) -> dict[str, torch.Tensor]:
    """The base weights, with embeddings resized to tokenizer length + `count`; the added rows are random."""
    tensors = load_file(base / "model.safetensors")
    length = 256 + len(QWEN) + count
    generator = torch.Generator().manual_seed(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(length, WIDTH, generator=generator)
    return tensors


def hpsv3(folder: Path) -> dict[str, object]:
    """Saves a tiny HPSv3 in its published format; returns the reward's options."""
    base = qwen2vl(folder / "base")
    head = torch.nn.ModuleDict(
        {"0": torch.nn.Linear(WIDTH, 1024), "3": torch.nn.Linear(1024, 16), "5": torch.nn.Linear(16, 2)}
    )
    spread(head, 1)
    tensors = with_tokens(base, 1, 2) | {f"rm_head.{k}": v for k, v in head.state_dict().items()}
    (folder / "hps").mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "hps" / "HPSv3.safetensors")
    template = write(folder / "text.txt", HPS_TEXT)
    return {"model": str(folder / "hps"), "base": str(base), "template": str(template), "device": "cpu"}


NORMS = {"VQ_mean": 3.5, "VQ_std": 2.0, "MQ_mean": 1.25, "MQ_std": 1.5, "TA_mean": 2.75, "TA_std": 2.5}
RANK = 4
ALPHA = 8


def videoalign(folder: Path) -> dict[str, object]:
    """Options of a tiny VideoReward: a model.pth with peft's key names."""
    base = qwen2vl(folder / "base")
    tensors = with_tokens(base, 3, 3)
    generator = torch.Generator().manual_seed(4)
    stems = [k.removesuffix(".weight") for k in tensors if k.startswith("model.layers.") and "_proj.weight" in k]
    pairs: dict[str, torch.Tensor] = {}
    for stem in stems:
        out, inner = tensors[f"{stem}.weight"].shape
        lora = f"base_model.model.{stem}"
        pairs[f"{lora}.lora_A.default.weight"] = 0.2 * torch.randn(RANK, inner, generator=generator)
        pairs[f"{lora}.lora_B.default.weight"] = 0.2 * torch.randn(out, RANK, generator=generator)
    head = {"base_model.model.rm_head.weight": torch.randn(3, WIDTH, generator=generator)}
    place = folder / "reward" / "checkpoint-7"
    place.mkdir(parents=True)
    base_names = {f"{stem}.weight": f"{stem}.base_layer.weight" for stem in stems}
    base_names |= {f"{stem}.bias": f"{stem}.base_layer.bias" for stem in stems}
    named = {f"base_model.model.{base_names.get(name, name)}": tensor for name, tensor in tensors.items()}
    torch.save(named | head | pairs, place / "model.pth")
    config = {
        "data_config": {"max_frame_pixels": 8 * 28 * 28, "num_frames": None, "fps": 2.0},
        "peft_lora_config": {"lora_enable": True, "lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": NORMS,
    }
    write(folder / "reward" / "model_config.json", config)
    template = write(folder / "text.txt", VIDEO_TEXT)
    return {"model": str(folder / "reward"), "base": str(base), "template": str(template), "device": "cpu"}


def bert_tokenizer(folder: Path) -> Path:
    """BERT's tokenizer with a vocabulary of single letters."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,.!?"
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    write(folder / "vocab.txt", "\n".join(vocab) + "\n")
    write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    return folder


BLIP_NAMES = (
    (r"^embeddings.class_embedding", "cls_token"), (r"^embeddings.position_embedding", "pos_embed"),
    (r"^embeddings.patch_embedding", "patch_embed.proj"), (r"^encoder.layers", "blocks"), (r"^post_layernorm", "norm"),
    (r"\.layer_norm", ".norm"), (r"\.self_attn.projection", ".attn.proj"), (r"\.self_attn", ".attn"),
)  # fmt: skip
"""transformers' names of the weights of BLIP's vision tower, and those in ImageReward.pt."""


def imagereward(folder: Path) -> dict[str, object]:
    """Saves a tiny ImageReward in its published format; returns the reward's options."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    settings = {"hidden_act": "gelu", "hidden_size": 48, "intermediate_size": 96, "layer_norm_eps": 1e-12,
                "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                "vocab_size": 90}  # fmt: skip
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 1}
    vision = BlipVisionModel(BlipVisionConfig(image_size=32, patch_size=16, **size))
    text = BlipTextModel(BlipTextConfig(encoder_hidden_size=64, **settings), add_pooling_layer=False)
    sizes = zip((0, 2, 4, 6, 7), (48, 1024, 128, 64, 16), (1024, 128, 64, 16, 1), strict=True)
    head = torch.nn.ModuleDict({str(k): torch.nn.Linear(a, b) for k, a, b in sizes})
    tensors = {f"mlp.layers.{k}": v for k, v in head.state_dict().items()}
    tensors |= {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}
    for name, tensor in vision.state_dict().items():
        for ours, theirs in BLIP_NAMES:
            name = re.sub(ours, theirs, name)
        tensors[f"blip.visual_encoder.{name}"] = tensor
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensors[name] = is_norm + 0.15 * torch.randn(tensor.shape, generator=generator)
    tensors["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["blip.vision_proj.weight"] = torch.zeros(256, 64)  # what the reward does not use
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "ImageReward.pt")
    write(folder / "med_config.json", settings)
    return {"model": str(folder), "tokenizer": str(bert_tokenizer(folder / "bert")), "device": "cpu"}


def mask2former(folder: Path) -> Path:
    """A Mask2Former for instance segmentation as transformers saves it, with three COCO class names."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    stages = {"depths": [1] * 4, "num_heads": [1] * 4, "out_features": [f"stage{k}" for k in range(1, 5)]}
    swin = SwinConfig(image_size=64, patch_size=4, embed_dim=8, window_size=4, **stages)
    sizes = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    feed = dict.fromkeys(("encoder_feedforward_dim", "dim_feedforward"), 16)
    torch.manual_seed(0)
    labels = {0: "person", 1: "sofa", 2: "mouse"}
    config = Mask2FormerConfig(backbone_config=swin, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                               num_queries=6, id2label=labels, **sizes, **feed)  # fmt: skip
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}, size_divisor=32).save_pretrained(folder)
    return folder


def geneval(folder: Path) -> dict[str, object]:
    """Options of a GenEval with a tiny CLIP and a tiny detector, confident enough that it detects couches."""
    from transformers import Mask2FormerForUniversalSegmentation

    place = mask2former(folder / "detector")
    model = Mask2FormerForUniversalSegmentation.from_pretrained(place)
    spread(model, 5)
    model.class_predictor.weight.data *= 4
    model.save_pretrained(place)
    return {"detector_options": {"model": str(place)}, "clip": str(clip_folder(folder / "clip")), "device": "cpu"}


OWL = '''
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwlConfig(PretrainedConfig):
    model_type = "mplug_owl2"

class Owl(PreTrainedModel):
    """Stands in for the published code: the same call, logits from the ids and the image's mean colour."""
    config_class = OwlConfig
    _supports_sdpa = False

    def __init__(self, config):
        super().__init__(config)
        self.colour = torch.nn.Linear(3, 300)
        self.post_init()

    def forward(self, input_ids, images):
        assert (input_ids == -200).sum(1).eq(1).all() and images.shape[2:] == (28, 28)
        logits = self.colour(images.mean((2, 3)))[:, None].expand(-1, input_ids.shape[1], -1)
        return {"logits": logits * torch.arange(1, input_ids.shape[1] + 1)[None, :, None] / input_ids.shape[1]}
'''


def deqa(folder: Path) -> dict[str, object]:
    """Options of a DeQA whose repository holds a stand-in for the published code and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<unk>", *QUESTION.replace(IMAGE, "").split(), "excellent", "good", "fair", "poor", "bad"]
    core = Tokenizer(models.WordLevel({w: k for k, w in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    write(folder / "owl.py", OWL)
    auto = {"AutoConfig": "owl.OwlConfig", "AutoModelForCausalLM": "owl.Owl"}
    write(folder / "config.json", {"model_type": "mplug_owl2", "architectures": ["Owl"], "auto_map": auto})
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
                 "crop_size": {"height": 28, "width": 28},
                 "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
                 "do_resize": True, "do_center_crop": True, "do_normalize": True, "do_rescale": True, "resample": 3,
                 "do_convert_rgb": True, "rescale_factor": 1 / 255}  # fmt: skip
    write(folder / "preprocessor_config.json", processor)
    generator = torch.Generator().manual_seed(6)
    tensors = {"colour.weight": torch.randn(300, 3, generator=generator), "colour.bias": torch.zeros(300)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {"model": str(folder), "device": "cpu"}


# ---- a judge, Qwen3-VL or Qwen2.5-VL, and its stock answers ----------------------------------------------------------

JUDGE_TOKENIZER = Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge"


def tiny_judge(kind: str, folder: Path, seed: int = 0) -> str:
    """Save a random `kind` ('qwen3' | 'qwen25') judge into `folder`; returns its path."""
    torch.manual_seed(seed)
    tokenizer = T.AutoTokenizer.from_pretrained(JUDGE_TOKENIZER)
    ids = {s: tokenizer.convert_tokens_to_ids(s) for s in tokenizer.all_special_tokens}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6] if kind == "qwen25" else [6, 5, 5]}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "initializer_range": 0.2,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": rope,
    }
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
    special = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    if kind == "qwen3":
        text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision |= {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        vision |= {"initializer_range": 0.2}
        config = T.Qwen3VLConfig(text_config=text, vision_config=vision, **special)
        model = T.Qwen3VLForConditionalGeneration(config)
        half = [0.5, 0.5, 0.5]
        processor = Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, size=size)
    else:
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.2}
        config = T.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
        model = T.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(patch_size=14, size=size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def stock_answer(model, tokenizer, processor, turns, images) -> torch.Tensor:
    """Next-token probabilities [vocabulary] after a conversation, from one full forward pass of transformers."""
    how = {"continue_final_message": True} if turns[-1]["role"] == "assistant" else {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(turns, tokenize=False, **how)
    inputs = processor(images=[m.pil for m in images], return_tensors="pt")
    merge = model.config.vision_config.spatial_merge_size**2
    pads = ["<|image_pad|>" * int(g.prod() // merge) for g in inputs["image_grid_thw"]] + [""]
    text = "".join(a + b for a, b in zip(text.split("<|image_pad|>"), pads, strict=True))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    kinds = (ids["input_ids"] == model.config.image_token_id).int()
    with torch.no_grad():
        return model(**ids, **inputs, mm_token_type_ids=kinds).logits[0, -1].double().softmax(-1)
