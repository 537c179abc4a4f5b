"""Tiny random pipelines of every model family, from the real diffusers and transformers classes.

`make(family, folder)` writes one with `save_pretrained`: under 2 MB (HunyuanVideo-1.5: 18 MB, for a projection of fixed
width), in under a second, without downloads. They test a family's code, not its quality. Invariant: equal
(family, seed) give equal weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines import ltx2
from PIL import Image
from tokenizers import pre_tokenizers

from prefgrpo.config.recipe import to_yaml
from prefgrpo.config.schema import MODEL_VALUES
from prefgrpo.models import family as model_family
from prefgrpo.models.folder import ModelError

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
               "<|image_pad|>", "<|video_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")  # fmt: skip
ID = {token: len(LETTERS) + i for i, token in enumerate(CHAT_TOKENS)}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = "message['content'] | map(attribute='text') | join"
CHAT_OF_PARTS = CHAT.replace("message['content']", PARTS)
CHAT_OF_BOTH = CHAT.replace("message['content']", f"message['content'] if message['content'] is string else {PARTS}")


def clip_tokenizer() -> Any:
    """Byte-level CLIP tokenizer without merges."""
    tokens = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """Character-level T5 tokenizer."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -5.0)]
    vocab = [*special, *((chr(i), -10.0) for i in range(33, 127))]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def chat_tokenizer() -> Any:
    """Byte-level Qwen tokenizer without merges, with the special tokens of all language models and a chat template."""
    vocab = {token: i for i, token in enumerate((*LETTERS, *CHAT_TOKENS))}
    more = list(CHAT_TOKENS[1:])
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=more, model_max_length=4096)
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen2_processor() -> Any:
    """Processor for text and images; an image becomes at most 4 tokens."""
    images = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    return transformers.Qwen2VLProcessor(images, chat_tokenizer(), transformers.Qwen2VLVideoProcessor())


def qwen3_processor() -> Any:
    """Processor for text and images."""
    images = transformers.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64)
    videos = transformers.Qwen3VLVideoProcessor()
    return transformers.Qwen3VLProcessor(images, chat_tokenizer(), videos, chat_template=CHAT_OF_BOTH)


def pixtral_processor() -> Any:
    """Processor for text."""
    images = transformers.PixtralImageProcessor(size={"longest_edge": 28}, patch_size=14)
    options = {"patch_size": 14, "spatial_merge_size": 2, "chat_template": CHAT_OF_PARTS}
    return transformers.PixtralProcessor(images, chat_tokenizer(), **options)


Component = tuple[str, dict[str, Any]]
"""(class in diffusers or transformers, its configuration)."""
WIDTH = 32
"""Width of CLIP and T5; language models and the CLIP image encoder have half of it."""

# fmt: off
CLIP: dict[str, Any] = {
    "vocab_size": 514, "hidden_size": WIDTH, "intermediate_size": WIDTH, "projection_dim": WIDTH,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 77,
    "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513,
}
T5: dict[str, Any] = {
    "vocab_size": 98, "d_model": WIDTH, "d_ff": WIDTH, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
LANGUAGE: dict[str, Any] = {
    "vocab_size": len(LETTERS) + len(CHAT_TOKENS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 4096,
}
QWEN25: dict[str, Any] = {
    **LANGUAGE, "num_key_value_heads": 2, "bos_token_id": ID["<|endoftext|>"], "eos_token_id": ID["<|im_end|>"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
QWEN_IDS = {
    "image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"], "vision_end_token_id": ID["<|vision_end|>"],
}
QWEN25_VL: Component = ("Qwen2_5_VLForConditionalGeneration", {
    **QWEN_IDS, "text_config": QWEN25,
    "vision_config": {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [0]},
})
QWEN3_VL: Component = ("Qwen3VLForConditionalGeneration", {
    **QWEN_IDS,
    "text_config": LANGUAGE | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        **VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
})
MISTRAL3: Component = ("Mistral3ForConditionalGeneration", {
    "text_config": LANGUAGE | {"num_hidden_layers": 31},
    "vision_config": {
        **VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
    },
    "image_token_index": ID["[IMG]"],
})
GEMMA3: Component = ("Gemma3ForConditionalGeneration", {
    "text_config": LANGUAGE | {"pad_token_id": ID["<|endoftext|>"]},
    "vision_config": {
        **VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    "mm_tokens_per_image": 4, "image_token_id": ID["<|image_pad|>"],
})
IMAGE_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4, "sample_size": 32,
}
KL_VAE: Component = ("AutoencoderKL", {
    **IMAGE_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    "use_quant_conv": False, "use_post_quant_conv": False,
})
STATISTICS: dict[str, Any] = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 0.8, 1.2, 0.9]}
BLOCKS = {"attention_head_dim": 16, "num_attention_heads": 2}
VIDEO_BLOCKS = {"attention_head_dim": 12, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4}


def flow(**config: Any) -> Component:
    """The scheduler of most families."""
    return "FlowMatchEulerDiscreteScheduler", config


FLUX: dict[str, Any] = {
    "transformer": ("FluxTransformer2DModel", {
        **BLOCKS, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH, "guidance_embeds": True, "axes_dims_rope": (4, 4, 8),
    }),
    "scheduler": flow(use_dynamic_shifting=True, shift=3.0), "vae": KL_VAE,
    "tokenizer": clip_tokenizer, "text_encoder": ("CLIPTextModel", CLIP),
    "tokenizer_2": t5_tokenizer, "text_encoder_2": ("T5EncoderModel", T5),
}
FLUX2: dict[str, Any] = {
    "transformer": ("Flux2Transformer2DModel", {
        **BLOCKS, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 3 * 16,
        "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4),
    }),
    "scheduler": flow(use_dynamic_shifting=True), "vae": ("AutoencoderKLFlux2", IMAGE_VAE),
    "tokenizer": pixtral_processor, "text_encoder": MISTRAL3,
}
QWEN_VAE: dict[str, Any] = {
    **STATISTICS, "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False],
}
QWEN_FLOW = flow(use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02)
QWEN: dict[str, Any] = {
    "transformer": ("QwenImageTransformer2DModel", {
        **BLOCKS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }),
    "scheduler": QWEN_FLOW, "vae": ("AutoencoderKLQwenImage", QWEN_VAE),
    "tokenizer": chat_tokenizer, "text_encoder": QWEN25_VL,
}
QWEN_EDIT = QWEN | {  # its VAE has the real downsampling, because sources have a million pixels
    "processor": qwen2_processor,
    "vae": ("AutoencoderKLQwenImage", QWEN_VAE | {
        "base_dim": 4, "dim_mult": [1, 2, 2, 2], "temperal_downsample": [False] * 3,
    }),
}
WAN_BLOCKS: dict[str, Any] = {
    **VIDEO_BLOCKS, "text_dim": WIDTH, "freq_dim": 32, "ffn_dim": 48, "num_layers": 2, "rope_max_seq_len": 64,
}
WAN_NET: Component = ("WanTransformer3DModel", WAN_BLOCKS)
WAN_NET_OF_IMAGE: Component = ("WanTransformer3DModel", WAN_BLOCKS | {"in_channels": 4 + 6})
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
WAN: dict[str, Any] = {
    "transformer": WAN_NET, "scheduler": ("UniPCMultistepScheduler", UNIPC | {"flow_shift": 3.0}),
    "vae": ("AutoencoderKLWan", {
        **STATISTICS, "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1,
        "temperal_downsample": [False, True], "scale_factor_temporal": 2, "scale_factor_spatial": 4,
    }),
    "tokenizer": t5_tokenizer, "text_encoder": ("UMT5EncoderModel", T5),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxPipeline", FLUX),
    "flux_kontext": ("FluxKontextPipeline", FLUX),
    "flux2": ("Flux2Pipeline", FLUX2),
    "flux2_klein": ("Flux2KleinPipeline", FLUX2 | {
        "tokenizer": chat_tokenizer, "text_encoder": ("Qwen3ForCausalLM", LANGUAGE | {"num_hidden_layers": 28}),
        "transformer": ("Flux2Transformer2DModel", FLUX2["transformer"][1] | {"guidance_embeds": False}),
    }),
    "flux3": ("Flux3ModularPipeline", {
        "transformer": ("Flux3Transformer2DModel", {
            **BLOCKS, "in_channels": 16, "cond_in_channels": 16, "num_layers": 1, "num_single_layers": 2,
            "joint_attention_dim": 8 * 16, "timestep_channels": 32, "axes_dims_rope": (4, 4, 4, 4),
        }),
        "vae": ("AutoencoderKLFlux2", IMAGE_VAE | {  # its own downsampling, to which references are padded
            "block_out_channels": (4,) * 4, "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        }),
        "tokenizer": qwen3_processor,
        "text_encoder": (QWEN3_VL[0], QWEN3_VL[1] | {
            "text_config": QWEN3_VL[1]["text_config"] | {"num_hidden_layers": 32},
        }),
    }),
    "hunyuan_video": ("HunyuanVideoPipeline", {
        "transformer": ("HunyuanVideoTransformer3DModel", {
            **VIDEO_BLOCKS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16,
            "pooled_projection_dim": WIDTH, "rope_axes_dim": (4, 4, 4),
        }),
        "scheduler": flow(shift=7.0),
        "tokenizer": chat_tokenizer,
        "text_encoder": ("LlamaModel", LANGUAGE | {"num_hidden_layers": 3, "num_key_value_heads": 2}),
        "tokenizer_2": clip_tokenizer, "text_encoder_2": ("CLIPTextModel", CLIP),
        "vae": ("AutoencoderKLHunyuanVideo", {
            "latent_channels": 4, "block_out_channels": (4, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4,
        }),
    }),
    "hunyuan_video_15": ("HunyuanVideo15Pipeline", {
        "transformer": ("HunyuanVideo15Transformer3DModel", {
            **VIDEO_BLOCKS, "in_channels": 9, "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0,
            "text_embed_dim": 16, "text_embed_2_dim": WIDTH, "image_embed_dim": 16, "rope_axes_dim": (4, 4, 4),
            "task_type": "t2v",
        }),
        "scheduler": flow(shift=7.0), "guider": ("ClassifierFreeGuidance", {"guidance_scale": 6.0}),
        "tokenizer": chat_tokenizer, "text_encoder": ("Qwen2_5_VLTextModel", QWEN25 | {"num_hidden_layers": 3}),
        "tokenizer_2": ("ByT5Tokenizer", {}), "text_encoder_2": ("T5EncoderModel", T5 | {"vocab_size": 384}),
        "vae": ("AutoencoderKLHunyuanVideo15", {
            "latent_channels": 4, "block_out_channels": (8, 16, 16), "layers_per_block": 1,
            "spatial_compression_ratio": 4, "temporal_compression_ratio": 2,
        }),
    }),
    "krea2": ("Krea2Pipeline", {
        "transformer": ("Krea2Transformer2DModel", {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 32, "timestep_embed_dim": 16, "text_hidden_dim": 16,
            "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
            "text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 6, 6),
        }),
        "scheduler": flow(use_dynamic_shifting=True, max_image_seq_len=6400),
        "vae": ("AutoencoderKLQwenImage", QWEN_VAE),
        "tokenizer": chat_tokenizer, "text_encoder": ("Qwen3VLModel", QWEN3_VL[1]),
        "text_encoder_select_layers": [1, 2],
    }),
    "ltx2": ("LTX2Pipeline", {
        "transformer": ("LTX2VideoTransformer3DModel", {
            **VIDEO_BLOCKS, "cross_attention_dim": 24, "audio_in_channels": 4, "audio_out_channels": 4,
            "audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16,
            "num_layers": 2, "caption_channels": 16, "rope_type": "split", "perturbed_attn": True,
        }),
        "scheduler": flow(
            use_dynamic_shifting=True, base_image_seq_len=1024, base_shift=0.95, max_shift=2.05, shift_terminal=0.1,
        ),
        "tokenizer": chat_tokenizer, "text_encoder": GEMMA3,
        "connectors": ("LTX2TextConnectors", {
            "caption_channels": 16, "text_proj_in_factor": 3, "rope_type": "split",
            "video_connector_num_attention_heads": 2, "video_connector_attention_head_dim": 8,
            "video_connector_num_layers": 1, "video_connector_num_learnable_registers": 16,
            "audio_connector_num_attention_heads": 2, "audio_connector_attention_head_dim": 8,
            "audio_connector_num_layers": 1, "audio_connector_num_learnable_registers": 16,
        }),
        "vae": ("AutoencoderKLLTX2Video", {
            "latent_channels": 4, "block_out_channels": (8,), "down_block_types": ("LTX2VideoDownBlock3D",),
            "decoder_block_out_channels": (8,), "layers_per_block": (1,), "decoder_layers_per_block": (1, 1),
            "spatio_temporal_scaling": (True,), "decoder_spatio_temporal_scaling": (True,),
            "decoder_inject_noise": (False,) * 2, "downsample_type": ("spatial",),
            "upsample_type": ("spatiotemporal",), "upsample_residual": (False,), "upsample_factor": (1,),
            "patch_size": 1, "decoder_causal": False,
        }),
        "audio_vae": ("AutoencoderKLLTX2Audio", {
            "base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 8,
            "resolution": 32, "mid_block_add_attention": False,
        }),
        "vocoder": ("LTX2Vocoder", {
            "in_channels": 16, "hidden_channels": 8, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2],
            "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]], "output_sampling_rate": 16000,
        }),
    }),
    "qwen_image": ("QwenImagePipeline", QWEN),
    "qwen_image_edit": ("QwenImageEditPipeline", QWEN_EDIT),
    "qwen_image_edit_plus": ("QwenImageEditPlusPipeline", QWEN_EDIT),
    "qwen_image_21": ("QwenImage21Pipeline", {
        "transformer": ("QwenImage21Transformer2DModel", {
            **BLOCKS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "context_in_dim": 16,
            "axes_dims_rope": (4, 6, 6),
        }),
        "scheduler": QWEN_FLOW, "processor": qwen3_processor, "text_encoder": QWEN3_VL,
        "vae": ("AutoencoderKLQwenImage21", QWEN_VAE | {
            "base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 2, 2, 2, 2], "temperal_downsample": [False] * 4,
        }),
    }),
    "sd3": ("StableDiffusion3Pipeline", {
        "transformer": ("SD3Transformer2DModel", {
            **BLOCKS, "sample_size": 32, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "joint_attention_dim": 2 * WIDTH, "caption_projection_dim": 32, "pooled_projection_dim": 2 * WIDTH,
            "pos_embed_max_size": 128, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        }),
        "scheduler": flow(shift=3.0), "vae": KL_VAE,
        "tokenizer": clip_tokenizer, "text_encoder": ("CLIPTextModelWithProjection", CLIP),
        "tokenizer_2": clip_tokenizer, "text_encoder_2": ("CLIPTextModelWithProjection", CLIP),
        "tokenizer_3": t5_tokenizer, "text_encoder_3": ("T5EncoderModel", T5 | {"d_model": 64, "d_ff": 64}),
    }),
    "wan": ("WanPipeline", WAN),
    "wan22": ("WanPipeline", WAN | {"transformer_2": WAN_NET, "boundary_ratio": 0.875}),
    "wan22_i2v": ("WanImageToVideoPipeline", WAN | {
        "transformer": WAN_NET_OF_IMAGE, "transformer_2": WAN_NET_OF_IMAGE, "boundary_ratio": 0.9,
    }),
    "wan_i2v": ("WanImageToVideoPipeline", WAN | {
        "transformer": ("WanTransformer3DModel", WAN_BLOCKS | {
            "in_channels": 4 + 6, "image_dim": 16, "added_kv_proj_dim": 24,
        }),
        "image_encoder": ("CLIPVisionModel", {
            **VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
            "projection_dim": 16,
        }),
        "image_processor": ("CLIPImageProcessor", {
            "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
        }),
    }),
    "wan_ti2v": ("WanPipeline", WAN | {
        "scheduler": ("UniPCMultistepScheduler", UNIPC | {"flow_shift": 5.0}), "expand_timesteps": True,
    }),
    "z_image": ("ZImagePipeline", {
        "transformer": ("ZImageTransformer2DModel", {
            "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 16, "axes_dims": [8, 4, 4], "axes_lens": [512, 128, 128],
        }),
        "scheduler": flow(shift=6.0), "vae": KL_VAE, "tokenizer": chat_tokenizer,
        "text_encoder": ("Qwen3Model", LANGUAGE),
    }),
}
"""Family → (class of its pipeline, its arguments: components, functions that make one, and plain values)."""
# fmt: on


def build(pipeline: str, arguments: Mapping[str, Any]) -> Any:
    """The pipeline of a row of FAMILIES, with random weights, and random statistics where a VAE has some."""
    parts: dict[str, Any] = {}
    for name, argument in arguments.items():
        parts[name] = argument
        if callable(argument):
            parts[name] = argument()
        elif isinstance(argument, tuple):
            parts[name] = _component(*argument)
        if isinstance(parts[name], torch.nn.Module):
            for key, buffer in parts[name].named_buffers():
                if key.endswith("mean"):
                    torch.nn.init.normal_(buffer, std=0.2)
                elif key.endswith(("std", "var")):
                    torch.nn.init.uniform_(buffer, 0.5, 1.5)
    kind = getattr(diffusers, pipeline)
    if not issubclass(kind, diffusers.ModularPipeline):
        return kind(**parts)
    pipe = kind()
    pipe.update_components(**parts)
    return pipe


def _component(name: str, config: dict[str, Any]) -> Any:
    """A component; models of transformers take their configuration as an object."""
    cls = next(getattr(library, name) for library in (diffusers, transformers, ltx2) if hasattr(library, name))
    return cls(cls.config_class(**config)) if issubclass(cls, transformers.PreTrainedModel) else cls(**config)


def prompts(folder: Path, sources: bool) -> Path:
    """Write a few prompts into `folder`, as edits of one image if `sources`; the prompt file."""
    texts = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]
    file = folder / ("prompts.jsonl" if sources else "prompts.txt")
    if sources:
        Image.new("RGB", (48, 48), (180, 60, 40)).save(folder / "source.png")
        texts = [json.dumps({"prompt": text, "source_image": "source.png"}) for text in texts]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


EDITS = ("flux_kontext", "flux2_klein")
"""Families that need no source image but have recipes for edits: their tiny prompts have one."""


def make(family: str, folder: str | Path, seed: int = 0, **scheduler: Any) -> Path:
    """Write a tiny pipeline with random weights, a few prompts and a prefgrpo.yaml with matching values; its folder.

    scheduler: overrides for the scheduler's config. Raises ModelError for an unknown family.
    """
    if family not in FAMILIES:
        raise ModelError(f"no tiny pipeline of family '{family}': expected one of {', '.join(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = build(*FAMILIES[family])
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **scheduler)
    modular = isinstance(pipe, diffusers.ModularPipeline)
    pipe.save_pretrained(str(folder), **({"overwrite_modular_index": True} if modular else {}))
    cls = model_family(family)
    side = 64 if family.startswith("flux2") else 32
    length = {"flux2": 1000, "hunyuan_video_15": 1000, "flux3": 160}.get(
        family, 128
    )  # includes a system message; one token per letter
    file = prompts(Path(folder).resolve(), cls.needs_source or family in EDITS)
    rollout = {"height": side, "width": side, "steps": 2, "window_low": 0, "window_high": 0, "window_size": 1}
    rollout |= {"prompts_per_step": 4} | ({} if cls.default_frames is None else {"frames": 5})
    rollout |= {} if cls.default_source_area is None else {"source_area": side * side}
    values = {
        "parallel": {"shard": 1, "ring": 1, "ulysses": 1},
        "data": {"max_length": length, "prompts": str(file)}, "rollout": rollout,
        "eval": {"height": side, "width": side, "steps": 2},
    }  # fmt: skip
    head = "# Values that replace those of a recipe whose --model is this folder: small enough for a CPU.\n"
    (Path(folder) / MODEL_VALUES).write_text(head + to_yaml(values))
    return Path(folder)
