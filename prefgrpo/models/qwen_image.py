"""Qwen-Image: packed 2×2 latents [L, 4C], time = σ, true guidance 4.0 rescaled to the conditional prediction's norm.

Conditions: states of the Qwen2.5-VL language model, as long as the prompt. Invariant: with `ode` steps the images
are those of the stock QwenImagePipeline with negative prompt " ".
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.lengths import text_mask
from prefgrpo.models.lora import JOINT_ATTENTION
from prefgrpo.models.vae import decode_image, unnormalise


class QwenImage(Adapter):
    """Qwen-Image text-to-image."""

    pipeline = "QwenImagePipeline"
    packed = True
    own_lengths = True
    attention_masks = "padding"
    context_parallel = "ulysses"
    cfg = Cfg(rescale=True, negative=" ")
    lora_targets = JOINT_ATTENTION

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, and text_length = n."""
        return self.embed(prompt, max_sequence_length=max_length)

    def embed(self, prompt: str, **options: Any) -> Condition:
        """Call the pipeline's own `encode_prompt` with one prompt."""
        embeds, _ = self.pipe.encode_prompt(prompt=[prompt], device=self.device, **options)
        return Condition(embeds[0], text_length=torch.tensor(embeds.shape[1]))

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C]."""
        return self.forward(net, x, sigma, condition, [self.grid(sampling)])

    def forward(
        self, net: nn.Module, tokens: Tensor, sigma: Tensor, condition: Condition, grids: list[tuple[int, int]]
    ) -> Tensor:
        """Run the transformer on the tokens [B, L, 4C] of one or several images of (rows, columns) tokens.

        A mask is passed only if the batch has prompts of different lengths, or context parallelism pads them.
        """
        mask, lengths = text_mask(condition, self.text_multiple), condition.text_length
        assert lengths is not None
        padded = int(lengths.min()) < mask.shape[1]
        embeds = condition.prompt_embeds[:, : mask.shape[1]]
        embeds = nn.functional.pad(embeds, (0, 0, 0, mask.shape[1] - embeds.shape[1]))
        return net(
            hidden_states=tokens,
            timestep=(sigma * 1000).to(tokens.dtype) / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask.to(tokens.device, non_blocking=True) if padded else None,
            img_shapes=[[(1, *grid) for grid in grids]] * tokens.shape[0],
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode a clip of one frame."""
        grid = QwenImagePipeline._unpack_latents(latents, sampling.height, sampling.width, self.pipe.vae_scale_factor)
        return decode_image(self.pipe, unnormalise(self.pipe.vae, grid))
