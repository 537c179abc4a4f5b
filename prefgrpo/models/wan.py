"""Wan: latents [C, F', h, w] of 4·(F' − 1) + 1 frames, time = 1000σ; from text, from an image, with two experts.

Conditions: UMT5 states, zero-padded. The published folders come with a multistep solver; only its shift is used.
Invariant: with `ode` steps the clips are those of the stock WanPipeline, or from a source image those of the stock
WanImageToVideoPipeline, with an Euler scheduler of that shift.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_clip, encode, normalise, unnormalise
from prefgrpo.models.video import PatchVideo

NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""The published code's negative prompt (`sample_neg_prompt`); the stock pipelines have none."""


class Wan(PatchVideo):
    """Wan2.1 T2V, 1.3B and 14B: guidance 5.0."""

    pipeline = "WanPipeline"
    default_frames = 81
    frame_rate = 16.0
    parts_in_fp32 = ("vae", "image_encoder")  # bf16 would change pixels by 6/255 (benchmarks/vae_precision.py)
    context_parallel = "ring"
    cfg = Cfg(negative=NEGATIVE)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    comfy_names = (
        (r"^transformer\.", "diffusion_model."),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"\.to_out\.0\.", ".o."),
        (r"\.add_([kv])_proj\.", r".\1_img."),
        (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
        (r"\.ffn\.net\.2\.", ".ffn.2."),
    )

    @property
    def most_tokens(self) -> int:
        """The length of each axis of its rotary embedding."""
        config: Any = self.transformer.config
        return int(config.rope_max_seq_len)

    expand_timesteps: ClassVar[bool] = False
    """Whether every token has its own timestep."""

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """Also compares expand_timesteps."""
        expand = bool(index.get("expand_timesteps"))
        difference = f"has expand_timesteps {expand}, {cls.__name__} has {cls.expand_timesteps}"
        return super().unsupported_index(index) or ("" if expand is cls.expand_timesteps else difference)

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [max_length, C]."""
        embeds, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_length, device=self.device
        )
        return Condition(embeds[0])

    def attention_tokens(self, sampling: Sampling, max_length: int) -> list[tuple[int, int]]:
        """Latent tokens attend to themselves, then to the text."""
        tokens = self.tokens(sampling)
        return [(tokens, tokens), (tokens, max_length)]

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The scheduler's own sigmas."""
        return {}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        return self.forward(net, x, sigma * 1000, condition)

    def forward(
        self, net: nn.Module, x: Tensor, time: Tensor, condition: Condition, image_embeds: Tensor | None = None
    ) -> Tensor:
        """Run the transformer at time [B], or [B, tokens]."""
        return net(
            hidden_states=x,
            timestep=time,
            encoder_hidden_states=condition.prompt_embeds,
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the VAE's normalisation, decode to [B, F, 3, H, W]."""
        return decode_clip(self.pipe, unnormalise(self.pipe.vae, latents))

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, C, F', h, w]."""
        return normalise(self.pipe.vae, encode(self.pipe.vae, pixels))

    def encode_frame(self, image: Image.Image, frames: int = 1) -> Tensor:
        """Latents [C, F', h, w] of a clip whose first frame is `image` at its own size, other frames zero, as in Wan's
        stock image-to-video pipeline."""
        first = self.pipe.video_processor.preprocess(image, height=image.height, width=image.width).unsqueeze(2)
        clip = torch.cat([first, first.new_zeros(*first.shape[:2], frames - 1, *first.shape[3:])], dim=2)
        return self.latents_of(clip)[0]


class Wan22(Wan):
    """Wan2.2 T2V-A14B: `transformer` (guidance 4.0) if 1000σ ≥ 1000 · 0.875, else `transformer_2` (guidance 3.0).

    σ is compared on the host. Both experts are trained, each at the steps that it computes.
    """

    default_guidance_2 = 3.0
    denoisers = ("transformer", "transformer_2")

    def expert(self, sigma: Tensor, sampling: Sampling) -> tuple[str, float]:
        """The expert of a batch, and its guidance scale. Raises ValueError for σ on both sides of the boundary."""
        high = sigma * 1000 >= self.pipe.config.boundary_ratio * 1000  # in timesteps, like the stock pipeline
        if bool(high.any()) != bool(high.all()):
            raise ValueError(f"expected a batch of one expert's σ, got {sigma.tolist()}")
        if high.all():
            return self.denoisers[0], sampling.guidance
        return self.denoisers[1], self.default_guidance_2 if sampling.guidance_2 is None else sampling.guidance_2


class WanI2V(Wan):
    """Wan2.1 I2V 14B (480p, 720p): extra channels hold a mask and the latents of a clip that starts with the image.

    A CLIP image encoder sees the image as well. A run resizes the image to the output's size.
    """

    pipeline = "WanImageToVideoPipeline"
    most_sources = 1
    needs_source = True
    lora_targets = (*Wan.lora_targets, "add_k_proj", "add_v_proj")

    def source_tensors(self, sources: tuple[Image.Image, ...], frames: int | None) -> list[Tensor]:
        """Latents [C, F', h, w] of a clip that starts with the source and (Wan2.1) its CLIP image states [n, C']."""
        latents = self.encode_frame(sources[0], frames or self.default_frames)
        if self.pipe.transformer.config.image_dim is None:
            return [latents]
        if self.pipe.image_encoder is None:
            raise RuntimeError("the pipeline was loaded without its image encoder: load it with encoders=True")
        return [latents, self.pipe.encode_image(sources[0], self.device)[0]]

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        if not condition.sources:
            raise ValueError(f"{type(self).__name__} makes a clip from an image: expected one per prompt, got none")
        latents, *image_embeds = condition.sources
        first_frame = torch.zeros_like(x[:, :1]).repeat(1, self.pipe.vae_scale_factor_temporal, 1, 1, 1)
        first_frame[:, :, 0] = 1
        x = torch.cat([x, first_frame, latents.to(x)], dim=1)
        return self.forward(net, x, sigma * 1000, condition, *image_embeds)


class Wan22I2V(Wan22, WanI2V):
    """Wan2.2 I2V-A14B: two experts, boundary 0.9, no CLIP."""

    pipeline = "WanImageToVideoPipeline"
    default_guidance_2 = 3.5
    lora_targets = Wan.lora_targets


class WanTI2V(Wan):
    """Wan2.2 TI2V-5B: one timestep per token, from text alone or from a first frame.

    The first frame's tokens have time 0, and its latents replace x there. Their velocity is a constant 0 without
    gradient; after the last step the frame's latents are put in place.
    """

    default_frames = 121
    frame_rate = 24.0
    most_sources = 1
    expand_timesteps = True

    def encode_source(self, source: Image.Image) -> Tensor:
        """Latents [C, 1, h, w] of the first frame."""
        return self.encode_frame(source)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, F', h, w]."""
        patch = self.patch
        time = (sigma * 1000)[:, None, None, None].repeat(1, x.shape[2], x.shape[3] // patch, x.shape[4] // patch)
        if not condition.sources:
            return self.forward(net, x, time.flatten(1), condition)
        time[:, 0] = 0
        v = self.forward(net, self.final(x, condition), time.flatten(1), condition)
        return torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, 1:]], dim=2)

    def final(self, x: Tensor, condition: Condition) -> Tensor:
        """x with the first frame's latents in place."""
        return torch.cat([condition.sources[0].to(x), x[:, :, 1:]], dim=2) if condition.sources else x
