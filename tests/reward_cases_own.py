"""Tiny random checkpoints, in the published file formats, for the rewards that need a separate environment.

Qwen2-VL has its flat config.json and key names of 2024 (`visual.…`, `model.layers.…`), VideoReward peft's key names.
"""

import json
import re
from pathlib import Path

import torch
from reward_cases import Case
from safetensors.torch import load_file, save_file
from tiny_media import noise
from tiny_rewards import clip_folder, spread
from tokenizers import pre_tokenizers

from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.deqa import IMAGE, QUESTION

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
        "<|image_pad|>", "<|video_pad|>")  # fmt: skip
WIDTH, HEADS, ROWS = 32, 4, 288
HPS_TEXT = "Rate it.\n{text_prompt}\nMark: <|Reward|>\nEND\n"
PROMPTS = ("a red cat", 'two dogs, or {x} "quoted" ünd 猫', "")
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
    tensors, length = load_file(base / "model.safetensors"), 256 + len(QWEN) + count
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
RANK, ALPHA = 4, 8


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


PUBLISHED = (
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
        for ours, theirs in PUBLISHED:
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


def pictures() -> list[Sample]:
    """Images of several sizes with their prompts."""
    return [Sample(p, noise(k, 40 + 9 * k, 56)) for k, p in enumerate(PROMPTS)]


def clips() -> list[Sample]:
    return [Sample(p, noise(k, frames=8 + k)) for k, p in enumerate(PROMPTS[:2])]


def photos() -> list[Sample]:
    """Images with GenEval's metadata columns; the detector sees no person and several couches."""
    asked = [{"tag": "single_object", "include": [{"class": c, "count": 1}]} for c in ("person", "couch")]
    return [Sample("a photo", noise(k), meta=meta) for k, meta in enumerate(asked)]


CASES = {
    "imagereward": Case(lambda folder: imagereward(folder / "ir"), pictures),
    "hpsv3": Case(hpsv3, pictures),
    "videoalign": Case(videoalign, clips),
    "deqa": Case(lambda folder: deqa(folder / "deqa"), pictures),
    "geneval": Case(geneval, photos),
}
