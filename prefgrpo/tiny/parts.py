"""Tokenizers, text and image encoders and the image VAE of the tiny pipelines: built here, nothing is fetched."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

TEXT_WIDTH = 32
QWEN_WIDTH = CLIP_WIDTH = 16
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
               "<|image_pad|>", "<|video_pad|>")  # fmt: skip
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level CLIP tokenizer without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    """Character-level T5 tokenizer."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -5.0)]
    return T5Tokenizer(vocab=[*special, *((chr(i), -10.0) for i in range(33, 127))], extra_ids=0, model_max_length=512)


def clip_text(tokenizer: CLIPTokenizer, cls: type[Any] = CLIPTextModel, width: int = TEXT_WIDTH) -> Any:
    """CLIP text model of two layers; `cls` may be the variant with a projection."""
    return cls(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width, projection_dim=width,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def t5_text(
    tokenizer: T5Tokenizer, cls: type[Any] = T5EncoderModel, config: type[Any] = T5Config, width: int = TEXT_WIDTH
) -> Any:
    """T5 (or UMT5) encoder of two layers."""
    return cls(
        config(
            vocab_size=len(tokenizer), d_model=width, d_ff=width, d_kv=8, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level Qwen tokenizer without merges, with its special tokens and a chat template."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *QWEN_TOKENS]
    tokenizer = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], extra_special_tokens=list(QWEN_TOKENS[1:]),
        model_max_length=4096,
    )  # fmt: skip
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen3_text(tokenizer: Qwen2Tokenizer, cls: type[Any], layers: int) -> Any:
    """Qwen3 language model of width 16."""
    return cls(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=QWEN_WIDTH, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
        )
    )  # fmt: skip


def qwen_vl_text(tokenizer: Qwen2Tokenizer) -> Any:
    """Qwen2.5-VL of width 16, with its vision tower."""
    token = tokenizer.convert_tokens_to_ids
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer), "hidden_size": QWEN_WIDTH, "intermediate_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                "max_position_embeddings": 4096, "bos_token_id": token("<|endoftext|>"),
                "eos_token_id": token("<|im_end|>"),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            },
            vision_config={
                "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": QWEN_WIDTH,
                "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
                "fullatt_block_indexes": [0],
            },
            image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        )
    )  # fmt: skip


def qwen_processor(tokenizer: Qwen2Tokenizer) -> Any:
    """Of text and of images, which become 4 tokens at most."""
    from transformers import Qwen2VLImageProcessor

    from prefgrpo.models.qwen_processor import Qwen2VLProcessor

    return Qwen2VLProcessor(Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56), tokenizer)


def image_vae(channels: int = 4) -> Any:
    """AutoencoderKL that halves each side once."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=channels, norm_num_groups=4, sample_size=32,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def clip_vision() -> dict[str, Any]:
    """CLIP image encoder of width 16 and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=CLIP_WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        patch_size=8, projection_dim=CLIP_WIDTH,
    )  # fmt: skip
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": CLIPVisionModel(config), "image_processor": processor}
