"""Tiny random pipelines of every model family, from the real diffusers and transformers classes.

`make(family, folder)` writes one with `save_pretrained`: under 2 MB, in under a second, without downloads (tokenizers
are built here). They test a family's code, not its quality. Invariant: equal (family, seed) give equal weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import diffusers
import torch
import transformers
import tyro
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2Tokenizer, T5Config, T5EncoderModel, T5Tokenizer

from prefgrpo.config.recipe import to_yaml
from prefgrpo.config.schema import MODEL_VALUES
from prefgrpo.models import family as model_family
from prefgrpo.models.folder import ModelError
from prefgrpo.models.processors import PixtralProcessor, Qwen2VLProcessor, Qwen3VLProcessor

TEXT_WIDTH = 32
QWEN_WIDTH = CLIP_WIDTH = 16
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
               "<|image_pad|>", "<|video_pad|>")  # fmt: skip
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_OF_PARTS = CHAT.replace("message['content']", "message['content'] | map(attribute='text') | join")


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
    """CLIP text model with two layers; `cls` may be the variant with a projection."""
    return cls(
        transformers.CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width, projection_dim=width,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def t5_text(
    tokenizer: Any, cls: type[Any] = T5EncoderModel, config: type[Any] = T5Config, width: int = TEXT_WIDTH
) -> Any:
    """T5 (or UMT5) encoder with two layers."""
    return cls(
        config(
            vocab_size=len(tokenizer), d_model=width, d_ff=width, d_kv=8, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip


def qwen_tokenizer(*more: str) -> Qwen2Tokenizer:
    """Byte-level Qwen tokenizer without merges, with its special tokens (plus `more`) and a chat template."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *QWEN_TOKENS, *more]
    tokenizer = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], extra_special_tokens=[*QWEN_TOKENS[1:], *more],
        model_max_length=4096,
    )  # fmt: skip
    tokenizer.chat_template = CHAT
    return tokenizer


def language_config(tokenizer: Qwen2Tokenizer, layers: int = 2, **more: Any) -> dict[str, Any]:
    """Configuration of a language model of width 16, by default with grouped queries."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": QWEN_WIDTH, "intermediate_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


def qwen3_text(tokenizer: Qwen2Tokenizer, cls: type[Any], layers: int) -> Any:
    """Qwen3 language model of width 16."""
    return cls(transformers.Qwen3Config(**language_config(tokenizer, layers)))


def qwen_vl_text(tokenizer: Qwen2Tokenizer, layers: int = 2) -> Any:
    """Qwen2.5-VL of width 16, with its vision tower."""
    token = tokenizer.convert_tokens_to_ids
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=language_config(
                tokenizer, layers, num_key_value_heads=2, bos_token_id=token("<|endoftext|>"),
                eos_token_id=token("<|im_end|>"),
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            ),
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
    """Processor for text and images; an image becomes at most 4 tokens."""
    return Qwen2VLProcessor(transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56), tokenizer)


def image_vae(channels: int = 4) -> Any:
    """AutoencoderKL that halves each side once."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=channels, norm_num_groups=4, sample_size=32,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def clip_vision() -> dict[str, Any]:
    """CLIP image encoder of width 16 and its processor."""
    config = transformers.CLIPVisionConfig(
        hidden_size=CLIP_WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        patch_size=8, projection_dim=CLIP_WIDTH,
    )  # fmt: skip
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": transformers.CLIPVisionModel(config), "image_processor": processor}


def flux(pipeline: str = "FluxPipeline") -> Any:
    """FLUX.1: 2 double and 2 single blocks of width 32, embedded guidance, dynamic shift."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH, guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return getattr(diffusers, pipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0), vae=image_vae(),
        text_encoder=clip_text(clip), tokenizer=clip, text_encoder_2=t5_text(t5), tokenizer_2=t5,
        transformer=transformer,
    )  # fmt: skip


def sd3() -> Any:
    """SD3.5-medium: 2 joint blocks of width 32, the first with dual attention, three text encoders, static shift."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * TEXT_WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT_WIDTH, pos_embed_max_size=32, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=image_vae(), transformer=transformer,
        text_encoder=clip_text(clip, transformers.CLIPTextModelWithProjection), tokenizer=clip,
        text_encoder_2=clip_text(clip, transformers.CLIPTextModelWithProjection), tokenizer_2=clip,
        text_encoder_3=t5_text(t5, width=2 * TEXT_WIDTH), tokenizer_3=t5,
    )  # fmt: skip


def qwen_image(pipeline: str = "QwenImagePipeline") -> Any:
    """Qwen-Image (or its editors): 2 dual-stream blocks of width 32, a 3-D VAE, dynamic shift to a last σ.

    The VAE halves each side once; the editors' three times, like the real one, because sources have a million pixels.
    """
    tokenizer, edits = qwen_tokenizer(), "Edit" in pipeline
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=QWEN_WIDTH, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4 if edits else 8, z_dim=4, dim_mult=[1, 2, 2, 2] if edits else [1, 2], num_res_blocks=1,
        temperal_downsample=[False] * (3 if edits else 1),
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 0.8, 1.2, 0.9],
    )  # fmt: skip
    return getattr(diffusers, pipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02,
        ),
        vae=vae, text_encoder=qwen_vl_text(tokenizer), tokenizer=tokenizer, transformer=transformer,
        **({"processor": qwen_processor(tokenizer)} if edits else {}),
    )  # fmt: skip


def qwen3_vl_text(tokenizer: Qwen2Tokenizer) -> Any:
    """Qwen3-VL of width 16, with its vision tower."""
    token = tokenizer.convert_tokens_to_ids
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            text_config=language_config(
                tokenizer, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
            ),
            vision_config={
                "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": QWEN_WIDTH,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        )
    )  # fmt: skip


def qwen_image_21() -> Any:
    """Qwen-Image-2.1: 2 blocks of width 32, an RGBA VAE with 16× downsampling, dynamic shift to a last σ."""
    tokenizer = qwen_tokenizer()
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        context_in_dim=QWEN_WIDTH, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1, 2, 2, 2, 2], num_res_blocks=1,
        temperal_downsample=[False] * 4, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 0.8, 1.2, 0.9],
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64)
    return diffusers.QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02,
        ),
        vae=vae, text_encoder=qwen3_vl_text(tokenizer), transformer=transformer,
        processor=Qwen3VLProcessor(images, tokenizer, chat_template=CHAT_OF_PARTS),
    )  # fmt: skip


def wan(experts: bool = False, frame: bool = False, expand: bool = False) -> Any:
    """Wan: 2 blocks of width 24, a causal VAE that quarters each side and halves time; UniPC.

    experts: Wan2.2, with a second denoiser below σ = 0.875. frame: image-to-video, with CLIP image features unless
    `experts`. expand: Wan2.2 TI2V.
    """
    t5, seen = t5_tokenizer(), frame and not experts
    own: dict[str, Any] = {} if expand else {"boundary_ratio": (0.9 if frame else 0.875) if experts else None}
    denoisers = [
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4 + 6 * frame,
            out_channels=4, text_dim=TEXT_WIDTH, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=64,
            image_dim=CLIP_WIDTH if seen else None, added_kv_proj_dim=24 if seen else None,
        )
        for _ in range(1 + experts)
    ]  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 0.8, 1.2, 0.9],
        scale_factor_temporal=2, scale_factor_spatial=4,
    )  # fmt: skip
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if expand else 3.0
    )
    return (diffusers.WanImageToVideoPipeline if frame else diffusers.WanPipeline)(
        scheduler=scheduler, vae=vae, tokenizer=t5,
        text_encoder=t5_text(t5, transformers.UMT5EncoderModel, transformers.UMT5Config), transformer=denoisers[0],
        transformer_2=denoisers[1] if experts else None, expand_timesteps=expand, **own,
        **(clip_vision() if seen else {}),
    )  # fmt: skip


def hunyuan_video() -> Any:
    """HunyuanVideo: a double and a single block of width 24, embedded guidance, a causal VAE with 8× downsampling."""
    clip, tokenizer = clip_tokenizer(), qwen_tokenizer()
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=QWEN_WIDTH, pooled_projection_dim=TEXT_WIDTH, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip
    llama = transformers.LlamaConfig(**language_config(tokenizer, 3, num_key_value_heads=2))
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    return diffusers.HunyuanVideoPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), vae=vae, transformer=transformer,
        text_encoder=transformers.LlamaModel(llama), tokenizer=tokenizer, text_encoder_2=clip_text(clip),
        tokenizer_2=clip,
    )  # fmt: skip


def hunyuan_video_15() -> Any:
    """HunyuanVideo-1.5: 2 blocks of width 24, a causal VAE that quarters each side and halves time.

    18 MB, because the class contains a projection of fixed width.
    """
    qwen, byt5 = qwen_tokenizer(), transformers.ByT5Tokenizer()
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=QWEN_WIDTH, text_embed_2_dim=TEXT_WIDTH,
        image_embed_dim=CLIP_WIDTH, rope_axes_dim=(4, 4, 4), task_type="t2v",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 16, 16), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )  # fmt: skip
    return diffusers.HunyuanVideo15Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), vae=vae, transformer=transformer,
        text_encoder=qwen_vl_text(qwen, 3).model.language_model, tokenizer=qwen, text_encoder_2=t5_text(byt5),
        tokenizer_2=byt5, guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def gemma3_text(tokenizer: Qwen2Tokenizer) -> Any:
    """Gemma 3 of width 16, with its vision tower."""
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=language_config(tokenizer, pad_token_id=tokenizer.pad_token_id),
            vision_config={
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
            mm_tokens_per_image=4, image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        )
    )  # fmt: skip


def ltx2() -> Any:
    """LTX-2: 2 blocks of widths 24 (video) and 16 (audio), VAEs that halve the video's sides and time; a last σ."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    tokenizer = qwen_tokenizer()
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=QWEN_WIDTH, rope_type="split",
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=QWEN_WIDTH, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8, video_connector_num_layers=1, video_connector_num_learnable_registers=16,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=16, rope_type="split",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,), layers_per_block=(1,), decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False,) * 2,
        downsample_type=("spatial",), upsample_type=("spatiotemporal",), upsample_residual=(False,),
        upsample_factor=(1,), patch_size=1, decoder_causal=False,
    )  # fmt: skip
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=8, resolution=32,
        mid_block_add_attention=False,
    )  # fmt: skip
    for part in (vae, audio_vae):
        torch.nn.init.normal_(part.latents_mean, std=0.2)
        torch.nn.init.uniform_(part.latents_std, 0.5, 1.5)
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
    )  # fmt: skip
    return diffusers.LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=1024, base_shift=0.95, max_shift=2.05, shift_terminal=0.1,
        ),
        vae=vae, audio_vae=audio_vae, vocoder=vocoder, transformer=transformer, connectors=connectors,
        text_encoder=gemma3_text(tokenizer), tokenizer=tokenizer,
    )  # fmt: skip


def z_image() -> Any:
    """Z-Image: 2 blocks and one refiner of each kind, width 32, static shift."""
    tokenizer = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=QWEN_WIDTH, axes_dims=[8, 4, 4], axes_lens=[512, 32, 32],
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0), vae=image_vae(), tokenizer=tokenizer,
        text_encoder=qwen3_text(tokenizer, transformers.Qwen3Model, 2), transformer=transformer,
    )  # fmt: skip


def mistral3_text(tokenizer: Qwen2Tokenizer) -> Any:
    """Mistral 3 with width 16 and 31 layers, with its vision tower."""
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config=language_config(tokenizer, 31, model_type="mistral"),
            vision_config={
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
            },
            image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        )
    )  # fmt: skip


def pixtral_processor(tokenizer: Qwen2Tokenizer) -> Any:
    """Processor for text."""
    images = transformers.PixtralImageProcessor(size={"longest_edge": 28}, patch_size=14)
    return PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=CHAT_OF_PARTS)


def flux2(klein: bool = False) -> Any:
    """FLUX.2: 2 double and 2 single blocks of width 32, hidden states of 3 of 31 text layers (klein, base: of 28)."""
    tokenizer = qwen_tokenizer(*() if klein else PIXTRAL_TOKENS)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * QWEN_WIDTH, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=not klein,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32,
    )  # fmt: skip
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    parts = {"scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "transformer": transformer}
    if klein:
        text = qwen3_text(tokenizer, transformers.Qwen3ForCausalLM, 28)
        return diffusers.Flux2KleinPipeline(vae=vae, tokenizer=tokenizer, text_encoder=text, **parts)
    processor, text = pixtral_processor(tokenizer), mistral3_text(tokenizer)
    return diffusers.Flux2Pipeline(vae=vae, tokenizer=processor, text_encoder=text, **parts)


FAMILIES: dict[str, Callable[[], Any]] = {
    "flux": flux,
    "flux_kontext": partial(flux, "FluxKontextPipeline"),
    "flux2": flux2,
    "flux2_klein": partial(flux2, klein=True),
    "hunyuan_video": hunyuan_video,
    "hunyuan_video_15": hunyuan_video_15,
    "ltx2": ltx2,
    "qwen_image": qwen_image,
    "qwen_image_edit": partial(qwen_image, "QwenImageEditPipeline"),
    "qwen_image_edit_plus": partial(qwen_image, "QwenImageEditPlusPipeline"),
    "qwen_image_21": qwen_image_21,
    "sd3": sd3,
    "wan": wan,
    "wan22": partial(wan, experts=True),
    "wan22_i2v": partial(wan, experts=True, frame=True),
    "wan_i2v": partial(wan, frame=True),
    "wan_ti2v": partial(wan, expand=True),
    "z_image": z_image,
}
"""Family name → builder of its tiny pipeline."""


def prompts(folder: Path, sources: bool) -> Path:
    """Write a few prompts into `folder`, as edits of one image if `sources`; the prompt file."""
    texts = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]
    file = folder / ("prompts.jsonl" if sources else "prompts.txt")
    if sources:
        Image.new("RGB", (48, 48), (180, 60, 40)).save(folder / "source.png")
        texts = [json.dumps({"prompt": text, "source_image": "source.png"}) for text in texts]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def make(
    family: Annotated[str, tyro.conf.arg(metavar="FAMILY")],
    folder: Annotated[str | Path, tyro.conf.arg(metavar="FOLDER")],
    seed: int = 0,
    **scheduler: Any,
) -> Path:
    """Write a tiny pipeline with random weights, a few prompts and a prefgrpo.yaml with matching values.

    Args:
        family: Model family, e.g. flux (the README lists all).
        folder: Folder to write to.
        seed: Seed of the random weights.
        scheduler: Overrides for the scheduler's config (in Python only).
    """
    if family not in FAMILIES:
        raise ModelError(f"no tiny pipeline of family '{family}': expected one of {', '.join(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = FAMILIES[family]()
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **scheduler)
    pipe.save_pretrained(folder)
    cls, side = model_family(family), 64 if family.startswith("flux2") else 32
    length = 1000 if family in ("flux2", "hunyuan_video_15") else 128  # includes a system message; one token per letter
    file = prompts(Path(folder).resolve(), cls.needs_source)
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
