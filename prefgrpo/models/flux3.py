"""FLUX.3: patchified latents [4C, h, w] normalised by the VAE's batch-norm statistics, time = σ, guidance 3.5.

Conditions: eight stacked states of the Qwen3-VL language model, in a window of a multiple of 80 tokens whose padding
the denoiser attends to, without a mask: the window is part of the condition, which is stored and batched whole. For
editing also the references' latents: tokens of a mode of their own, at time 0, with −1, −2, … in the last position
channel. Prompts are encoded as they are given: the pipeline's first block, which has a 9B language model rewrite them,
is left out. Context parallelism: none, as diffusers has no plan for this denoiser.
Invariant: with `ode` steps the images are those of the stock Flux3ModularPipeline without that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.decoders import Flux3DecodeStep
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from PIL import Image
from torch import Tensor, nn

from prefgrpo.models.base import Condition, Sampling
from prefgrpo.models.folder import ModelError
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.modular import ModularAdapter
from prefgrpo.models.vae import decode_image, encode

IMAGE_ROPE_SCALE = 0.5
"""Rows and columns count half: a constant of diffusers' block."""
DISTILLED = "Flux3DistilledModularPipeline"
"""The pipeline of the step-distilled model."""


class Flux3(ModularAdapter):
    """FLUX.3 text-to-image and editing with up to ten references."""

    pipeline = "Flux3ModularPipeline"
    not_read = ("prompt_upsampler",)
    most_sources = 10
    attention_masks = "padding"  # texts differ in length; without context parallelism none is padded
    cfg = Cfg()
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.linear_in", "ff.linear_out")
    comfy_names = (  # the names of the original, which diffusers reads too
        (r"^transformer\.", "diffusion_model."),
        (r"\.mode_blocks\.", ".content_mode_blocks."),
        (r"\.single_transformer_blocks\.", ".single_blocks."),
        (r"\.attn\.to_([qkv])\.", r".\1_proj."),
        (r"\.attn\.to_out\.0\.", ".attn_out."),
        (r"\.ff\.linear_(in|out)\.", r".mlp_\1."),
    )

    def __init__(self, pipe: Any, **options: Any) -> None:
        """Raises ModelError for a step-distilled model (`flow_map`)."""
        super().__init__(pipe, **options)
        if self.transformer.config.flow_map:  # type: ignore[union-attr]
            raise ModelError(
                "this FLUX.3 is step-distilled (a flow map): it predicts the mean velocity up to the time that a step "
                "jumps to, which neither a step with noise nor the noised samples of an objective on final images "
                "have; train the base model, whose LoRA may be tried with it"
            )

    @classmethod
    def unsupported_index(cls, index: dict[str, Any]) -> str:
        """As in `Adapter`; the step-distilled pipeline passes, so that `__init__` can say why it is rejected."""
        own = {"_class_name": cls.pipeline} if index.get("_class_name") == DISTILLED else {}
        return super().unsupported_index(index | own)

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, 8C], n a multiple of 80 or max_length."""
        embeds = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            text_encoder=self.pipe.text_encoder,
            tokenizer=self.pipe.tokenizer,
            prompt=prompt,
            device=self.device,
            max_sequence_length=max_length,
            pad_multiple=self.pipe.blocks.sub_blocks["text_encoder"].pad_multiple,
            hidden_states_layers=self.pipe.default_call_parameters["text_encoder_out_layers"],
        )
        return Condition(embeds[0])

    def source_tensors(self, sources: tuple[Image.Image, ...], frames: int | None) -> list[Tensor]:
        """Normalised latents [rows, columns, 4C] of each reference: a single one whole, padded to whole tokens; of
        several, each of at most a million pixels and cropped to whole tokens."""
        mode = "fill" if len(sources) == 1 else "crop"
        encoded = []
        for source in sources:
            pixels, _ = self.pipe.image_processor.preprocess(source, resize_mode=mode)
            encoded.append(self.latents_of(pixels)[0].permute(1, 2, 0))
        return encoded

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, 4C, h, w]: encode, patchify, apply the batch norm."""
        latents = Flux3VaeEncoderStep._patchify_latents(encode(self.pipe.vae, pixels))
        mean, std = self._statistics(latents.device, latents.dtype)
        return (latents - mean) / std

    def _statistics(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [1, 4C, 1, 1] of the VAE's batch norm."""
        bn = self.pipe.vae.bn
        variance = bn.running_var.view(1, -1, 1, 1) + self.pipe.vae.config.batch_norm_eps
        return bn.running_mean.view(1, -1, 1, 1).to(device, dtype), torch.sqrt(variance).to(device, dtype)

    def latent_shape(self, sampling: Sampling) -> tuple[int, ...]:
        """[4C, height / 16, width / 16] where the VAE's scale is 8."""
        return self.pipe.transformer.config.in_channels, *self.grid(sampling)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, 4C, h, w]; the transformer sees tokens [B, h · w, 4C], and those of the references."""
        embeds = condition.prompt_embeds
        references: dict[str, Tensor] = {}
        if condition.sources:
            grids = tuple(source.shape[1:3] for source in condition.sources)
            references["image_cond_hidden_states"] = torch.cat([s.flatten(1, 2) for s in condition.sources], dim=1)
            references["image_cond_ids"] = _image_ids(grids, x.device, references=True)
        v = net(
            hidden_states=x.flatten(2).transpose(1, 2),
            encoder_hidden_states=embeds,
            timestep=(sigma * 1000 / 1000).to(x.dtype),
            img_ids=_image_ids((self.grid(sampling),), x.device),
            txt_ids=_text_ids(embeds.shape[1], x.device),
            **references,
            return_dict=False,
        )[0]
        return v.transpose(1, 2).reshape(x.shape)

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Undo the batch norm, unpatchify, decode."""
        mean, std = self._statistics(latents.device, latents.dtype)
        return decode_image(self.pipe, Flux3DecodeStep._unpatchify_latents(latents * std + mean))


@lru_cache(maxsize=64)
def _image_ids(grids: Sequence[tuple[int, int]], device: torch.device, references: bool = False) -> Tensor:
    """Position ids [total tokens, 4] of images with these (rows, columns): one that is generated, or references."""
    ids = [
        _prepare_image_ids(*grid, IMAGE_ROPE_SCALE, l_coord=-(1 + number) if references else 0)
        for number, grid in enumerate(grids)
    ]
    return torch.cat(ids).to(device)


@lru_cache(maxsize=64)
def _text_ids(length: int, device: torch.device) -> Tensor:
    """Position ids [length, 4]."""
    return Flux3TextRoPEInputsStep._prepare_text_ids(torch.empty(1, length)).to(device)
