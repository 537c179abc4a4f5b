"""Tiny random pipelines of every model family, from the real diffusers and transformers classes.

`make(family, folder)` writes one with `save_pretrained`: below 2 MB, below a second, no downloads (tokenizers are
built here). They prove the plumbing of a family, not its quality. Invariant: equal (family, seed) give equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

TEXT_WIDTH = 32


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


def image_vae(channels: int = 4) -> Any:
    """AutoencoderKL that halves each side once."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=channels, norm_num_groups=4, sample_size=32,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def flux() -> Any:
    """FLUX.1: 2 double and 2 single blocks of width 32, embedded guidance, dynamic shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH, guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0), vae=image_vae(),
        text_encoder=clip_text(clip), tokenizer=clip, text_encoder_2=t5_text(t5), tokenizer_2=t5,
        transformer=transformer,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {"flux": flux}
"""Family name → builder of its tiny pipeline."""


def make(family: str, folder: str | Path, seed: int = 0, **scheduler: Any) -> Path:
    """Write the tiny pipeline of a family into `folder` and return it; `scheduler` overrides its scheduler's config."""
    if family not in FAMILIES:
        raise ValueError(f"no tiny pipeline of family '{family}': expected one of {', '.join(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = FAMILIES[family]()
    pipe.scheduler = type(pipe.scheduler).from_config(dict(pipe.scheduler.config) | scheduler)
    pipe.save_pretrained(folder)
    return Path(folder)
