"""Tiny random pipelines of every model family, from the real diffusers and transformers classes.

`make(family, folder)` writes one with `save_pretrained`: below 2 MB, below a second, no downloads (tokenizers are
built here). They prove the plumbing of a family, not its quality. Invariant: equal (family, seed) give equal weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    CLIPTextModelWithProjection,
    Qwen3ForCausalLM,
    Qwen3Model,
    UMT5Config,
    UMT5EncoderModel,
)

from prefgrpo.config.schema import MODEL_VALUES
from prefgrpo.models import family as model_family
from prefgrpo.tiny.parts import (
    CLIP_WIDTH,
    QWEN_WIDTH,
    TEXT_WIDTH,
    clip_text,
    clip_tokenizer,
    clip_vision,
    image_vae,
    qwen3_text,
    qwen_processor,
    qwen_tokenizer,
    qwen_vl_text,
    t5_text,
    t5_tokenizer,
)


def flux(pipeline: str = "FluxPipeline") -> Any:
    """FLUX.1: 2 double and 2 single blocks of width 32, embedded guidance, dynamic shift."""
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH, guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return getattr(diffusers, pipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0), vae=image_vae(),
        text_encoder=clip_text(clip), tokenizer=clip, text_encoder_2=t5_text(t5), tokenizer_2=t5,
        transformer=transformer,
    )  # fmt: skip


def sd1() -> Any:
    """Stable Diffusion 1: a UNet of widths 16 and 32, DDIM."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    clip = clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1,
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=image_vae(), text_encoder=clip_text(clip), tokenizer=clip, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sd3() -> Any:
    """SD3.5-medium: 2 joint blocks of width 32, the first with dual attention, three text encoders, static shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * TEXT_WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT_WIDTH, pos_embed_max_size=32, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=image_vae(), transformer=transformer,
        text_encoder=clip_text(clip, CLIPTextModelWithProjection), tokenizer=clip,
        text_encoder_2=clip_text(clip, CLIPTextModelWithProjection), tokenizer_2=clip,
        text_encoder_3=t5_text(t5, width=2 * TEXT_WIDTH), tokenizer_3=t5,
    )  # fmt: skip


def qwen_image(pipeline: str = "QwenImagePipeline") -> Any:
    """Qwen-Image (or its editors): 2 dual-stream blocks of width 32, a 3-D VAE, dynamic shift to a last σ.

    The VAE halves each side once; that of the editors thrice, as the real one, because sources become a million pixels.
    """
    import diffusers
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    tokenizer, edits = qwen_tokenizer(), "Edit" in pipeline
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=QWEN_WIDTH, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
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


def wan(experts: bool = False, frame: bool = False, expand: bool = False) -> Any:
    """Wan: 2 blocks of width 24, a causal VAE that quarters each side and halves time; UniPC.

    experts: Wan2.2, a second denoiser below σ = 0.875. frame: image-to-video, through CLIP too unless there are
    experts. expand: Wan2.2 TI2V.
    """
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )

    t5, seen = t5_tokenizer(), frame and not experts
    own: dict[str, Any] = {} if expand else {"boundary_ratio": (0.9 if frame else 0.875) if experts else None}
    transformers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4 + 6 * frame,
            out_channels=4, text_dim=TEXT_WIDTH, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=64,
            image_dim=CLIP_WIDTH if seen else None, added_kv_proj_dim=24 if seen else None,
        )
        for _ in range(1 + experts)
    ]  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 0.8, 1.2, 0.9],
        scale_factor_temporal=2, scale_factor_spatial=4,
    )  # fmt: skip
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if expand else 3.0
    )
    return (WanImageToVideoPipeline if frame else WanPipeline)(
        scheduler=scheduler, vae=vae, tokenizer=t5,
        text_encoder=t5_text(t5, UMT5EncoderModel, UMT5Config), transformer=transformers[0],
        transformer_2=transformers[1] if experts else None, expand_timesteps=expand, **own,
        **(clip_vision() if seen else {}),
    )  # fmt: skip


def hunyuan_video() -> Any:
    """HunyuanVideo: a double and a single block of width 24, embedded guidance, a causal VAE of an eighth a side."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import LlamaConfig, LlamaModel

    clip, tokenizer = clip_tokenizer(), qwen_tokenizer()
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=QWEN_WIDTH, pooled_projection_dim=TEXT_WIDTH, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=QWEN_WIDTH, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    return HunyuanVideoPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), vae=vae, transformer=transformer,
        text_encoder=LlamaModel(llama), tokenizer=tokenizer, text_encoder_2=clip_text(clip), tokenizer_2=clip,
    )  # fmt: skip


def ltx_video() -> Any:
    """LTX-Video: 2 blocks of width 32, a VAE of an eighth a side and half the frames, dynamic shift to a last σ."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    t5 = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=TEXT_WIDTH,
    )  # fmt: skip
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False), patch_size=4,
        decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False,) * 3,
        down_block_types=("LTXVideoDownBlock3D",) * 2, downsample_type=("conv",) * 2, upsample_residual=(False,) * 2,
        upsample_factor=(1, 1),
    )  # fmt: skip
    torch.nn.init.normal_(vae.latents_mean, std=0.2)
    torch.nn.init.uniform_(vae.latents_std, 0.5, 1.5)
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=1024, base_shift=0.95, max_shift=2.05, shift_terminal=0.1,
        ),
        vae=vae, transformer=transformer,
        text_encoder=t5_text(t5), tokenizer=t5,
    )  # fmt: skip


def z_image() -> Any:
    """Z-Image: 2 blocks and one refiner of each kind, width 32, static shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=QWEN_WIDTH, axes_dims=[8, 4, 4], axes_lens=[512, 32, 32],
    )  # fmt: skip
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0), vae=image_vae(), tokenizer=tokenizer,
        text_encoder=qwen3_text(tokenizer, Qwen3Model, 2), transformer=transformer,
    )  # fmt: skip


def flux2_klein() -> Any:
    """FLUX.2-klein base: 2 double and 2 single blocks of width 32, text states of three of 28 layers."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    tokenizer = qwen_tokenizer()
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * QWEN_WIDTH, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )  # fmt: skip
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32,
    )  # fmt: skip
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, tokenizer=tokenizer,
        text_encoder=qwen3_text(tokenizer, Qwen3ForCausalLM, 28), transformer=transformer,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "flux": flux,
    "flux_kontext": partial(flux, "FluxKontextPipeline"),
    "flux2_klein": flux2_klein,
    "hunyuan_video": hunyuan_video,
    "ltx_video": ltx_video,
    "qwen_image": qwen_image,
    "qwen_image_edit": partial(qwen_image, "QwenImageEditPipeline"),
    "qwen_image_edit_plus": partial(qwen_image, "QwenImageEditPlusPipeline"),
    "sd1": sd1,
    "sd3": sd3,
    "wan": wan,
    "wan22": partial(wan, experts=True),
    "wan22_i2v": partial(wan, experts=True, frame=True),
    "wan_i2v": partial(wan, frame=True),
    "wan_ti2v": partial(wan, expand=True),
    "z_image": z_image,
}
"""Family name → builder of its tiny pipeline."""


SMALL = """\
# What replaces a recipe's values when this folder is its --model: little enough for a CPU.
gpus: 1
data: {{max_length: 128, prompts: {prompts}}}
rollout:
  height: {side}
  width: {side}
  steps: 2
  window_low: 0
  window_high: 0
  window_size: 1
  prompts_per_step: 4{own}
eval: {{height: {side}, width: {side}, steps: 2}}
"""


def prompts(folder: Path, sources: bool) -> Path:
    """Write a few prompts into `folder`, of edits of one picture if `sources`, and return their file."""
    texts = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]
    file = folder / ("prompts.jsonl" if sources else "prompts.txt")
    if sources:
        Image.new("RGB", (48, 48), (180, 60, 40)).save(folder / "source.png")
        texts = [json.dumps({"prompt": text, "source_image": "source.png"}) for text in texts]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def make(family: str, folder: str | Path, seed: int = 0, **scheduler: Any) -> Path:
    """Write the tiny pipeline of a family, a few prompts and the values of a recipe that fit it into `folder`.

    Returns the folder.

    scheduler: overrides its scheduler's config.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tiny pipeline of family '{family}': expected one of {', '.join(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = FAMILIES[family]()
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **scheduler)
    pipe.save_pretrained(folder)
    cls, side = model_family(family), 64 if family.startswith("flux2") else 32
    own = "" if cls.default_frames is None else "\n  frames: 5"
    own += "" if cls.default_source_area is None else f"\n  source_area: {side * side}"
    file = json.dumps(str(prompts(Path(folder).resolve(), cls.needs_source)))
    (Path(folder) / MODEL_VALUES).write_text(SMALL.format(side=side, own=own, prompts=file))
    return Path(folder)
