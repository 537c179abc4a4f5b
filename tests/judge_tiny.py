"""A tiny random Qwen3-VL or Qwen2.5-VL judge (real classes, the demo judge's tokenizer), and its stock answers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import prefgrpo

TOKENIZER = Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge"


def build(kind: str, folder: Path, seed: int = 0) -> str:
    """Save a random `kind` ('qwen3' | 'qwen25') judge into `folder`; returns its path."""
    torch.manual_seed(seed)
    tokenizer = T.AutoTokenizer.from_pretrained(TOKENIZER)
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


def stock(model, tokenizer, processor, turns, images) -> torch.Tensor:
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
