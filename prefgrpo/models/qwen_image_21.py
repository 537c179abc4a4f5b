"""Qwen-Image-2.1: packed latents [L, C], one token per 16×16 pixels, time = σ, no guidance by default.

Conditions: states of the Qwen3-VL language model, as long as the prompt (of any length in the stock pipeline). The VAE
has an alpha channel; images are composited onto white. Invariant: with `ode` steps the images are those of the stock
QwenImage21Pipeline for one prompt, with negative prompt " " if guidance is on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_image, encode, normalise, unnormalise


class QwenImage21(Adapter):
    """Qwen-Image-2.1 text-to-image."""

    pipeline = "QwenImage21Pipeline"
    packed = True
    attention_masks = "own"
    cfg = Cfg(negative=" ")
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out",
    )  # fmt: skip

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens, both even, because each of the language model's image slots is 2 × 2 tokens."""
        rows, columns = super().grid(sampling)
        return 2 * rows, 2 * columns

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens."""
        embeds, _, _ = self.pipe.encode_prompt([prompt], device=self.device)
        return Condition(embeds[0, :max_length])

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The sigmas of a few-step model (ValueError for another number of steps), else evenly spaced ones."""
        sigmas = self.pipe.config.sample_sigmas
        if sigmas is None:
            return super().schedule_options(sampling)
        if len(sigmas) != sampling.steps:
            raise ValueError(
                f"this model has {len(sigmas)} sampling sigmas: expected as many steps, got {sampling.steps}"
            )
        return {"sigmas": np.array(sigmas), "mu": self.mu(sampling)}

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, C]; the transformer sees one sequence, text followed by image."""
        count, tokens = x.shape[:2]
        text = condition.prompt_embeds.shape[1]
        slots = (torch.arange(text + tokens // 4, device=x.device) >= text).expand(count, -1)
        return net(
            hidden_states=x,
            timestep=(sigma * 1000).to(x.dtype) / 1000,
            encoder_hidden_states=condition.prompt_embeds,
            img_shapes=[[(1, *self.grid(sampling))]] * count,
            img_mask=slots,
            return_dict=False,
        )[0][:, -tokens:]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode a clip of one frame, composite it onto white."""
        rows, columns = self.grid(sampling)
        grid = latents.transpose(1, 2).reshape(len(latents), -1, 1, rows, columns)
        image = decode_image(self.pipe, unnormalise(self.pipe.vae, grid))
        return image[:, :3] * image[:, 3:] + (1 - image[:, 3:])

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, L, C], of an opaque clip of one frame."""
        opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1).unsqueeze(2)
        return normalise(self.pipe.vae, encode(self.pipe.vae, opaque)).flatten(2).transpose(1, 2)
